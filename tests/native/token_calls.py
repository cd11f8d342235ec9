"""Valid calls of the native function that gathers tokens, and checks of what it made."""

from __future__ import annotations

from typing import Any

import torch

from tests.native.drawing import OTHER_DTYPES, Draw, Library, Prepared, assert_equal


def gather_tokens(lib: Library, draw: Draw) -> Prepared:
    size, width = draw.number(1, draw.one_of(6, 300)), draw.number(0, draw.one_of(3, 40))
    dtype = draw.one_of(*OTHER_DTYPES)
    rows = draw.integers(0, 2 if dtype == torch.bool else 100, size, width).to(dtype)
    nodes = draw.integers(0, size, draw.number(0, draw.one_of(5, 300))).int()
    out = torch.zeros(len(nodes), width, dtype=dtype)
    held = draw.integers(0, 2, size).bool() if draw.flag() else None
    cache: list[Any] = [None, None, None]
    if held is not None:
        words = torch.zeros(-(-size // 64) * 64, dtype=torch.bool)
        words[:size] = held
        per_word = words.view(-1, 64)
        bits = (per_word.long() << torch.arange(64)).sum(1)
        before = (per_word.sum(1).cumsum(0) - per_word.sum(1)).int()
        cache = [bits, before, rows[held]]
    call = {
        "rows": rows,
        "is_elsewhere": draw.flag(),
        "cache_bits": cache[0],
        "cache_before": cache[1],
        "cache_rows": cache[2],
        "nodes": nodes,
        "out": out,
    }

    def check(hits: Any) -> None:
        assert_equal(out, rows[nodes.long()])
        assert hits == (0 if held is None else int(held[nodes.long()].sum()))

    return call, check


TOKEN_CALLS = (gather_tokens,)
