"""Calls of every kernel on small awkward graphs, with what the reference makes of them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor

from fastgraph.backends import reference
from fastgraph.edge_programs.builder import Builder
from fastgraph.edge_programs.program import Place
from fastgraph.graphs.graph import Graph
from fastgraph.plugins.backend import accumulator
from fastgraph.registry.operators import ATTENTIONS, Attention

EDGE_DIM, TYPES = 3, 5
_SHAPES = ((1, 7), (2, 33), (4, 32))
"""Heads and channels: odd and even, below and above the width of a vector and of a warp."""


@attrs.frozen(eq=False)
class GraphCase:
    """A graph by its edges, built once on each device where it is used."""

    name: str
    edge_index: Tensor
    num_src: int
    num_dst: int
    _built: dict[torch.device, Graph] = attrs.field(factory=dict, init=False)

    def on(self, device: torch.device) -> Graph:
        """The graph there."""
        if device not in self._built:
            self._built[device] = Graph(self.edge_index.to(device), self.num_src, self.num_dst)
        return self._built[device]


class Case(NamedTuple):
    """A call of one kernel.

    Attributes:
        operator: its name in the registry.
        description: graph, widths and options.
        graph: ``None`` for kernels without one.
        arguments: those behind the graph. Tensors are float64 on the CPU, and of values that the
            dtype of the call has.
        keywords: the same by name.
    """

    operator: str
    description: str
    graph: GraphCase | None
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


@functools.cache
def graphs() -> tuple[GraphCase, ...]:
    """A bipartite graph with hubs, rows without edges, edges twice and self-loops; and no edges."""
    generator = torch.Generator().manual_seed(0)
    sources, destinations, edges = 41, 57, 300
    src = torch.randint(sources - 2, (edges,), generator=generator)
    dst = torch.randint(destinations - 2, (edges,), generator=generator)
    src[:120], dst[100:220] = 3, 5  # longer than a warp and than what is unrolled
    loops = torch.arange(20)
    index = torch.stack([torch.cat([src, src[:40], loops]), torch.cat([dst, dst[:40], loops])])
    order = torch.randperm(index.shape[1], generator=generator)
    nothing = torch.empty(2, 0, dtype=torch.int64)
    return (
        GraphCase("hubs", index[:, order], sources, destinations),
        GraphCase("no edges", nothing, 2, 3),
    )


class _Values:
    """Random tensors whose values a dtype has, so that all contestants start from the same."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._generator = torch.Generator().manual_seed(1)

    def normal(self, *shape: int, of: torch.dtype | None = None) -> Tensor:
        values = torch.randn(shape, generator=self._generator, dtype=torch.float64)
        return values.to(of or self.dtype).double()

    def types(self, count: int) -> Tensor:
        """Rows of a table of biases."""
        return torch.randint(TYPES, (count,), generator=self._generator).to(torch.uint8)

    def tied(self, *shape: int) -> Tensor:
        """Of few values, so that the extremum of a row is there several times."""
        return torch.randint(-2, 3, shape, generator=self._generator).double()


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """All calls for one dtype."""
    values = _Values(dtype)
    hubs, nothing = graphs()
    calls = [(hubs, shape) for shape in _SHAPES] + [(nothing, _SHAPES[1])]
    for graph, (heads, channels) in calls:
        yield from _sums(values, graph, heads, channels)
        yield from _extrema(values, graph, heads * channels)
        yield from _softmaxes(values, graph, heads)
        yield from _programs(values, graph, heads, channels)
        for operator in ATTENTIONS:
            yield from _attention(values, graph, operator, heads, channels)
    for heads, channels in _SHAPES:
        yield from _head_scores(values, heads, channels)
        yield from _all_pairs(values, [3, 0, 1, 40, 130], heads, channels)


