"""A check that a model trains on several ranks as on one process, with a list of its gathers."""

from __future__ import annotations

import copy
import hashlib
import pickle
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fastgraph import enabling
from fastgraph.comparison.errors import largest_difference
from fastgraph.comparison.values import named_tensors, to_double
from fastgraph.dist.graphs.dgl import is_dgl_graph
from fastgraph.dist.graphs.partition import check_weights
from fastgraph.dist.graphs.protocols import AnyGraph
from fastgraph.dist.graphs.pyg import check_is_graph, shard
from fastgraph.dist.graphs.usual import (
    FEATURES,
    LABELS,
    Forward,
    Loss,
    attribute,
    usual_forward,
    usual_loss,
)
from fastgraph.dist.operators.modes import checked_mode
from fastgraph.dist.ranks.counts import COUNTS
from fastgraph.dist.ranks.mesh import Mesh
from fastgraph.dist.ranks.spawning import pickler, run_on_ranks
from fastgraph.dist.ranks.world import LIBRARIES, WORLD, alone, init, share_random_states
from fastgraph.dist.running.differences import Difference, Gather, Validation
from fastgraph.dist.tensor.digests import DIGESTS
from fastgraph.dist.tensor.sharded import whole
from fastgraph.layers.arguments import check_functions, check_integers, check_numbers
from fastgraph.upstream import PACKAGES

if TYPE_CHECKING:
    from dgl import DGLGraph
    from torch_geometric.data import Data, HeteroData

TOLERANCE = 1e-10
"""Sums in another order differ by some 1e-15 in float64, and a few steps make more of it. A row
that is missed or counted twice makes far more."""

_SEED = 0


class _Key(NamedTuple):
    kind: str
    name: str
    step: int


_Record = dict[_Key, Tensor]


@dataclass(frozen=True)
class _Task:
    """The task of all ranks."""

    model: nn.Module
    data: AnyGraph
    forward: Forward
    loss: Loss
    steps: int
    learning_rate: float
    weights: Sequence[float] | None
    method: str
    mode: str
    mesh: Mesh | None


@dataclass(frozen=True)
class _Found:
    """The results of a rank; tensors are sent by rank 0 alone."""

    expected: _Record | None
    found: _Record | None
    digests: dict[_Key, str]
    gathers: Counter[tuple[str, str]]
    sent: int


