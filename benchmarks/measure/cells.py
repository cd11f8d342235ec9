"""The cells of a GPU benchmark: in which order they are measured, and how."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastgraph import settings
from fastgraph.tune.fastest import recorded
from measure.agreement import Reference, require
from measure.device import (
    Contestant,
    bandwidth,
    by_host,
    cache_bytes,
    copies_beyond_cache,
    facts,
    failure,
    interleave,
    peak_bytes,
    summary,
)
from measure.graphs import CLUSTERED, SHAPES, GraphData, imitate, load
from measure.programs import PROGRAMS
from measure.rivals import (
    COMPETING,
    COMPILED,
    TURBO,
    TURBO_LAYERS,
    UPSTREAM,
    Forward,
    Rival,
    rivals,
)
from measure.routing import Counted

# Where what torch.compile makes is measured: it takes about half a minute for each, and may hang.
_COMPILED = {
    "compile": {"tolokers": None, "wing": ("Transformer",)},
    "flex_attention": {"tolokers": ("Transformer",), "wing": ("Transformer",)},
}
_FIRST_WIDTH = 256
# Measured for upstream and us in float32 only: it lies between others that tell what it would.
_BETWEEN = (128,)
# Measured at one width in float32 only, because upstream takes seconds there.
_LARGE = ("like-ogbn-products",)
# Outputs whose backward pass is timed are kept together, in memory of this size.
_KEPT_BYTES = 4 << 30


@dataclass(frozen=True)
class Cell:
    """One layer on one graph, and beside what we are measured: upstream, or a package of others.

    Each of those has cells of its own, which a process of its own measures.
    """

    graph: str
    layer: str
    width: int
    dtype: torch.dtype
    beside: str = UPSTREAM

    def __str__(self) -> str:
        *place, beside = self.to_json().values()
        return " ".join(map(str, [*place, *([] if beside == UPSTREAM else ["beside", beside])]))

    def to_json(self) -> dict[str, Any]:
        return {
            "graph": self.graph,
            "layer": self.layer,
            "width": self.width,
            "dtype": str(self.dtype).removeprefix("torch."),
            "beside": self.beside,
        }


def plan(
    graphs: Sequence[str], layers: Sequence[str], widths: Sequence[int], others: Sequence[str] = ()
) -> list[Cell]:
    """All cells, those first that say most, and those last that may hang.

    Args:
        others: packages beside which we are measured, too; see :mod:`measure.rivals`.
    """
    programs = [layer for layer in layers if layer in PROGRAMS]
    layers = [layer for layer in layers if layer not in programs]
    in_clusters = [graph for graph in graphs if graph.endswith(CLUSTERED)]
    graphs = [graph for graph in graphs if graph not in in_clusters]
    first = _FIRST_WIDTH if _FIRST_WIDTH in widths else widths[0]
    more = [width for width in widths if width != first]
    cells = [Cell(g, layer, first, torch.float32) for g in graphs for layer in layers]
    # Their messages are traced in float32, and upstream stores several of them for each edge.
    cells += _even(graphs, programs, first, torch.float32)
    turbo = [layer for layer in layers if layer in TURBO_LAYERS and TURBO in others]
    cells += [Cell(g, layer, first, torch.float32, TURBO) for g in graphs for layer in turbo]
    cells += _even(graphs, layers, first, torch.bfloat16)
    # The order of nodes decides which of our kernels is the fastest, where there are several.
    competing = [layer for layer in layers if layer in COMPETING[torch.bfloat16]]
    cells += _even(in_clusters, competing, first, torch.bfloat16)
    for width in more:
        of_width = layers if width in _BETWEEN else [*layers, *programs]
        cells += _even(graphs, of_width, width, torch.float32)
    for width in more:
        if width not in _BETWEEN:
            cells += _even(graphs, layers, width, torch.bfloat16)
    for width in more:
        if width not in _BETWEEN:
            cells += _even(graphs, turbo, width, torch.float32, TURBO)
    for beside in COMPILED:
        for graph, known in _COMPILED[beside].items():
            if graph in graphs and beside in others:
                chosen = [layer for layer in layers if known is None or layer in known]
                cells += [Cell(graph, layer, first, torch.float32, beside) for layer in chosen]
    return cells


def plan_left(cells: Sequence[Cell], rows: Sequence[dict[str, Any]]) -> list[Cell]:
    """The cells of which there is no row yet."""
    done = [{key: row.get(key) for key in cells[0].to_json()} for row in rows] if cells else []
    return [cell for cell in cells if cell.to_json() not in done]


def _even(
    graphs: Sequence[str],
    layers: Sequence[str],
    width: int,
    dtype: torch.dtype,
    beside: str = UPSTREAM,
) -> list[Cell]:
    small = [graph for graph in graphs if graph not in _LARGE]
    return [Cell(graph, layer, width, dtype, beside) for graph in small for layer in layers]


class Bench:
    """Measures cells on a device while fastgraph is enabled with ``counted``."""

    def __init__(self, device: torch.device, counted: Counted) -> None:
        self._device = device
        self._counted = counted
        self._graphs: dict[str, GraphData] = {}

    @classmethod
    @contextmanager
    def opened(cls, device: torch.device, known_bytes: int) -> Iterator[Bench]:
        """A bench with our kernels for the device, for a process that does nothing else.

        Args:
            device: which it has for itself.
            known_bytes: memory for sorted graphs.
        """
        from fastgraph.backends.cpu import CpuBackend
        from fastgraph.backends.cuda import CudaBackend
        from fastgraph.backends.generated import generated_on_gpus

        is_gpu = device.type == "cuda"
        counted = Counted(CudaBackend(generated=generated_on_gpus()) if is_gpu else CpuBackend())
        why_not = counted.unavailable()
        if why_not is not None:
            sys.exit(why_not)
        with counted.enabled(known_bytes):
            yield cls(device, counted)

    def facts(self) -> dict[str, Any]:
        """The facts of this machine, the size of its last cache, and bandwidths."""
        return {
            "machine": facts(self._device),
            "cache_bytes": cache_bytes(self._device),
            "bandwidth": bandwidth(self._device),
        }

    def rows(self, cell: Cell, budget: float) -> list[dict[str, Any]]:
        """A row for each rival: errors, peak memory and time of both passes, or why it failed.

        What computes something else has failed, too, and is not timed.
        """
        try:
            graph = self._graph(cell.graph)
            found = rivals(cell.layer, graph, cell.width, cell.dtype, cell.beside)
            found = found[:2] if cell.width in _BETWEEN else found
            inputs = self._inputs(graph, cell)
            reference = self._reference(graph, cell, inputs[0])
        except Exception as error:
            return [{**cell.to_json(), "rival": "all", "failed": failure(error, self._device)}]
        rows: list[dict[str, Any]] = []
        timed: list[tuple[dict[str, Any], Contestant, Contestant]] = []
        for rival in found:
            row = {
                **cell.to_json(),
                "num_nodes": graph.num_nodes,
                "num_edges": graph.num_edges,
                "rival": rival.name,
            }
            rows.append(row)
            try:
                timed.append((row, *self._contestants(rival, inputs, reference, row)))
            except Exception as error:
                row["failed"] = failure(error, self._device)
        interleave([forward for _, forward, _ in timed], self._device, budget / 2)
        interleave([backward for _, _, backward in timed], self._device, budget / 2)
        for way in ([one[1] for one in timed], [one[2] for one in timed]):
            by_host(way, self._device)
        for row, forward, backward in timed:
            why = forward.failed or backward.failed
            if why is not None:
                row["failed"] = why
            else:
                row |= {"forward": summary(forward), "backward": summary(backward)}
        return rows

    def _graph(self, name: str) -> GraphData:
        if name not in self._graphs:
            graph = imitate(name, self._device) if name in SHAPES else load(name)
            self._graphs[name] = replace(graph, edge_index=graph.edge_index.to(self._device))
        return self._graphs[name]

    def _inputs(self, graph: GraphData, cell: Cell) -> list[Tensor]:
        """Features within (-1, 1); in float32 no two of a column are equal, and none is 0.

        Where neighbours tie for a maximum, packages rightly differ in whose gradient it is.
        """
        num = graph.num_nodes
        torch.manual_seed(0)

        def shuffled() -> Tensor:
            return torch.randperm(num, device=self._device)

        ranks = torch.stack([shuffled() for _ in range(cell.width)], dim=1)
        features = ((2 * ranks + 1.5) / num - 1).to(cell.dtype)
        size = features.numel() * features.itemsize
        return [
            features[shuffled()].requires_grad_()
            for _ in range(copies_beyond_cache(self._device, size))
        ]

    def _reference(self, graph: GraphData, cell: Cell, x: Tensor) -> Reference:
        """Upstream's result in float64, or, where memory is short, in float32, or ours."""
        torch.manual_seed(1)
        given = torch.randn_like(x)
        for number, dtype in ((0, torch.float64), (0, torch.float32), (1, torch.float32)):
            rival = rivals(cell.layer, graph, cell.width, dtype)[number]
            with suppress(torch.OutOfMemoryError):
                features = x.detach().to(dtype).requires_grad_()
                with self._context(rival):
                    out = rival.make()(features)
                    (grad,) = torch.autograd.grad(out, features, given.to(dtype))
                return Reference(rival.name, out.detach(), grad, given.detach())
        raise torch.OutOfMemoryError("for upstream and for us")

    @contextmanager
    def _context(self, rival: Rival) -> Iterator[None]:
        with (
            self._counted.running() if rival.ours else self._counted.standing_by(),
            settings.measuring() if rival.measured else nullcontext(),
        ):
            yield

    def _contestants(
        self, rival: Rival, inputs: list[Tensor], reference: Reference, row: dict[str, Any]
    ) -> tuple[Contestant, Contestant]:
        """The forward and the backward pass; both have run, and their memory is in the row.

        Raises:
            ColumnError: they compute something else than the reference.
        """

        def context() -> AbstractContextManager[None]:
            return self._context(rival)

        with recorded() as timed:
            with context():
                run = rival.make()
                out = run(inputs[0])
                grad = reference.given.view(out.shape)
            with context():
                (first,) = torch.autograd.grad(out, inputs[0], grad)
        if rival.measured:
            row["kernels"] = {
                one.kind: {name: 1e3 * seconds for name, seconds in one.seconds.items()}
                for one in timed
            }
        row["errors"] = reference.errors(rival.name, out, first)
        require(row["errors"])

        with context():
            row["peak_bytes"] = peak_bytes(
                lambda: run(inputs[0]),
                lambda again: torch.autograd.grad(again, inputs[0], grad),
                self._device,
            )
            if rival.ours:
                again = run(inputs[0])
                (second,) = torch.autograd.grad(again, inputs[0], grad)
                row["repeats"] = torch.equal(out, again) and torch.equal(first, second)
                del again, second
        del out, first
        peak = max(row["peak_bytes"].values()) if row["peak_bytes"] else None
        return self._timed(rival.name, run, inputs, grad, peak, context)

    def _timed(
        self,
        name: str,
        run: Forward,
        inputs: list[Tensor],
        grad: Tensor,
        peak: int | None,
        context: Callable[[], AbstractContextManager[None]],
    ) -> tuple[Contestant, Contestant]:
        kept = max(2, min(len(inputs), _KEPT_BYTES // max(1, peak or _KEPT_BYTES)))
        with context():
            outputs = [run(x) for x in inputs[:kept]]
        grads = [grad.clone() for _ in outputs]

        def backward(number: int) -> None:
            given = outputs[number], inputs[number], grads[number]
            torch.autograd.grad(*given, retain_graph=True)

        return (
            Contestant(name, lambda number: run(inputs[number]), len(inputs), context),
            Contestant(name, backward, kept, context),
        )
