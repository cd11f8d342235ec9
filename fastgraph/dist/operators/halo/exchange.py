"""Operators in two calls: the halo travels while the first one computes.

The first half of a rank's edges needs no row of others
(:class:`fastgraph.dist.operators.halo.graph.Halves`). Backward it is the other way round: gradients
of the halo are computed first, and travel while those of the first half are. Nothing has to be
arranged for that, as autograd goes back through what was done last first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from fastgraph.dist.operators.halo.graph import EdgeFractions, Halves, Neighbourhoods
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.counts import COUNTS
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.collectives import applied, halo_sum, records_gradient
from fastgraph.dist.tensor.exchange import Plan
from fastgraph.dist.tensor.memo import cached, derived, on
from fastgraph.dist.tensor.sharded import aligned, is_sharded
from fastgraph.graphs.edges import Edges
from fastgraph.graphs.graph import Csr, Graph
from fastgraph.machine.memory import new_rows
from fastgraph.ops.heads import OfAddend, addend_gradient, save_addend
from fastgraph.ops.library import Context, needs_torch_operations, wanted_gradients

LEAST_BYTES = 1 << 18
"""That a rank receives for an operator on average. Two calls take longer than one does, by less
than an exchange of this size."""


class Results(NamedTuple):
    """The results of an operator for some edges; ``None`` for those that it does not return.

    Attributes:
        out: for each destination.
        stats: likewise, of attention.
        weights: for each edge.
    """

    out: Tensor
    stats: Tensor | None = None
    weights: Tensor | None = None


class Piece(Protocol):
    """Some edges to nodes of this rank, and what operators take for them.

    Attributes:
        edges: the edges.
        num_rows: how many destinations there are.
    """

    edges: Edges
    num_rows: int

    def of_sources(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The rows of tensors with one for each source, as the operator got them."""

    def of_destinations(self, x: Tensor) -> Tensor:
        """The rows of a local tensor with one for each destination."""

    def of_edges(self, x: Tensor | None) -> Tensor | None:
        """The values of a local tensor with one for each edge."""

    def of_addend(self, x: Tensor | None) -> Tensor | None:
        """The rows of what is added to the output."""


class _Whole:
    """All edges, for which the halo has to be here."""

    def __init__(self, graph: Neighbourhoods, edges: Edges) -> None:
        self.edges, self.num_rows = edges, graph.destinations.mine
        self.of_sources = graph.of_sources

    def of_destinations(self, x: Tensor) -> Tensor:
        return x

    def of_edges(self, x: Tensor | None) -> Tensor | None:
        return x

    def of_addend(self, x: Tensor | None) -> Tensor | None:
        return x


