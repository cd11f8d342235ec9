"""Rows of tokens, gathered from a table and from a cache of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastgraph.tokens.row_cache import most_read

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)


def _table(rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    return torch.randint(0, 200, (rows, width), generator=generator).to(dtype)


def _nodes(count: int, size: int) -> Tensor:
    return torch.randint(0, size, (count,), generator=torch.Generator().manual_seed(3)).int()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [0, 1, 3, 15, 16, 17, 100, 300])
def test_rows_follow_each_other(lib: Any, width: int, dtype: torch.dtype) -> None:
    table, nodes = _table(50, width, dtype), _nodes(203, 50)
    out = torch.full((203, width), 7, dtype=dtype)
    assert lib.gather_tokens(table, False, None, None, None, nodes, out) == 0
    assert torch.equal(out, table[nodes.long()])


@pytest.mark.parametrize("width", [5, 75, 2500])
@pytest.mark.parametrize("offset", [0, 1])
def test_large_results_go_past_caches(lib: Any, width: int, offset: int) -> None:
    """Wherever rows begin; nothing before and behind them is written."""
    count = (1 << 22) // width + 130
    table, nodes = _table(60, width), _nodes(count, 60)
    memory = torch.full((count * width + 32,), -1.0)
    out = memory[offset : offset + count * width].view(count, width)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        lib.gather_tokens(table, False, None, None, None, nodes, out)
        assert torch.equal(out, table[nodes.long()])
        assert bool((memory[:offset] == -1).all())
        assert bool((memory[offset + count * width :] == -1).all())
        out.zero_()


@pytest.mark.parametrize("size", [1, 63, 64, 65, 200])
def test_rows_of_a_cache_are_read_there(lib: Any, size: int) -> None:
    table = _table(size, 9)
    counts = (torch.arange(size) % 5).int()
    counts[-1] = 9
    cache = most_read(table, counts, 12 * -(-size // 64) + 36 * max(1, size // 3))
    assert cache is not None
    held = counts >= counts.sort(descending=True).values[max(1, size // 3) - 1]
    spoiled = table.clone()
    is_held = torch.zeros(size, dtype=torch.bool)
    for node in range(size):
        is_held[node] = bool(cache.bits[node // 64] >> (node % 64) & 1)
    assert int(is_held.sum()) == len(cache.rows) == max(1, size // 3)
    assert bool(held[is_held].all())
    spoiled[is_held] = -5  # what is in the cache is not read elsewhere
    nodes = _nodes(150, size)
    out = torch.empty(150, 9)
    hits = lib.gather_tokens(spoiled, False, cache.bits, cache.before, cache.rows, nodes, out)
    assert torch.equal(out, table[nodes.long()])
    assert hits == int(is_held[nodes.long()].sum())


def test_wrong_arguments_are_named(best: Any) -> None:
    table, nodes, out = _table(70, 4), _nodes(6, 70), torch.empty(6, 4)
    cache = most_read(table, torch.ones(70, dtype=torch.int32), 1 << 20)
    assert cache is not None
    held = (cache.bits, cache.before, cache.rows)

    def refused(error: type[Exception], message: str, *arguments: Any) -> None:
        with pytest.raises(error, match=message):
            best.gather_tokens(arguments[0], False, *arguments[1:])

    for bad in (-1, 70, 2**31 - 1):
        wrong = torch.cat([nodes[:5], torch.tensor([bad]).int()])
        for cached in ((None,) * 3, held):
            refused(IndexError, f"nodes holds {bad}, expected 0 <=", table, *cached, wrong, out)
    none = (None,) * 3
    refused(TypeError, "nodes must be int32, got int64", table, *none, nodes.long(), out)
    refused(TypeError, "rows must have elements", table.to(torch.complex128), *none, nodes, out)
    refused(ValueError, "rows must have 2 dimensions", table[0], *none, nodes, out)
    refused(ValueError, "rows must be contiguous", table[:, ::2], *none, nodes, out)
    refused(ValueError, "out must have a row for each of 6", table, *none, nodes, out[:5])
    refused(ValueError, "out must have rows of 16 bytes", table, *none, nodes, out.half())
    short = (cache.bits, cache.before, cache.rows[:, :2].contiguous())
    refused(ValueError, "cache_rows must have rows of 16 bytes", table, *short, nodes, out)
    short = (cache.bits[:1], cache.before, cache.rows)
    refused(ValueError, r"cache_bits must have shape \[2\]", table, *short, nodes, out)
    refused(ValueError, "cache_before and cache_rows must", table, held[0], None, None, nodes, out)
    for before in (cache.before + 60, cache.before - 71):
        lies = (cache.bits, before, cache.rows)
        refused(ValueError, "cache_rows must have the row of each", table, *lies, nodes, out)


def test_rows_of_files_may_be_asked_for_first(best: Any, tmp_path: Path) -> None:
    """Wherever the table begins, and in memory that is no file's."""
    table, nodes = _table(5000, 31), _nodes(2000, 5000)
    path = tmp_path / "rows"
    path.write_bytes(b"head" + table.numpy().tobytes())
    mapped = torch.from_numpy(np.memmap(path, np.float32, "c", 4, (5000, 31)))
    cache = most_read(table, (torch.arange(5000) % 2).int(), 100_000)
    assert cache is not None
    for rows in (mapped, table):
        for held in ((None, None, None), (cache.bits, cache.before, cache.rows)):
            out = torch.empty(2000, 31)
            best.gather_tokens(rows, True, *held, nodes, out)
            assert torch.equal(out, table[nodes.long()])
