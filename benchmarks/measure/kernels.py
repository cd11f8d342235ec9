"""Gather bandwidth of the operators, and the cost of a routed call."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from fastgraph import Graph
from fastgraph.graphs.edges import graph_of
from fastgraph.graphs.graph import Csr
from fastgraph.machine import native
from fastgraph.ops import segment_reduce, spmm
from fastgraph.tune.row_order import RowOrder
from measure.cell import Effort
from measure.gather import CHANNELS, MinimalLoops
from measure.graphs import GraphData
from measure.layers import LAYERS, without_linear
from measure.routing import expect_routed, ordering_after, ours_enabled
from measure.timing import Contestant, Spread, interleave


def measure_bandwidth(graph: GraphData, loops: MinimalLoops, effort: Effort) -> dict[str, Any]:
    """GB/s of gathered rows: our operators on plain sums and maxima beside the minimal loops.

    All read rows in the same order; the loop that writes does so from the first row to the last,
    where the operators may have another order. The native calls leave out what an operator does in
    Python, but not the memory for the output.
    """
    torch.manual_seed(0)
    x = torch.randn(graph.num_nodes, CHANNELS)
    index = graph.edge_index
    with ordering_after(0):
        spmm(x, index)
    rows = RowOrder(native.library)(graph_of(index, None, len(x), len(x)), x, transpose=False)
    contestants = [
        Contestant("minimal_read", loops.read(rows.ptr, rows.col, x)),
        Contestant("minimal_sum", loops.sum(rows.ptr, rows.col, x)),
        Contestant("spmm", lambda: spmm(x, index)),
        Contestant("segment_reduce", lambda: segment_reduce(x, index)),
        Contestant("native_spmm", lambda: native_sum(rows, x)),
        Contestant("native_segment_reduce", lambda: _native_max(rows, x)),
    ]
    for contestant in contestants:
        contestant.turn(2)
    interleave(contestants, rounds=effort.rounds, budget=effort.budget / 2)
    gathered = graph.num_edges * CHANNELS * x.element_size()
    return {
        c.name: {**c.spread.to_json(), "gb_per_s": gathered / (c.spread.median * 1e-3) / 1e9}
        for c in contestants
    }


def native_sum(
    rows: Csr, x: Tensor, weight: Tensor | None = None, row_scale: Tensor | None = None
) -> None:
    native.library().spmm(*rows.arguments, weight, row_scale, None, x, torch.empty_like(x))


def _native_max(rows: Csr, x: Tensor, *, ties: bool = False) -> None:
    record = torch.empty_like(x, dtype=torch.int32) if ties else None
    native.library().segment_reduce(
        *rows.arguments, None, True, x, torch.empty_like(x), record, None
    )


def measure_routed_call(graph: GraphData, channels: int, calls: int) -> dict[str, Any]:
    """Forward of a layer that is nothing but ``propagate``, beside its kernel, in microseconds.

    The native call makes its output too, since every caller needs one.
    """
    torch.manual_seed(0)
    x = torch.randn(graph.num_nodes, channels)
    result: dict[str, Any] = {}
    for name, case in LAYERS.items():
        if case.bare_options is None:
            continue
        for training in (False, True):
            native = _native_call(name, graph, x, training=training)
            if native is None:
                continue
            features = x.clone().requires_grad_(training)
            layer = without_linear(case.build(channels, **case.bare_options))

            def routed(layer: Any = layer, features: Tensor = features) -> None:
                layer(features, graph.edge_index)

            mode = "training" if training else "inference"
            expected = functools.partial(expect_routed, layer)
            result[f"{name} {mode}"] = beside_native(native, routed, calls, expected)
    return result


def beside_native(
    native: Callable[[], object],
    routed: Callable[[], object],
    calls: int,
    expected: Callable[[], AbstractContextManager[object]],
) -> dict[str, Any]:
    """How long both take in turns, and what is between them, in microseconds.

    Args:
        native: calls the kernel.
        routed: calls what ends in it.
        calls: of each.
        expected: entered around calls that are not counted; fails where these have no route.
    """
    contestants = [Contestant("native", native), Contestant("routed", routed)]
    with ours_enabled():
        with expected():
            interleave(contestants, rounds=(20, 20), budget=1)
        for contestant in contestants:
            contestant.seconds.clear()
            contestant.estimate = 1e-3
        interleave(contestants, rounds=(calls, calls), budget=0)
    cost = 1e3 * (contestants[1].spread.median - contestants[0].spread.median)
    return {**{c.name: c.spread.to_json() for c in contestants}, "overhead_us": cost}


def _native_call(
    layer: str, graph: GraphData, x: Tensor, *, training: bool
) -> Callable[[], object] | None:
    num_nodes = graph.num_nodes
    index, weight = graph.edge_index, None
    if layer == "GCN":
        index, weight = gcn_norm(index, num_nodes=num_nodes)
    topology = Graph(index, num_nodes, num_nodes)
    rows = topology.by_destination
    if layer == "SAGE-max":
        return lambda: _native_max(rows, x, ties=training)
    if layer not in ("GCN", "SAGE-mean"):
        return None
    scale = None
    if layer == "SAGE-mean":
        scale = topology.inverse_degree(transpose=False, dtype=x.dtype)
    return lambda: native_sum(rows, x, weight, scale)


_IMPORT = """
import time
start = time.perf_counter()
import torch
between = time.perf_counter()
import fastgraph
end = time.perf_counter()
{more}
print(between - start, end - between, time.perf_counter() - end)
"""


def measure_import(runs: int) -> dict[str, Any]:
    """Milliseconds of ``import torch``, then ``import fastgraph``, then ``enable()``."""
    script = _IMPORT.format(more="fastgraph.enable()")
    seconds = []
    for _ in range(runs):
        output = subprocess.run(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, check=True, text=True
        ).stdout
        seconds.append([float(word) for word in output.split()])
    names = ("torch", "fastgraph", "enable")
    return {
        name: Spread.of(column).to_json()
        for name, column in zip(names, np.transpose(seconds).tolist(), strict=True)
    }