def validate(
    model: nn.Module,
    data: Data | HeteroData | DGLGraph,
    *,
    world_size: int = 2,
    steps: int = 3,
    loss: Loss | None = None,
    forward: Forward | None = None,
    learning_rate: float = 0.01,
    weights: Sequence[float] | None = None,
    method: str = "metis",
    mode: str = "auto",
    mesh: Mesh | None = None,
    tolerance: float = TOLERANCE,
    timeout: float = 600.0,
) -> Validation:
    """Train copies of a model on one process and on several ranks, and compare.

    All of it happens in new processes of this machine, in float64, with the same random numbers
    (``random="exact"``) and by plain gradient descent: an optimizer that divides by gradients would
    make steps of the rounding errors of those that are zero. On one process upstream's own code
    runs, on ranks fastgraph is enabled, as :mod:`fastgraph.dist` does when it runs a script.

    Args:
        model: any module; is trained in training mode. With ``cloudpickle`` installed its class
            need not be importable.
        data: a graph of PyG or DGL, on the CPU.
        world_size: how many ranks.
        steps: how many steps are trained.
        loss: takes the output of the model and the graph, and gives a scalar. Default: the cross
            entropy with ``data.y``, or the mean squared error where that is floating point, of the
            nodes of ``data.train_mask`` if there is one. In a graph of DGL these are
            ``ndata["label"]``, or ``ndata["y"]``, and ``ndata["train_mask"]``.
        forward: takes the model and the graph, and gives the output. Default:
            ``model(data.x, data.edge_index)``, for ``HeteroData``
            ``model(data.x_dict, data.edge_index_dict)``, for a graph of DGL ``model(graph,
            graph.ndata["feat"])``, or with ``ndata["x"]``.
        learning_rate: of gradient descent.
        weights: see :func:`fastgraph.dist.shard`.
        method: see :func:`fastgraph.dist.shard`.
        mode: see :func:`fastgraph.dist.shard`.
        mesh: see :func:`fastgraph.dist.shard`.
        tolerance: what a difference may be.
        timeout: seconds, for everything.

    Returns:
        What differs, and what was gathered: print it, or ask for ``.ok`` and ``.worst``.

    Raises:
        TypeError: an argument of another type, or one that cannot be sent to other processes.
        ValueError: an argument out of range, or parameters that were never initialised.
        fastgraph.dist.ranks.spawning.RankError: the model failed, on one process or on ranks.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    check_is_graph(data)
    if any(is_lazy(p) for p in model.parameters()):
        raise ValueError("model must have been called once, to initialise its lazy parameters")
    check_integers(world_size=world_size, steps=steps)
    check_numbers("a number above 0", lambda x: x > 0, tolerance=tolerance, timeout=timeout)
    check_numbers("a number of at least 0", lambda x: x >= 0, learning_rate=learning_rate)
    check_functions(loss=loss, forward=forward, or_none=True)
    check_weights(weights, world_size)
    mode = checked_mode(mode, mesh, world_size)
    if loss is None and not isinstance(attribute(data, *LABELS), Tensor):
        raise ValueError("loss must be given for a graph that has no single data.y")
    if forward is None and is_dgl_graph(data) and attribute(data, *FEATURES) is None:
        raise ValueError(f"forward must be given for a graph without ndata of {FEATURES}")
    for name, sent in {"model": model, "data": data, "loss": loss, "forward": forward}.items():
        _check_can_be_sent(name, sent)
    task = _Task(
        model, data, forward or usual_forward, loss or usual_loss, steps, learning_rate, weights,
        method, mode, mesh,
    )  # fmt: skip
    found = run_on_ranks(_train_both, world_size, task, timeout=timeout)
    return _compared(task, found, tolerance)


def _check_can_be_sent(name: str, value: object) -> None:
    try:
        pickler().dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(
            f"{name} must be something that can be pickled, as it is sent to other processes, got "
            f"{type(value).__name__}: {error}"
        ) from error


def _train_both(task: _Task) -> _Found:
    """On each rank: train on one process (rank 0 alone), then on all."""
    torch.set_default_dtype(torch.float64)
    init(random="exact", check=True)
    DIGESTS.end()  # a difference is what is asked for, and no error
    data, expected = _double(task.data), None
    if WORLD.rank == 0:
        with alone():
            expected = _train(task, data.local_var() if is_dgl_graph(data) else copy.copy(data))
    share_random_states()  # rank 0 has drawn from its own
    data = shard(data, weights=task.weights, method=task.method, mode=task.mode, mesh=task.mesh)
    enabling.enable()
    COUNTS.reset()
    COUNTS.gathers = places = _Places()
    found = _train(task, data)
    sent = sum(COUNTS.sent.values())
    digests = {key: hashlib.sha256(_bytes(x)).hexdigest() for key, x in found.items()}
    kept = found if WORLD.rank == 0 else None
    return _Found(expected, kept, digests, places.lines, sent)


def _double(data: AnyGraph) -> AnyGraph:
    if not is_dgl_graph(data):
        return data.apply(to_double)
    from fastgraph.dist.graphs.dgl.graphs import mapped

    return mapped(data, to_double)


def _bytes(x: Tensor) -> bytes:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


def _train(task: _Task, data: AnyGraph) -> _Record:
    model = copy.deepcopy(task.model).double().train()
    torch.manual_seed(_SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.learning_rate)
    record: _Record = {}

    def keep(kind: str, step: int, tensors: Mapping[str, Tensor | None]) -> None:
        for name, x in tensors.items():
            if x is not None and x.layout == torch.strided:
                record[_Key(kind, name, step)] = whole(x.detach()).clone()

    for step in range(task.steps):
        optimizer.zero_grad()
        out = task.forward(model, data)
        loss = task.loss(out, data)
        loss.backward()
        keep("output", step, named_tensors(out, "output"))
        keep("loss", step, {"loss": loss})
        keep("gradient", step, {name: p.grad for name, p in model.named_parameters()})
        optimizer.step()
    keep("state", task.steps - 1, model.state_dict())
    return record


class _Places(Counter[str]):
    """Gathers by name, which notes from which line of the program each came."""

    def __init__(self) -> None:
        self.lines: Counter[tuple[str, str]] = Counter()
        super().__init__()

    def __setitem__(self, name: str, times: int) -> None:
        self.lines[name, _line()] += times - self[name]
        super().__setitem__(name, times)


def _line() -> str:
    """The line of the program that is running, else of the library that it called."""
    within, frame = "", sys._getframe(1)
    while frame.f_back is not None and frame.f_code is not _train.__code__:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        file = frame.f_code.co_filename
        if file.startswith("<"):  # code that cloudpickle has sent
            file = frame.f_globals.get("__file__", file)
        place = f"{file}:{frame.f_lineno}"
        if package not in LIBRARIES:
            return place
        if package in PACKAGES and not within:
            within = place
        frame = frame.f_back
    return within


_ORDER = ("loss", "output", "gradient", "state")


def _compared(task: _Task, ranks: Sequence[_Found], tolerance: float) -> Validation:
    expected, found = ranks[0].expected, ranks[0].found
    assert expected is not None and found is not None  # those of rank 0
    scales = _scales({**found, **expected})
    worst: dict[tuple[str, str], Difference] = {}
    for key, x in {**expected, **found}.items():
        truth, value = expected.get(key), found.get(key)
        if (
            truth is None
            or value is None
            or (value.shape, value.dtype) != (truth.shape, truth.dtype)
        ):
            off, at = float("inf"), (0,) * x.dim()
        else:
            off, at = largest_difference(value, truth)
        shape = tuple((x if truth is None else truth).shape)
        scale = scales[key] or 1.0
        one = Difference(key.name, key.kind, shape, key.step, off / scale, scale, at)
        before = worst.get((key.kind, key.name))
        if before is None or not one.difference <= before.difference:
            worst[key.kind, key.name] = one
    gathers = (Gather(*place, times) for place, times in ranks[0].gathers.most_common())
    disagreeing = dict.fromkeys(
        f"{key.kind} {key.name}, on rank {rank}"
        for rank, other in enumerate(ranks)
        for key, digest in other.digests.items()
        if digest != ranks[0].digests.get(key)
    )
    return Validation(
        module=type(task.model).__name__,
        world_size=len(ranks),
        steps=task.steps,
        tolerance=tolerance,
        tensors=tuple(sorted(worst.values(), key=lambda x: _ORDER.index(x.kind))),
        gathers=tuple(gathers),
        disagreeing=tuple(disagreeing),
        sent=sum(rank.sent for rank in ranks),
    )


def _scales(record: _Record) -> dict[_Key, float]:
    """By what to divide the difference of each tensor."""
    largest = {key: _largest(x) for key, x in record.items()}
    gradients: Counter[int] = Counter()
    for key, x in record.items():
        if key.kind == "gradient":
            gradients[key.step] += float(x.square().sum())  # type: ignore[assignment]
    state = max((largest[key] for key in record if key.kind == "state"), default=0.0)
    scales = {}
    for key, x in record.items():
        if not x.is_floating_point():
            scales[key] = 1.0
        elif key.kind == "gradient":
            scales[key] = gradients[key.step] ** 0.5
        else:
            scales[key] = state if key.kind == "state" else largest[key]
    return scales


def _largest(x: Tensor) -> float:
    finite = x[x.isfinite()] if x.is_floating_point() else x.new_empty(0)
    return float(finite.abs().max()) if finite.numel() else 0.0
