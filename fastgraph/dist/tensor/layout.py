"""Layouts: the owner of each row of a dimension."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.mesh import Mesh
from fastgraph.dist.ranks.own_device import HOST
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.memo import Recent, made, on, on_host


class Held(NamedTuple):
    """The owners of the rows at some global positions.

    Attributes:
        owner: int64, of the shape of the positions: the rank.
        row: int64, likewise: the local row on that rank.
    """

    owner: Tensor
    row: Tensor


class Layout:
    """The owner of each position of a dimension of global length ``n``; its tensors are the host's.

    Each local row has a key; keys differ between rows and ranks. The global order of rows is that
    of their keys, whatever that of local rows is. So a selection of rows, whose keys are those of
    the rows that are left, needs to know nothing but how many there are on each rank.

    Attributes:
        key: int64 ``[mine]``; ascending, unless :func:`layout_of` was given an order.
        bound: above all keys of all ranks.
        counts: how many rows each rank holds; zeros are fine.
        n: their sum.
        mine: how many this rank holds.
        split_from, repeats: the layout of which each row was split into so many, or which is here
            so many times.
        parts: the layouts whose dimensions were put one after the other.
        mode: how fused operators among these rows are computed, see
            :mod:`fastgraph.dist.operators.modes`.
        mesh: of the grid of ranks, with ``"grid"``; ``None``: the most square one.
    """

    mode = "halo"
    mesh: Mesh | None = None

    def __init__(self, key: Tensor, bound: int, counts: Sequence[int] | None = None) -> None:
        if counts is None:
            own = torch.zeros(WORLD.size, dtype=torch.int64, device=HOST)
            own[WORLD.rank] = len(key)
            counts = transport.all_reduce(own).tolist()
        self.key, self.bound, self.counts = key, bound, list(counts)
        self.n, self.mine = sum(self.counts), len(key)
        self.derived = Recent()
        self.split_from: tuple[Layout, int] | None = None
        self.repeats: tuple[Layout, int] | None = None
        self.parts: Sequence[Layout] = ()

    @cached_property
    def _order(self) -> Tensor:
        return made(self._made_order)

    def _made_order(self) -> Tensor:
        """:attr:`order` in the smallest type: all that a rank keeps of the rows of others."""
        keys = transport.all_gather(self.key, self.counts)
        dtype = torch.int32 if self.n <= torch.iinfo(torch.int32).max else torch.int64
        if self.bound > self.n:
            return keys.argsort(stable=True).to(dtype)
        order = torch.empty(self.n, dtype=dtype, device=HOST)
        order[keys] = torch.arange(self.n, dtype=dtype, device=HOST)
        return order

    @cached_property
    def position(self) -> Tensor:
        """int64 ``[mine]``: the global position of each local row."""
        if self.bound == self.n:
            return self.key
        return made(self._places)

    def _places(self) -> Tensor:
        order = self.order
        place = torch.empty_like(order).scatter_(0, order, torch.arange(self.n, device=HOST))
        start = sum(self.counts[: WORLD.rank])
        return place[start : start + self.mine]

    @property
    def order(self) -> Tensor:
        """int64 ``[n]``: for each global position, where its row is when parts are put together."""
        return self.order_on(HOST)

    def order_on(self, device: torch.device) -> Tensor:
        """:attr:`order`, on a device."""
        return on(self._order, device).long()

    def position_on(self, device: torch.device) -> Tensor:
        """:attr:`position`, on a device."""
        return on(self.position, device)

    @property
    def owner(self) -> Tensor:
        """int64 ``[n]``: the rank that holds each global position."""
        return self.held(torch.arange(self.n, device=HOST)).owner

    def held(self, positions: Tensor | int) -> Held:
        """The owners of these global positions. All ranks must call it the first time."""
        place = self._places_of(on_host(positions) if isinstance(positions, Tensor) else positions)
        ends = torch.tensor(self.counts, device=HOST).cumsum(0)
        owner = torch.bucketize(place, ends[:-1], right=True)
        return Held(owner, place - (ends - torch.tensor(self.counts, device=HOST))[owner])

    def _places_of(self, positions: Tensor | int) -> Tensor:
        """Where the rows at these positions are when parts are put together."""
        return self._order[positions].long()

    def same(self, other: Layout) -> bool:
        """True if all ranks hold the same rows under both; all ranks get the same answer."""
        if other is self:
            return True
        if self.n != other.n or self.counts != other.counts:
            return False

        def make() -> bool:
            equal = self.bound == other.bound and torch.equal(self.key, other.key)
            agreed = transport.agree(equal)
            other.derived.get(("same", weakref.ref(self)), lambda: agreed)
            return agreed

        is_same: bool = self.derived.get(("same", weakref.ref(other)), make)
        return is_same

    def split(self, k: int) -> Layout:
        """The layout of ``[n * k]`` elements, ``k`` of which stand where each row stood."""

        def make() -> Layout:
            key = (self.key[:, None] * k + torch.arange(k, device=HOST)).view(-1)
            layout = Layout(key, self.bound * k, [count * k for count in self.counts])
            layout.split_from = self, k
            return layout

        return self if k == 1 else self.derived.get(("split", k), make)

    def repeated(self, k: int) -> Layout:
        """The layout of ``[k * n]`` elements, ``k`` times these rows one after the other."""

        def make() -> Layout:
            key = (self.key + self.bound * torch.arange(k, device=HOST)[:, None]).view(-1)
            layout = Layout(key, self.bound * k, [count * k for count in self.counts])
            layout.repeats = self, k
            return layout

        return self if k == 1 else self.derived.get(("repeated", k), make)

    def in_order(self) -> Layout:
        """The layout of as many rows on each rank, which follow those of the rank before."""

        def make() -> Layout:
            return Consecutive(self.counts)

        layout: Layout = self.derived.get("in order", make)
        return layout

    def at(self, positions: Tensor) -> Layout:
        """The layout of the rows at replicated global positions, each of which stays in place."""
        owner = self.held(positions).owner
        counts = torch.bincount(owner, minlength=WORLD.size).tolist()
        return Layout((owner == WORLD.rank).nonzero().view(-1), len(positions), counts)

    def span(self, start: int, stop: int, step: int) -> Layout:
        """The layout of a slice of the rows; of what was joined, that which it had."""
        before = 0
        for part in self.parts:
            if (start, stop, step) == (before, before + part.n, 1):
                return part
            before += part.n
        make = lambda: self.at(torch.arange(start, stop, step, device=HOST))  # noqa: E731
        layout: Layout = self.derived.get(("span", start, stop, step), make)
        return layout


class Consecutive(Layout):
    """The layout of rows that follow those of the rank before: nobody keeps where others are.

    Args:
        counts: how many rows each rank holds.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        start = sum(counts[: WORLD.rank])
        super().__init__(
            torch.arange(start, start + counts[WORLD.rank], device=HOST), sum(counts), counts
        )

    @property
    def order(self) -> Tensor:
        """See :attr:`Layout.order`; made at each call."""
        return self.order_on(HOST)

    def order_on(self, device: torch.device) -> Tensor:
        """See :meth:`Layout.order_on`; made at each call."""
        return torch.arange(self.n, device=device)

    def _places_of(self, positions: Tensor | int) -> Tensor:
        given = torch.as_tensor(positions, device=HOST)
        if given.dtype == torch.bool:
            return self.order[given]
        given = given.long()
        if given.numel() and (int(given.min()) < -self.n or int(given.max()) >= self.n):
            raise IndexError(f"positions must be below {self.n}, got {int(given.max())}")
        return torch.where(given < 0, given + self.n, given)


