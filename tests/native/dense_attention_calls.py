"""A valid call of each native function of attention of all pairs, and a check of what it wrote."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fastgraph.backends import reference
from fastgraph.ops.score_bias import ENTRY_TYPES
from fastgraph.plugins.backend import accumulator
from tests.native.drawing import Draw, Library, Prepared, assert_near


class DenseAttention:
    """Random inputs, and what the reference makes of them in float64.

    Attributes:
        given: the arguments of the forward pass, with memory for its results.
        inputs: the arguments of the reference.
        special: whether some numbers are none.
    """

    def __init__(self, draw: Draw) -> None:
        dtype, heads, width = draw.element(), draw.number(0, 4), draw.width()
        graphs, most = draw.number(0, 5), draw.one_of(3, 20, 150)
        ptr, key_ptr = (
            torch.tensor([0, *(draw.number(0, most) for _ in range(graphs))]).cumsum(0)
            for _ in range(2)
        )
        if draw.one_of(True, False, False):  # of several parts
            key_ptr[-1] += 520 * (graphs > 0)
        query = draw.features(dtype, int(ptr[-1]), heads, width)
        key, value = (draw.features(dtype, int(key_ptr[-1]), heads, width) for _ in range(2))
        self.special = draw.with_specials(draw.one_of(query, key, value))
        pairs, types = int((ptr.diff() * key_ptr.diff()).sum()), draw.one_of(1, 5, 200)
        pair_type = draw.integers(0, types, pairs)
        pair_type = draw.maybe(pair_type.to(draw.one_of(*ENTRY_TYPES)))
        bias = draw.features(dtype, pairs if pair_type is None else types, heads)
        if draw.flag():
            bias = pair_type = None
        seed, first_head = draw.number(-(2**63), 2**63 - 1), draw.one_of(0, 5)
        first_pair = draw.one_of(0, 7, 2**32 - 9)
        options = (0.25, draw.one_of(0.0, 0.3, 1.0), seed, first_head, first_pair)
        topology = (ptr, key_ptr, pair_type)
        wide_bias = None if bias is None else bias.double()
        wide = (query.double(), key.double(), value.double(), wide_bias)
        self.inputs = (*wide, *topology, *options)
        self.given: dict[str, Any] = {
            **{"query": query, "key": key, "value": value, "bias": bias},
            **dict(zip(("ptr", "key_ptr", "pair_type"), topology, strict=True)),
            **dict(
                zip(("scale", "dropout", "seed", "first_head", "first_pair"), options, strict=True)
            ),
            "out": torch.full_like(query, 77.0),
            "stats": torch.full((*query.shape[:2], 2), 77.0, dtype=accumulator(dtype)),
        }

    @functools.cached_property
    def exact(self) -> tuple[Tensor, Tensor] | None:
        """The reference's output and statistics; ``None`` where some numbers are none."""
        return None if self.special else reference.dense_attention(*self.inputs)


def dense_attention(lib: Library, draw: Draw) -> Prepared:
    call = DenseAttention(draw)

    def check(_: Any) -> None:
        if call.exact is not None:
            for name, expected in zip(("out", "stats"), call.exact, strict=True):
                assert_near(call.given[name], expected, 32.0, name)

    return call.given, check


def dense_attention_backward(lib: Library, draw: Draw) -> Prepared:
    call = DenseAttention(draw)
    given = call.given
    if call.exact is not None:
        for name, known in zip(("out", "stats"), call.exact, strict=True):
            given[name].copy_(known)
    names = ("query", "key", "value")
    query = given["query"]
    grad = draw.features(query.dtype, *query.shape)
    grad_logsum = draw.maybe(draw.features(given["stats"].dtype, *query.shape[:2]))
    found = {f"grad_{name}": torch.full_like(given[name], 77.0) for name in names}
    bias = draw.maybe(given["bias"]) if given["bias"] is not None else None
    found["grad_bias"] = None if bias is None else torch.full_like(bias, 77.0)

    def check(_: Any) -> None:
        if call.exact is None:
            return
        of_logsum = 0.0 if grad_logsum is None else grad_logsum.double()
        # The sum of gradients by weights is taken from the output, as it was rounded to its dtype.
        of_logsum = of_logsum + (grad.double() * (call.exact[0] - given["out"].double())).sum(-1)
        tensors, options = call.inputs[:7], call.inputs[7:]
        wanted = reference.dense_attention_backward(
            grad.double(), of_logsum, *tensors, *call.exact, *options, bias is not None
        )
        for (name, gradient), expected in zip(found.items(), wanted, strict=True):
            if gradient is not None:
                assert_near(gradient, expected, 64.0, name)

    return given | {"grad": grad, "grad_logsum": grad_logsum} | found, check


DENSE_ATTENTION_CALLS = (dense_attention, dense_attention_backward)
