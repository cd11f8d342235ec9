"""Cells of ``any_message.py``: a configuration on a graph, upstream and ours in turns."""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

import fastgraph
from fastgraph.comparison.memory import release_freed, resident, restart_peak
from fastgraph.edge_programs.gradients import derive
from fastgraph.edge_programs.operations import OUTER, PRODUCT, PRODUCT_T
from fastgraph.edge_programs.program import Program
from fastgraph.layers.prepared import Prepared
from fastgraph.ops.edge_program import with_records
from fastgraph.routing.programs import last_outcome
from fastgraph.routing.status import recording
from measure.given import Given, Usual, normal
from measure.graphs import GraphData, load
from measure.pyg_usual import CONVS
from measure.pyg_usual_others import AGGREGATIONS, MODELS, POOLING
from measure.routing import ordering_after
from measure.shapes import at_random, molecules
from measure.timing import no_garbage_collection, spreads

_MADE: dict[str, Callable[[], GraphData]] = {
    "molecules": lambda: molecules(128),
    "sparse": lambda: at_random("sparse", 38_000, 578_000),
}
"""Graphs that are generated: a batch of 128 molecules, and a sparse one of 38,000 nodes."""

_SIDES = ("plain", "ours")

_WITH_MATRICES = ("FastRGCNConv", "RGATConv", "NNConv")
"""Configurations of which upstream stores a matrix for each edge, and its gradient."""
_LEAST, _MOST = 2, 15

_SHORT = 0.05
"""Seconds. A pass that takes less is timed behind another one, as a program switches sides once."""


def configurations(library: str = "pyg") -> dict[str, Usual]:
    """All of a library's, ``"pyg"`` or ``"dgl"``, by name."""
    if library == "dgl":
        from measure.dgl_usual import LAYERS

        # It frees its input, and raises where gradients are asked for by `torch.autograd.grad`.
        return {name: usual for name, usual in LAYERS.items() if name != "GroupRevRes"}
    return {**CONVS, **AGGREGATIONS, **POOLING, **MODELS}


class Step:
    """A forward pass that is timed, and the gradients of its leaves.

    Args:
        forward: the pass.
        leaves: what gradients are computed of.
    """

    def __init__(self, forward: Callable[[], Any], leaves: list[Tensor]) -> None:
        self.forward, self._leaves = forward, leaves

    def backward(self, out: Any) -> list[Tensor | None]:
        """The gradients, ``None`` for what was not used."""
        total = sum((part.sum() for part in _differentiable(out)), torch.zeros(()))
        if not total.requires_grad:
            return []
        return list(torch.autograd.grad(total, self._leaves, allow_unused=True))


