"""A valid call of each native function of attention by sub-blocks, and a check of what it wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastgraph.backends import reference
from fastgraph.graphs.graph import Csr
from fastgraph.graphs.windows import windows_of
from fastgraph.ops.score_bias import ENTRY_TYPES
from fastgraph.plugins.backend import accumulator
from tests.native.drawing import Draw, Graph, Library, Prepared, assert_all_near, built, transposed


def _windows(graph: Graph) -> dict[str, Tensor]:
    return windows_of(Csr(graph.rowptr, graph.index, graph.edge_id))._asdict()


class BlockAttention:
    """Random inputs, and what the reference makes of them in float64.

    Attributes:
        inputs: tensors and the scale, as functions take them behind windows.
        results: those of the forward pass, by name.
        gradients: a function that computes them, by name, as most calls need none.
        special: whether some numbers are none.
    """

    def __init__(self, lib: Library, draw: Draw) -> None:
        graph = built(lib, draw)
        self.by_query, self.by_key = _windows(graph), _windows(transposed(lib, graph))
        dtype, heads, width = draw.element(), draw.number(0, 4), draw.width()
        types, kind = draw.one_of(1, 5, 200), draw.one_of(*ENTRY_TYPES)
        query = draw.features(dtype, graph.num_rows, heads, width)
        key, value = (draw.features(dtype, graph.num_cols, heads, width) for _ in range(2))
        table = draw.maybe(draw.features(dtype, types, heads))
        bias_index = None if table is None else draw.integers(0, types, graph.num_edges).to(kind)
        self.special = draw.with_specials(draw.one_of(query, key, value))
        tensors = {"query": query, "key": key, "value": value, "table": table}
        self.inputs: dict[str, Any] = {**tensors, "bias_index": bias_index, "scale": 0.25}
        self.grad = draw.features(dtype, *query.shape)
        of_logsum = draw.features(accumulator(dtype), graph.num_rows, heads)
        self.grad_logsum = draw.maybe(of_logsum)
        wide = [None if x is None else x.double() for x in tensors.values()]
        options = (False, 0.25, 0.0, 0)
        out, stats, _ = reference.block_attention(graph, *wide, bias_index, *options, False)
        self.stats = stats.to(accumulator(dtype))
        self.results = {"out": out, "stats": stats}

        def gradients() -> dict[str, Tensor]:
            of_sums = None if self.grad_logsum is None else self.grad_logsum.double()
            found = reference.block_attention_backward(
                graph, self.grad.double(), None, of_sums, *wide, bias_index, stats, *options
            )
            return {f"grad_{name}": g for name, g in zip(tensors, found, strict=False)}

        self.gradients = gradients
        # As for attention along edges, where many join two hubs.
        of_hub = int(torch.bincount(graph.col).max()) / 2048 if graph.num_edges else 0.0
        self.magnitude = 4.0 * (1 + width) * (1 + of_hub)

    def check(
        self,
        found: dict[str, Tensor | None],
        expected: Callable[[], dict[str, Tensor]],
        magnitude: float,
    ) -> None:
        """Results are near those that are expected."""
        if not self.special:
            assert_all_near(found, expected(), magnitude)


def block_attention(lib: Library, draw: Draw) -> Prepared:
    call = BlockAttention(lib, draw)
    found = {
        "out": torch.full_like(call.grad, 77.0),
        "stats": torch.full_like(call.stats, 77.0),
    }
    return call.by_query | call.inputs | found, lambda _: call.check(
        found, lambda: call.results, 4.0
    )


def _queries(call: BlockAttention, with_table: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The call for gradients of queries, and what it writes of them."""
    table = call.inputs["table"]
    found = {
        "grad_query": torch.full_like(call.grad, 77.0),
        "grad_table": None if table is None or not with_table else torch.full_like(table, 77.0),
    }
    given = {"stats": call.stats, "grad": call.grad, "grad_logsum": call.grad_logsum}
    delta = {"delta": torch.full_like(call.stats[..., 0], 77.0).contiguous()}
    return call.by_query | call.inputs | given | delta | found, found


def block_attention_backward_queries(lib: Library, draw: Draw) -> Prepared:
    call = BlockAttention(lib, draw)
    arguments, found = _queries(call, draw.flag())
    return arguments, lambda _: call.check(found, call.gradients, call.magnitude)


def block_attention_backward_keys(lib: Library, draw: Draw) -> Prepared:
    call = BlockAttention(lib, draw)
    before, _ = _queries(call, False)
    lib("block_attention_backward_queries", *before.values())
    names = ("key", "value")
    found = {f"grad_{name}": torch.full_like(call.inputs[name], 77.0) for name in names}
    given = {"stats": call.stats, "grad": call.grad, "delta": before["delta"]}
    arguments = call.by_key | call.inputs | given | found
    return arguments, lambda _: call.check(found, call.gradients, call.magnitude)


BLOCK_ATTENTION_CALLS = (
    block_attention,
    block_attention_backward_queries,
    block_attention_backward_keys,
)
