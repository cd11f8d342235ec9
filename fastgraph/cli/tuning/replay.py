"""Calls of operators made again, on graphs whose rows are visited in a given order."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgraph.cli.tuning.recording import Given, OperatorCall, Values
from fastgraph.graphs.graph import Graph
from fastgraph.tune import choices
from fastgraph.tune.choices import Orders, Use


class Names(NamedTuple):
    """How an operator names its graph; see :class:`fastgraph.graphs.edges.Edges`."""

    index: Tensor  # type: ignore[assignment]  # shadows tuple.index
    ptr: Tensor | None


class Replay:
    """A call with random features.

    Args:
        call: as the script made it.
        tensors: of its program.

    Attributes:
        call: as the script made it.
        names: of its graph, if it has one.
    """

    def __init__(self, call: OperatorCall, tensors: Sequence[Tensor]) -> None:
        self.call = call
        self._function = getattr(torch.ops.fastgraph, call.operator).default
        self._positions = {
            argument.name: i for i, argument in enumerate(self._function._schema.arguments)
        }
        generator = torch.Generator().manual_seed(0)
        self._arguments = [
            _made(value, tensors, generator, call.device) for value in call.arguments
        ]
        self._leaves = [x for x in self._arguments if isinstance(x, Tensor) and x.requires_grad]
        self._gradients: list[Tensor] | None = None
        self.names = Names(self.argument("index"), self.argument("ptr"))

    def argument(self, name: str) -> Any:
        """By its name in the schema; ``None`` where there is none of this name."""
        position = self._positions.get(name)
        return None if position is None else self._arguments[position]

    @property
    def features(self) -> Tensor:
        """The first operand."""
        return next(x for x in self._arguments if isinstance(x, Tensor))

    @property
    def has_graph(self) -> bool:
        """True if the operator takes edges."""
        return "index" in self._positions

    def named(self, names: Names) -> None:
        """Have steps compute on a graph with as many nodes and edges, by its names."""
        self._arguments[self._positions["index"]] = names.index
        if "ptr" in self._positions:
            self._arguments[self._positions["ptr"]] = names.ptr

    def step(self) -> None:
        """Forward, and backward if there is a gradient."""
        found = self._function(*self._arguments)
        outputs = [found] if isinstance(found, Tensor) else list(found)
        outputs = [x for x in outputs if x.requires_grad]
        if not (self._leaves and outputs):
            return
        if self._gradients is None:
            self._gradients = [torch.randn_like(x) for x in outputs]
        torch.autograd.grad(outputs, self._leaves, self._gradients, allow_unused=True)


def _made(value: Any, tensors: Sequence[Tensor], generator: torch.Generator, device: str) -> Any:
    if isinstance(value, Given):
        return tensors[value.number].to(device)
    if isinstance(value, Values):
        made = torch.randn(value.shape, generator=generator).to(device, value.dtype)
        return made.requires_grad_(value.requires_grad)
    return value


class Fixed(Mapping[Use, int]):
    """Orders as they are told, in place of those that were kept.

    Args:
        orders: rows are as they are for uses that are not among them.

    Attributes:
        graphs: that have asked.
        asked: uses.
    """

    def __init__(self, orders: Orders = choices.NOTHING) -> None:
        self._orders = orders
        self.graphs: list[Graph] = []
        self.asked: set[Use] = set()

    def of(self, graph: Graph) -> Orders:
        """These, for any graph, see :func:`fastgraph.tune.choices.replaced`."""
        self.graphs.append(graph)
        return self

    def __getitem__(self, use: Use) -> int:
        self.asked.add(use)
        return self._orders.get(use, 0)

    def __iter__(self) -> Iterator[Use]:
        return iter(self._orders)

    def __len__(self) -> int:
        return len(self._orders)


class Candidate:
    """A way to make a call, on a graph of its own.

    Args:
        replay: of the call.
        orders: of rows.
        names: of the graph; default: that of the call.
    """

    def __init__(
        self, replay: Replay, orders: Orders = choices.NOTHING, names: Names | None = None
    ) -> None:
        self._replay, self._fixed = replay, Fixed(orders)
        self._names = copied(names or replay.names)

    def seconds(self) -> float:
        """Make the call; how long it takes."""
        self._replay.named(self._names)
        with choices.replaced(self._fixed.of):
            start = time.perf_counter()
            self._replay.step()
            return time.perf_counter() - start

    @property
    def graph(self) -> Graph | None:
        """Which was asked for an order of its rows, if one was."""
        return self._fixed.graphs[-1] if self._fixed.graphs else None

    @property
    def uses(self) -> set[Use]:
        """Of it."""
        return self._fixed.asked


def copied(names: Names) -> Names:
    """The same graph, of which nothing is remembered."""
    index, ptr = names
    return Names(index.clone(), None if ptr is None else ptr.clone())


def renamed(names: Names, inverse: Tensor) -> Names:
    """A graph with new numbers of its nodes.

    Args:
        names: of a graph with one set of nodes.
        inverse: int64 ``[num_nodes]``, the new number of each node.
    """
    index, ptr = names
    if ptr is None:
        return Names(inverse[index.long()].to(index.dtype), None)
    sources = inverse[(index if index.dim() == 1 else index[0]).long()]
    targets = inverse.repeat_interleave(ptr.diff())
    order = targets.argsort(stable=True)
    ends = torch.bincount(targets, minlength=len(inverse)).cumsum(0)
    sources = sources[order].to(index.dtype)
    grouped = sources if index.dim() == 1 else torch.stack([sources, index[1][order]])
    return Names(grouped, torch.cat([ends.new_zeros(1), ends]).to(ptr.dtype))