class Bench:
    """The cells of a graph and a number of channels.

    Args:
        graph: its name.
        channels: of nodes.
        seconds: how long a cell is measured, but for its first rounds.
        library: whose layers are measured.
    """

    def __init__(self, graph: str, channels: int, seconds: float, library: str = "pyg") -> None:
        self._graph, self._channels, self._seconds = graph, channels, seconds
        self._library = library
        self._data: GraphData | None = None

    def least_memory(self, name: str) -> int:
        """Bytes that upstream needs at least for both passes of a configuration; 0 if not known."""
        if name not in _WITH_MATRICES:
            return 0
        return 2 * 4 * self._channels**2 * self._graph_data().num_edges

    def cell(self, name: str, part: str, *, of_programs: bool) -> dict[str, Any] | None:
        """The times and the memory of a configuration.

        Args:
            name: of the configuration.
            part: ``"layer"``, or ``"propagate"`` for its message passing alone.
            of_programs: true to leave out what is not computed by edge programs, as is done for
                ``"propagate"`` always.

        Returns:
            The cell; ``None`` where it is left out, not routed as a whole, or lacks a package.
        """
        config = configurations(self._library)[name]
        programs = computed_by_programs(name, self._library)
        if programs is None or (not programs and (of_programs or part == "propagate")):
            return None
        data = self._graph_data()
        alone, is_dgl = part == "propagate", self._library == "dgl"
        step, layer = _made(config, data, self._channels, alone=alone, is_dgl=is_dgl)
        memory, difference = _first(step)
        with _side("ours"):
            step.forward()
            multiplied = multiplications(layer)
        with fastgraph.enabled(), recording() as status:
            step.forward()
            is_usual = any(row.routed for row in status.rows)  # the layer, if not all in it
        return {
            "graph": self._graph,
            "nodes": data.num_nodes,
            "edges": data.num_edges,
            "channels": self._channels,
            "configuration": name,
            "part": part,
            "library": self._library,
            "programs": programs,
            "routed_by_default": is_usual,
            "products": has_products(name, self._library),
            "multiplications": multiplied,
            "product_gflops": product_gflops(),
            "times": self._times(step),
            "memory": memory,
            "difference": difference,
        }

    def _graph_data(self) -> GraphData:
        if self._data is None:
            self._data = _MADE[self._graph]() if self._graph in _MADE else load(self._graph)
        return self._data

    def _times(self, step: Step) -> dict[str, Any]:
        """Milliseconds of both passes."""
        seconds: dict[str, dict[str, list[float]]] = {
            side: {"forward": [], "backward": []} for side in _SIDES
        }
        with no_garbage_collection():
            begun = time.process_time()
            for number in range(_MOST):
                if number >= _LEAST and time.process_time() - begun > self._seconds:
                    break
                for side, passes in seconds.items():
                    with _side(side):
                        if not passes["forward"] or passes["forward"][-1] < _SHORT:
                            step.forward()  # after a switch of sides what is known is looked up
                        start = time.process_time()
                        out = step.forward()
                        middle = time.process_time()
                        step.backward(out)
                        end = time.process_time()
                        del out
                    passes["forward"].append(middle - start)
                    passes["backward"].append(end - middle)
        return spreads(seconds)


@contextmanager
def _side(name: str) -> Iterator[None]:
    """Upstream's code or ours in place."""
    if name == "plain":
        yield
        return
    with fastgraph.enabled(min_edges=0):
        yield


@functools.cache
def computed_by_programs(name: str, library: str = "pyg") -> bool | None:
    """True if a configuration is computed by edge programs alone, ``None`` if not all is routed."""
    config = configurations(library)[name]
    given = Given(at_random("example", 30, 200), 16)
    with fastgraph.enabled(min_edges=0), warnings.catch_warnings(), recording() as status:
        warnings.simplefilter("ignore")
        try:
            config.call(config.build(given), given)
        except ImportError:
            return None
    if not status.rows or any(row.fell_back for row in status.rows):
        return None
    return all(row.programs == row.routed for row in status.rows)


@functools.cache
def has_products(name: str, library: str = "pyg") -> bool:
    """True if a program of a configuration multiplies values of each edge by matrices."""
    config = configurations(library)[name]
    given = Given(at_random("example", 30, 200), 16)
    with fastgraph.enabled(min_edges=0):
        layer = config.build(given)
        config.call(layer, given)
        outcomes = [last_outcome(module) for module in layer.modules()]
    return any(
        isinstance(outcome, Prepared) and _multiplications(outcome.traced.program) > 0
        for outcome in outcomes
    )


def multiplications(layer: nn.Module) -> dict[str, int]:
    """Multiply-adds for each edge in the products of a layer's programs, in each pass.

    The gradients are those of all operands but the ones of edges.
    """
    outcomes = [last_outcome(module) for module in layer.modules()]
    programs = [with_records(o.traced.program) for o in outcomes if isinstance(o, Prepared)]
    return {
        "forward": sum(map(_multiplications, programs)),
        "backward": sum(
            _multiplications(made.program)
            for program in programs
            for made in derive(
                program,
                frozenset(o.name for o in program.operands if o.place != "edge"),
                frozenset(k for k, output in enumerate(program.outputs) if not output.is_record),
            ).passes
        ),
    }


def _multiplications(program: Program) -> int:
    return sum(
        program.width(made.arguments[0]) * made.width
        for made in program.instructions
        if made.operation in (PRODUCT, PRODUCT_T)
    ) + sum(
        math.prod(program.output_shape(output, 1, 1))
        for output in program.outputs
        if output.reduction == OUTER
    )