def typical() -> dict[str, Case]:
    """One call of each kernel in float32, by its name, on a graph as layers have them."""
    generator = torch.Generator().manual_seed(0)
    nodes, edges, heads, channels = 5_000, 50_000, 4, 16
    index = torch.randint(nodes, (2, edges), generator=generator)
    graph, values = GraphCase("random", index, nodes, nodes), _Values(torch.float32)
    found: dict[str, Case] = {}
    for made in (
        _sums(values, graph, heads, channels),
        _extrema(values, graph, heads * channels),
        _softmaxes(values, graph, heads),
        _programs(values, graph, heads, channels),
        *(_attention(values, graph, o, heads, channels) for o in ATTENTIONS),
        _head_scores(values, heads, channels),
        _all_pairs(values, [25] * (nodes // 25), heads, channels),
    ):
        # The first of each, which is the plain sum or maximum, without features of edges.
        for case in itertools.islice(made, 3):
            found.setdefault(case.operator, case)
    return found


def _sums(values: _Values, graph: GraphCase, heads: int, channels: int) -> Iterator[Case]:
    width = heads * channels
    edges = graph.edge_index.shape[1]
    for transpose, reduce in itertools.product((False, True), ("sum", "mean", "mean_adjoint")):
        num_in, num_out = _ends(graph, transpose)
        x, grad = values.normal(num_in, width), values.normal(num_out, width)
        weights = (None,) if reduce != "sum" else (None, values.normal(edges, heads))
        where = f"{graph.name}, {heads} x {channels}, {reduce}{_turned(transpose)}"
        for weight in weights:
            weighted = where if weight is None else f"{where}, weighted"
            yield Case("spmm", weighted, graph, (x, weight, reduce, transpose), {})
        yield Case("sddmm", where, graph, (grad, x, heads, reduce, transpose), {})


def _extrema(values: _Values, graph: GraphCase, width: int) -> Iterator[Case]:
    edges = graph.edge_index.shape[1]
    choices = itertools.product((False, True), ("max", "min"), ("split", "winner", "none"))
    for transpose, reduce, ties in choices:
        if transpose and ties == "winner":  # which edge that is depends on how rows were made
            continue
        num_in, num_out = _ends(graph, transpose)
        x, grad = values.tied(num_in, width), values.normal(num_out, width)
        where = f"{graph.name}, {width}, {reduce}, {ties}{_turned(transpose)}"
        weights = (None, values.tied(edges)) if ties != "split" else (None,)
        for weight in weights:
            weighted = where if weight is None else f"{where}, weighted"
            call = (x, weight, reduce, transpose, ties)
            yield Case("segment_reduce", weighted, graph, call, {})
            if ties != "none":
                on_cpu = graph.on(torch.device("cpu"))
                out, record = reference.segment_reduce(on_cpu, *call)
                if ties == "split":  # as kernels write it that say which edge has all
                    winner = reference.segment_reduce(on_cpu, *call[:-1], "winner")[1]
                    record = torch.where((record == 1) & (winner >= 0), ~winner, record)
                backward = (grad, x, weight, out, record, transpose, ties)
                yield Case("segment_reduce_backward", weighted, graph, backward, {})


def _softmaxes(values: _Values, graph: GraphCase, heads: int) -> Iterator[Case]:
    edges = graph.edge_index.shape[1]
    for transpose in (False, True):
        where = f"{graph.name}, {heads} heads{_turned(transpose)}"
        score, grad = 4 * values.normal(edges, heads), values.normal(edges, heads)
        out = reference.edge_softmax(graph.on(torch.device("cpu")), score, transpose)
        rounded = out.to(values.dtype).double()
        yield Case("edge_softmax", where, graph, (score, transpose), {})
        yield Case("edge_softmax_backward", where, graph, (rounded, grad, transpose), {})


def _programs(values: _Values, graph: GraphCase, heads: int, channels: int) -> Iterator[Case]:
    """Sums of weighted features; several reductions of values of all kinds; and products of edges.

    The last are of small integers, which all types have, so that maxima are known.
    """
    width = heads * channels
    for transpose in (False, True):
        num_in, num_out = _ends(graph, transpose)
        where = f"{graph.name}, {heads} x {channels}{_turned(transpose)}"
        shapes: dict[str, tuple[Place, int, int]] = {
            "x": ("gathered", num_in, width),
            "w": ("edge", graph.edge_index.shape[1], heads),
            "q": ("row", num_out, width),
        }
        for is_plain in (True, False):
            make = Builder()
            taken = ("w", "x") if is_plain else ("w", "x", "q")
            given = {name: make.operand(name, shapes[name][0], shapes[name][2]) for name in taken}
            message = given["w"] * given["x"]
            if is_plain:
                program = make.program(("sum", message))
            else:
                gate = make.apply("sigmoid", given["q"] + given["x"])
                program = make.program(
                    ("mean", gate * message),
                    ("max", given["x"]),
                    ("max_ties", given["x"]),
                    ("softmax", message, given["w"]),
                )
            tensors = [
                values.tied(num_in, width)
                if name == "x" and not is_plain
                else values.normal(*shapes[name][1:])
                for name in program.names
            ]
            what = where if is_plain else f"{where}, several reductions"
            yield Case("edge_program", what, graph, (tensors, program, transpose), {})
        make, few = Builder(), heads + 2
        ends = make.operand("x", "gathered", width) - make.operand("q", "row", width)
        first, second = (make.operand(name, "parameter", width * few) for name in "ab")
        hidden = make.apply("relu", make.product(ends, first, few))
        mapped = make.product(hidden, second, width, is_transposed=True)
        small = mapped * (1 / 64)  # so that no sum over edges is beyond float16
        program = make.program(
            ("max", mapped), ("mean", hidden), ("outer", ends, hidden), ("outer", hidden, small)
        )
        tensors = [
            values.tied(num_in, width),
            values.tied(num_out, width),
            *(values.tied(few * width) for _ in range(2)),
        ]
        what = f"{where}, products of edges"
        yield Case("edge_program", what, graph, (tensors, program, transpose), {})


def _attention(
    values: _Values, graph: GraphCase, operator: Attention, heads: int, channels: int
) -> Iterator[Case]:
    forward: Callable[..., Any] = getattr(reference, operator.name)
    for transpose, with_edges in itertools.product((False, True), (False, True)):
        dropout = 0.25 if with_edges else 0.0
        sources, destinations = _ends(graph, transpose)
        sizes = {
            "sources": sources,
            "destinations": destinations,
            "edges": graph.edge_index.shape[1],
            "heads": heads,
            "channels": channels,
            "edge_dim": EDGE_DIM if with_edges else 0,
            "types": TYPES,
        }
        tensors = [
            None
            if operand.optional and not with_edges
            else values.types(*_shape(operand.shape, sizes))
            if operand.counts
            else values.normal(*_shape(operand.shape, sizes))
            for operand in operator.operands
        ]
        scale = channels**-0.5 if operator.option == "scale" else 0.2
        options = (transpose, scale, dropout, 7)
        out = _shape(operator.out, sizes)
        where = f"{graph.name}, {heads} x {channels}{_turned(transpose)}"
        if with_edges:
            where += ", features of edges, dropout"
        addend = values.normal(*out) if with_edges else None
        yield Case(
            operator.name,
            where,
            graph,
            (*tensors, *options, with_edges),
            {"addend": addend},
        )
        _, stats, _ = forward(graph.on(torch.device("cpu")), *tensors, *options, with_edges)
        wide = accumulator(values.dtype)
        gradients = (
            values.normal(*out),
            values.normal(sizes["edges"], heads) if with_edges else None,
            values.normal(destinations, heads, of=wide) if with_edges else None,
        )
        backward = (*gradients, *tensors, stats.to(wide).double(), *options)
        yield Case(f"{operator.name}_backward", where, graph, backward, {})


def _head_scores(values: _Values, heads: int, channels: int) -> Iterator[Case]:
    nodes, count = 41, 2
    x, att = values.normal(nodes, heads, channels), values.normal(count, heads, channels)
    grad, addend = values.normal(count, nodes, heads), values.normal(nodes, heads, channels)
    where = f"{heads} x {channels}"
    yield Case("head_scores", where, None, (x, att), {})
    yield Case("head_scores_backward", where, None, (x, att, grad), {"addend": addend})


def _all_pairs(values: _Values, sizes: list[int], heads: int, channels: int) -> Iterator[Case]:
    ptr = torch.tensor([0, *sizes]).cumsum(0)
    nodes, wide = sum(sizes), accumulator(values.dtype)
    tensors = [values.normal(nodes, heads, channels) for _ in range(3)]
    pairs = sum(size * size for size in sizes)
    types = (torch.arange(pairs) * 7 % 5).to(torch.uint8)
    for dropout, bias, pair_type in (
        (0.0, None, None),
        (0.25, None, None),
        (0.0, values.normal(pairs, heads), None),
        (0.25, values.normal(5, heads), types),
    ):
        kind = "no bias" if bias is None else "a bias" if pair_type is None else "a table"
        where = f"graphs of {max(sizes)}, {heads} x {channels}, dropout {dropout}, {kind}"
        topology = (ptr, ptr, pair_type)
        options = channels**-0.5, dropout, 7, 3, 2**32 - 3
        given: tuple[Any, ...] = (*tensors, bias, *topology, *options)
        yield Case("dense_attention", where, None, given, {})
        out, stats = reference.dense_attention(*given)
        known = out.to(values.dtype).double(), stats.to(wide).double()
        gradients = values.normal(nodes, heads, channels), values.normal(nodes, heads, of=wide)
        backward = (*gradients, *given[:7], *known, *given[7:], bias is not None)
        yield Case("dense_attention_backward", where, None, backward, {})


def _ends(graph: GraphCase, transpose: bool) -> tuple[int, int]:
    """Numbers of gathered and of aggregating nodes."""
    sizes = graph.num_src, graph.num_dst
    return (sizes[1], sizes[0]) if transpose else sizes


def _shape(shape: tuple[int | str, ...], sizes: dict[str, int]) -> list[int]:
    def size(part: int | str) -> int:
        if isinstance(part, int):
            return part
        return sum(sizes[name] for name in part.split(" + "))

    return [size(part) for part in shape]


def _turned(transpose: bool) -> str:
    return ", turned round" if transpose else ""