def joined(parts: Sequence[Layout]) -> Layout:
    """The layout of dimensions one after the other, whose rows stay where they are.

    Operators among them are computed in the mode of the longest.
    """

    def make() -> Layout:
        keys, offset = [], 0
        for part in parts:
            keys.append(part.key + offset)
            offset += part.bound
        counts = [sum(c) for c in zip(*(part.counts for part in parts), strict=True)]
        layout = Layout(torch.cat(keys), offset, counts)
        longest = max(parts, key=lambda part: part.n)
        layout.mode, layout.mesh = longest.mode, longest.mesh
        layout.parts = parts  # kept, lest another one gets the identity of one that is gone
        return layout

    if len(parts) == 1:
        return parts[0]
    key = ("joined", *map(id, parts))
    layout: Layout = parts[0].derived.get(key, make)
    return layout


_known: dict[int, Layout] = {}
_even = Recent()


def know(layout: Layout) -> None:
    """Have new tensors of this length be laid out like this."""
    _known[layout.n] = layout


def known(n: int) -> Layout | None:
    """How tensors of nodes or edges of this length are laid out, if there are any."""
    return _known.get(n)


def usual(n: int) -> Layout:
    """How to lay out ``n`` rows of which nothing else is known.

    Where rows are makes no difference to results, so that a wrong guess costs time alone.
    """

    def make() -> Layout:
        cuts = [n * rank // WORLD.size for rank in range(WORLD.size + 1)]
        return Consecutive([stop - start for start, stop in pairwise(cuts)])

    return _known.get(n) or _even.get(n, make)


@contextmanager
def only_here() -> Iterator[None]:
    """Forget, after the block, how tensors of its lengths are laid out."""
    before = dict(_known)
    try:
        yield
    finally:
        _known.clear()
        _known.update(before)


def layout_of(
    owner: Tensor, mode: str = "halo", mesh: Mesh | None = None, order: Tensor | None = None
) -> Layout:
    """The layout of rows, of each of which a rank is the owner.

    Args:
        owner: int64 ``[n]``.
        mode: of operators among the rows.
        mesh: of their grid.
        order: a permutation of the rows, in whose order local ones are; default: their own.
    """
    owner = on_host(owner)
    counts = torch.bincount(owner, minlength=WORLD.size).tolist()
    own = (owner == WORLD.rank).nonzero().view(-1)
    if order is not None:
        order = on_host(order)
        own = order[owner[order] == WORLD.rank]
    rows = Layout(own, len(owner), counts)
    rows.mode, rows.mesh = mode, mesh
    return rows