@functools.cache
def product_gflops() -> float:
    """The speed of torch's own product of two large matrices, the best of some."""
    matrix = torch.ones(1024, 1024)

    def seconds() -> float:
        begun = time.process_time()
        matrix.mm(matrix)
        return time.process_time() - begun

    return 2 * 1024**3 / min(seconds() for _ in range(12)) / 1e9


def _made(
    config: Usual, data: GraphData, channels: int, *, alone: bool, is_dgl: bool = False
) -> tuple[Step, nn.Module]:
    """The step of a layer, or of its ``propagate`` alone, with a gradient for nodes' features.

    And the layer.
    """

    def values(shape: tuple[int, ...], name: str) -> Tensor:
        return normal(shape, name).requires_grad_(name.partition(" ")[0] == "x")

    given = Given(data, channels, values=values)
    if is_dgl:
        from measure.dgl_usual import graph_of

        given.graph = graph_of(given)  # which is known, as PyG's edges are
    torch.manual_seed(0)
    layer = config.build(given)
    if alone:
        return _propagation(layer, lambda: config.call(layer, given)), layer
    config.call(layer, given)  # makes the features that it takes
    leaves = [leaf for leaf in given.leaves.values() if leaf.requires_grad]
    return Step(lambda: config.call(layer, given), [*leaves, *layer.parameters()]), layer


def _propagation(layer: nn.Module, call: Callable[[], Any]) -> Step:
    """The calls of ``propagate`` within a call of a layer, each on tensors of its own."""
    calls: list[tuple[MessagePassing, Any, dict[str, Any]]] = []

    def seen(module: MessagePassing, inputs: tuple[Any, ...]) -> None:
        edges, size, arguments = inputs
        calls.append((module, edges, {"size": size, **arguments}))

    passing = [module for module in layer.modules() if isinstance(module, MessagePassing)]
    handles = [module.register_propagate_forward_pre_hook(seen) for module in passing]
    call()
    for handle in handles:
        handle.remove()
    own: dict[int, Tensor] = {}

    def detached(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(detached, value))
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if id(value) not in own:
            own[id(value)] = value.detach().requires_grad_(value.requires_grad)
        return own[id(value)]

    taken = [
        (module, edges, {name: detached(value) for name, value in arguments.items()})
        for module, edges, arguments in calls
    ]
    leaves = [leaf for leaf in own.values() if leaf.requires_grad]
    return Step(
        lambda: [module.propagate(edges, **arguments) for module, edges, arguments in taken],
        [*leaves, *layer.parameters()],
    )


def _first(step: Step) -> tuple[dict[str, int], float]:
    """Bytes of the peak of both passes, of their results alone, and how far these are apart."""
    with _side("ours"), ordering_after(0):
        ours = _results(step)  # what is traced and built is no part of the peak
        peak = _peak(lambda: _results(step))[0]
    plain_peak, plain = _peak(lambda: _results(step))
    memory = {"plain": plain_peak, "ours": peak, "results": _bytes(plain)}
    return memory, _difference(plain, ours)


def _results(step: Step) -> tuple[list[Tensor], list[Tensor | None]]:
    out = step.forward()
    return [part.detach() for part in _differentiable(out)], step.backward(out)


def _bytes(results: tuple[list[Tensor], list[Tensor | None]]) -> int:
    """The bytes of outputs and gradients, views of one tensor once."""
    storages = [x.untyped_storage() for part in results for x in part if x is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _peak(run: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes resident at most above those before, and what was computed."""
    release_freed()
    if not restart_peak():
        raise RuntimeError("this system does not let the peak start again")
    before = resident() or 0
    results = run()
    return max((resident("VmHWM") or 0) - before, 0), results


def _differentiable(out: Any) -> list[Tensor]:
    if isinstance(out, dict):
        out = list(out.values())
    if isinstance(out, (tuple, list)):
        return [tensor for part in out for tensor in _differentiable(part)]
    return [out] if isinstance(out, Tensor) and out.is_floating_point() else []


def _difference(plain: Any, ours: Any) -> float:
    """The largest difference of two outputs or gradients, over the norm of upstream's."""
    pairs = [
        (a, b)
        for plains, others in zip(plain, ours, strict=True)
        for a, b in zip(plains, others, strict=True)
        if a is not None and b is not None
    ]
    return max(float((a - b).norm() / a.norm().clamp(min=1e-30)) for a, b in pairs)
