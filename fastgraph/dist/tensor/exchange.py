"""Plans of exchanges: which rows each rank needs of the others, for an index of rows."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.counts import COUNTS
from fastgraph.dist.ranks.own_device import HOST
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.collectives import halo
from fastgraph.dist.tensor.layout import Layout
from fastgraph.dist.tensor.memo import cached, on, on_host


class Plan:
    """How to get the rows at some global positions: a local row, or one that another rank sends.

    It is made on the host, and so are its tensors (see :func:`fastgraph.dist.tensor.memo.on`).

    Attributes:
        place: int64, of the shape of the index: each row's place among the local rows followed by
            the received ones.
        mine: how many local rows there are.
        receives, sends: how many rows come from and go to each rank.
        given: int64 ``[sum(sends)]``, the local rows to send.
        remote: how many rows all ranks receive together; the same on all of them.
        busiest: how many a rank sends and receives at most; the same on all of them.
        halo: int64 ``[sum(receives)]``, the global positions of the rows that are received.
    """

    def __init__(self, index: Tensor, rows: Layout) -> None:
        index, outside = _wrapped(on_host(index).long(), rows.n)
        owner, place = rows.held(index)
        far = owner != WORLD.rank
        wanted, which = torch.unique(owner[far] * rows.n + index[far], return_inverse=True)
        need = torch.bincount(wanted // max(rows.n, 1), minlength=WORLD.size)
        # An index out of range must be an error everywhere: the others would wait for this rank.
        report = torch.cat([need, torch.tensor([outside], device=HOST)])
        table = transport.all_gather(report[None], [1] * WORLD.size)
        if int(table[:, -1].sum()):
            raise IndexError(f"an index is out of range for a dimension of size {rows.n}")
        self.mine = rows.mine
        self.receives: list[int] = need.tolist()
        self.sends: list[int] = table[:, WORLD.rank].tolist()
        table = table[:, :-1]
        self.remote = int(table.sum())
        self.busiest = int((table.sum(0) + table.sum(1)).max())
        self.place = place.masked_scatter(far, which + rows.mine)
        self.halo = wanted % max(rows.n, 1)
        self.given = torch.empty(0, dtype=torch.int64, device=HOST)
        if self.remote:
            self.given = transport.all_to_all(rows.held(self.halo).row, self.receives, self.sends)
        COUNTS.plans += 1

    @cached_property
    def joined(self) -> Tensor:
        """int64 ``[mine + sum(sends)]``: the local rows, then those of :attr:`given`."""
        return torch.cat([torch.arange(self.mine, device=HOST), self.given])


def _wrapped(index: Tensor, n: int) -> tuple[Tensor, int]:
    """An index without negative entries, and how many are out of range; these are dropped."""
    index = torch.where(index < 0, index + n, index)
    outside = (index < 0) | (index >= n)
    count = int(outside.sum())
    return (index[~outside] if count else index), count


def plan(index: Tensor, rows: Layout) -> Plan:
    """The plan for local entries of an index into rows, cached with it.

    Raises:
        IndexError: on all ranks, if an entry of one of them is out of range.
    """
    make = lambda: Plan(index, rows)  # noqa: E731
    found: Plan = cached(index, ("plan", rows), make, is_part=True)
    return found


def take(x: Tensor, axis: int, index: Tensor, rows: Layout) -> Tensor:
    """The rows at global positions of a tensor that is held by rows."""
    found = plan(index, rows)
    x = x.movedim(axis, 0)
    extended = torch.cat([x, halo(x, found)]) if found.remote else x
    return extended.index_select(0, on(found.place, x.device)).movedim(0, axis)
