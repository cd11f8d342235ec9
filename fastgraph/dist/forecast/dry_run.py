"""A dry run on one process, which finds what the steps of a script compute.

It is started as ``python -m fastgraph.dist.forecast.dry_run``. The script runs as it is until its
third backward pass. What its models do in training before that one is kept: the calls of fused
operators, their graphs, and what else there is.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fastgraph.dist.operators import cost
from fastgraph.dist.operators.attention import FUSED_ATTENTIONS
from fastgraph.graphs.graph import Graph
from fastgraph.ops.heads import Call
from fastgraph.ops.topology import topology
from fastgraph.watching import STEPS, Watcher, watch


class Step(NamedTuple):
    """The operators that one step of a script calls, forward.

    Attributes:
        graphs: edges int64 ``[2, E]`` with the numbers of sources and of destinations.
        calls: of fused operators: the name of the layer, what it costs, and which graph it has.
        others: names of layers that call further operators, which are not among the calls.
        rest: seconds outside of operators.
        saved: bytes of floating-point tensors that are kept for the backward pass.
        parameters: bytes of each parameter that gets a gradient and has no row for each node.
    """

    graphs: list[tuple[Tensor, int, int]]
    calls: list[tuple[str, cost.Layer, int]]
    others: list[str]
    rest: float
    saved: int
    parameters: list[int]


class _Recorder(Watcher):
    """Watches a script until it has seen a step."""

    def __init__(self) -> None:
        super().__init__()
        self.step: Step | None = None

    def forget(self) -> None:
        self._graphs: dict[int, tuple[int, Graph, bool]] = {}
        self._calls: list[tuple[str, cost.Layer, int]] = []
        self._others: list[str] = []
        self._in_modules = self._in_operators = 0.0
        self._saved: dict[int, int] = {}

    @property
    def is_watching(self) -> bool:
        return bool(self.modules) and self.modules[0].training and torch.is_grad_enabled()

    def operator_called(self, operator: str, args: Sequence[Any], seconds: float) -> None:
        self._in_operators += seconds
        name = type(self.modules[-1]).__name__
        if operator in FUSED_ATTENTIONS:
            spec, call = FUSED_ATTENTIONS[operator].spec, Call.of(args)
            heads = call.inputs[0].shape[1]
            layer = cost.attention_layer(spec.shapes, call.inputs, heads, spec.made)
            given = zip(call.inputs, spec.places, strict=True)
            sizes = {place: len(x) for x, place in given if x is not None}
            sources = sizes["sources"]
            destinations = sizes.get("destinations", sources)
            place = call.index, call.ptr, sources, destinations, call.transpose, call.self_loops
        elif operator in ("spmm", "segment_reduce"):
            x, index, ptr, _, num_out, _, transpose, *_ = args
            layer = cost.sum_layer(x, is_extremum=operator == "segment_reduce")
            place = index, ptr, len(x), num_out, transpose, 0
        else:
            self._others.append(name)
            return
        number, edges = self._number(*place)
        pace = seconds / max(edges * layer.heads * layer.channels, 1)
        self._calls.append((name, layer._replace(work=pace), number))

    def _number(
        self,
        index: Tensor,
        ptr: Tensor | None,
        sources: int,
        destinations: int,
        transpose: bool,
        loops: int,
    ) -> tuple[int, int]:
        """The number of a graph, which is remembered by the operator, and its edges."""
        graph = topology(index, ptr, sources, destinations, transpose, loops)
        found = self._graphs.setdefault(id(graph), (len(self._graphs), graph, transpose))
        return found[0], graph.num_edges

    def module_called(
        self, call: Callable[..., object], module: nn.Module, *args: object, **options: object
    ) -> object:
        """See :meth:`Watcher.module_called`; what the outermost keeps for backward is counted."""
        if self.modules:
            return super().module_called(call, module, *args, **options)
        started = time.perf_counter()
        try:
            with saved_tensors_hooks(self._kept, lambda x: x):
                return super().module_called(call, module, *args, **options)
        finally:
            if module.training and torch.is_grad_enabled():
                self._in_modules += time.perf_counter() - started

    def _kept(self, x: Tensor) -> Tensor:
        is_parameter = isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)
        if self.modules[0].training and x.is_floating_point() and not is_parameter:
            storage = x.untyped_storage()
            self._saved[storage.data_ptr()] = storage.nbytes()
        return x

    def step_seen(self, losses: Sequence[Tensor]) -> None:
        graphs = []
        for _, graph, transpose in self._graphs.values():
            source, target = graph.edge_list()
            ends = (target, source) if transpose else (source, target)
            sizes = (graph.num_src, graph.num_dst)
            graphs.append((torch.stack(ends), *(sizes[::-1] if transpose else sizes)))
        nodes = {size for _, *sizes in graphs for size in sizes}
        leaves = [p for p in _leaves(losses) if not (p.dim() and len(p) in nodes)]
        self.step = Step(
            graphs,
            self._calls,
            self._others,
            self._in_modules - self._in_operators,
            sum(self._saved.values()),
            [p.nbytes for p in leaves],
        )


def _leaves(losses: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that gradients of losses are accumulated in."""
    found: list[Tensor] = []
    waiting = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found.append(variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found


def run(script: Path, arguments: Sequence[str]) -> Step:
    """Run a script until a step of it was seen.

    Raises:
        RuntimeError: it ended before.
    """
    recorder = _Recorder()
    watch(recorder, script, arguments)
    if recorder.step is None:
        raise RuntimeError(
            f"{script} ended after {recorder.backward_passes} backward passes, and a step is seen "
            f"with the {STEPS + 1}rd"
        )
    return recorder.step


def main(file: Path, script: Path, arguments: Sequence[str]) -> None:
    """Run a script and leave its step in a file, for a process that is none of its own."""
    step = run(script, arguments)
    # By the names of classes that its reader has, too: this module is another one there.
    file.write_bytes(pickle.dumps(step._asdict()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