class _First:
    """The first half. What it takes, the second one takes in the same order."""

    def __init__(self, graph: Neighbourhoods, halves: Halves) -> None:
        self.edges, self.num_rows = halves.first, graph.destinations.mine
        self._graph, self._halves = graph, halves
        self.travels: list[tuple[Tensor, _Travel]] = []
        self.rest: list[Tensor] = []

    def of_sources(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        found = []  # what is large enough to travel meanwhile does so by itself, without copies
        for given in tensors:
            travel = _Travel(self._graph.plan, self._halves.own)
            x, gathered = applied(_Sent, aligned(given, self._graph.sources, 0), travel)
            self.travels.append((gathered, travel))
            found.append(x)
        return found

    def of_destinations(self, x: Tensor) -> Tensor:
        x, rest = applied(_SomeRows, x, self._halves.rows)
        self.rest.append(rest)
        return x

    def of_edges(self, x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        pair: tuple[Tensor, Tensor]
        if records_gradient(x):
            pair = applied(_SomeValues, x, *self._halves.positions)
        else:
            make = lambda: applied(_SomeValues, x, *self._halves.positions)  # noqa: E731
            # Given values are rows of a sharded tensor, others nobody else has.
            pair = cached(x, ("values of halves", self._halves), make, is_part=True)
        self.rest.append(pair[1])
        return pair[0]

    def of_addend(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else x.detach()


class _Second:
    """The second half, once the halo is here."""

    def __init__(self, halves: Halves, first: _First) -> None:
        self.edges, self.num_rows = halves.second, len(halves.rows)
        self._halves = halves
        self._travels, self._rest = iter(first.travels), iter(first.rest)

    def of_sources(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [applied(_Arrived, *next(self._travels)) for _ in tensors]

    def of_destinations(self, _: Tensor) -> Tensor:
        return next(self._rest)

    def of_edges(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else next(self._rest)

    def of_addend(self, x: Tensor | None) -> Tensor | None:
        """By rows, those of the boundary; else they are in the first half."""
        if x is None or self._halves.by == "edges":
            return None
        x = x.detach()
        return x if len(x) == 1 else x.index_select(0, self._halves.rows)


def computed(
    graph: Neighbourhoods,
    local: Graph,
    edges: Callable[[], Edges],
    sources: Sequence[Tensor],
    compute: Callable[[Piece], Results],
    *,
    sums: bool = False,
    addend: Tensor | None = None,
) -> Results:
    """The results of an operator for the rows of this rank.

    Args:
        graph: the edges of this rank, with the plan for the halo.
        local: the same, or with self-loops.
        edges: gives its edges as operators take them.
        sources: the operands with a row for each source, in the order in which they are taken.
        compute: gives the results for some edges; is called for all of them or for each half.
        sums: whether results of several edges are added up, without regard to the others.
        addend: what ``compute`` adds to the output, local; its gradient is that of the output.
    """
    halves = _halves(graph, local, sources, sums)
    if halves is None:
        return compute(_Whole(graph, edges()))
    piece = _First(graph, halves)
    first = compute(piece)
    second = compute(_Second(halves, piece))
    out = applied(_Joined, first.out, second.out, addend, halves)
    stats, weights = first.stats, first.weights
    if stats is not None and second.stats is not None:
        stats = stats.index_copy(0, halves.rows, second.stats)
    if weights is not None and second.weights is not None:
        joined = weights.new_empty(sum(map(len, halves.positions)), *weights.shape[1:])
        for position, values in zip(halves.positions, (weights, second.weights), strict=True):
            joined.index_copy_(0, position, values)
        weights = joined
    return Results(out, stats, weights)


def _halves(
    graph: Neighbourhoods, local: Graph, sources: Sequence[Tensor], sums: bool
) -> Halves | None:
    """Both halves of a local graph, if all ranks gain by them; all of them get the same answer."""
    if not graph.plan.remote or not all(is_sharded(x) for x in sources):
        return None
    row = sum(x.shape[1:].numel() * x.element_size() for x in sources)
    if not sources:
        COUNTS.halo["nothing: features of edges"] += 1
        return None
    if graph.plan.remote * row < LEAST_BYTES * WORLD.size:
        COUNTS.halo["nothing: few bytes"] += 1
        return None
    csr: Csr = local.by_destination
    num_local, num_halo = graph.sources.mine, len(graph.plan.halo)
    count = lambda: EdgeFractions(csr, num_local)  # noqa: E731
    by = derived(local, "edge fractions", count).by(sums=sums)
    if by is None:
        COUNTS.halo["nothing: too few edges without the halo"] += 1
        return None
    COUNTS.halo[_MEANWHILE[by]] += 1
    one_kind = graph.sources is graph.destinations
    make = lambda: Halves(csr, num_local, num_halo, by, one_kind)  # noqa: E731
    halves: Halves = derived(local, f"halves by {by}", make)
    return halves


_MEANWHILE = {"rows": "rows without the halo", "edges": "edges without the halo"}


class _Travel:
    """The halo of a tensor on its way, and its gradient on the way back.

    Attributes:
        own: which local rows come before the halo.
    """

    def __init__(self, plan: Plan, own: Tensor) -> None:
        self.own = own
        self._plan = plan
        self._there: transport.Exchange | None = None
        self._back: transport.Exchange | None = None

    def begin(self, x: Tensor) -> Tensor:
        """The memory into which rows go, with those of this rank."""
        plan, start = self._plan, len(self.own)
        out = new_rows(x, (start + sum(plan.receives), *x.shape[1:]))
        given = x.index_select(0, on(plan.given, x.device))
        self._there = transport.begin_all_to_all(given, plan.sends, plan.receives, out[start:])
        torch.index_select(x, 0, self.own, out=out[:start])
        return out

    def end(self) -> None:
        """Wait for the halo."""
        if self._there is not None:
            self._there.wait()
            self._there = None

    def begin_back(self, grad: Tensor) -> None:
        """Send gradients of the halo to the owners of its rows."""
        plan = self._plan
        of_halo = grad[len(self.own) :]
        self._back = transport.begin_all_to_all(of_halo, plan.receives, plan.sends)

    def end_back(self, grad: Tensor, of_gathered: Tensor) -> Tensor:
        """The gradient of the tensor: ``grad`` and that of what was gathered."""
        own, of_halo = of_gathered[: len(self.own)], of_gathered[len(self.own) :]
        if self._back is None:  # it will itself be differentiated
            return grad.index_add(0, self.own, own) + halo_sum(of_halo, self._plan)
        grad.index_add_(0, self.own, own)
        returned, self._back = self._back.wait(), None
        return grad.index_add_(0, on(self._plan.given, grad.device), returned)


class _OfTravel(Context):
    travel: _Travel


class _OfRows(Context):
    rows: Tensor


class _OfPositions(Context):
    positions: tuple[Tensor, Tensor]


class _OfJoined(OfAddend):
    rows: Tensor


class _Sent(Function):
    """A tensor, and the memory for some of its rows and the halo.

    The gradient of the former must be one which an operator made, and nothing else refers to.
    """

    @staticmethod
    def forward(ctx: _OfTravel, x: Tensor, travel: _Travel) -> tuple[Tensor, Tensor]:
        ctx.travel = travel
        return x.view_as(x), travel.begin(x.contiguous())

    @staticmethod
    def backward(ctx: _OfTravel, grad: Tensor, of_gathered: Tensor) -> tuple[Tensor, None]:
        return ctx.travel.end_back(grad, of_gathered), None


class _Arrived(Function):
    """Wait for the halo; backward, begin to send its gradient."""

    @staticmethod
    def forward(ctx: _OfTravel, gathered: Tensor, travel: _Travel) -> Tensor:
        ctx.travel = travel
        travel.end()
        return gathered.view_as(gathered)

    @staticmethod
    def backward(ctx: _OfTravel, grad: Tensor) -> tuple[Tensor, None]:
        if not needs_torch_operations(grad):
            ctx.travel.begin_back(grad)
        return grad, None


class _SomeRows(Function):
    """A tensor and some of its rows; its gradient is added up as that of :class:`_Sent`."""

    @staticmethod
    def forward(ctx: _OfRows, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        ctx.rows = rows
        return x.view_as(x), x.index_select(0, rows)

    @staticmethod
    def backward(ctx: _OfRows, grad: Tensor, of_rows: Tensor) -> tuple[Tensor, None]:
        if needs_torch_operations(grad, of_rows):
            return grad.index_add(0, ctx.rows, of_rows), None
        return grad.index_add_(0, ctx.rows, of_rows), None


class _SomeValues(Function):
    """The values of both halves of edges."""

    @staticmethod
    def forward(
        ctx: _OfPositions, x: Tensor, first: Tensor, second: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.positions = first, second
        return x.index_select(0, first), x.index_select(0, second)

    @staticmethod
    def backward(ctx: _OfPositions, first: Tensor, second: Tensor) -> tuple[Tensor, None, None]:
        grad = first.new_empty(len(first) + len(second), *first.shape[1:])
        for positions, part in zip(ctx.positions, (first, second), strict=True):
            grad.index_copy_(0, positions, part)
        return grad, None, None


class _Joined(Function):
    """The output of both halves, in the memory of that of the first one."""

    @staticmethod
    def forward(
        ctx: _OfJoined, first: Tensor, second: Tensor, addend: Tensor | None, halves: Halves
    ) -> Tensor:
        ctx.rows = halves.rows
        save_addend(ctx, addend)
        ctx.mark_dirty(first)
        join = first.index_copy_ if halves.by == "rows" else first.index_add_
        return join(0, halves.rows, second)

    @staticmethod
    def backward(ctx: _OfJoined, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        _, wants_second, wants_addend, _ = wanted_gradients(ctx)
        of_second = grad.index_select(0, ctx.rows) if wants_second else None
        of_addend = addend_gradient(ctx, grad) if wants_addend else None
        # By rows, the first half has no edges to the boundary, by which its gradient could go on.
        return grad, of_second, of_addend, None
