"""Ranks as a grid, whose rows share destinations and whose columns share sources.

Rank ``(i, j)`` holds the block of the adjacency matrix with the edges from the nodes of column
``j`` to those of row ``i``: A-stationary 1.5D (Besta et al., "High-performance and programmable
attentional graph neural networks with global tensor formulations", SC 2023). Nodes stay with their
ranks, and those of a row or column are those of its ranks. So features are replicated within a
column, results of blocks reduced within a row, and either moves the rows of ``sqrt(P)`` ranks.

What is sent goes between *own* rows, ``[mine, ...]``, and the rows of all ranks of a group, one
rank after the other. Each function is differentiable any number of times: the gradient of one is
another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.mesh import Mesh
from fastgraph.dist.ranks.own_device import HOST
from fastgraph.dist.ranks.transport import Group
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.collectives import applied
from fastgraph.dist.tensor.layout import Layout
from fastgraph.dist.tensor.memo import Recent
from fastgraph.ops.library import Context, wanted_gradients

_known = Recent()


class Groups:
    """The row and the column of this rank in a grid. All ranks must make them together.

    Attributes:
        mesh: how many rows and columns there are.
        row: the ranks of the same destinations.
        column: the ranks of the same sources.
    """

    def __init__(self, mesh: Mesh) -> None:
        height, width = self.mesh = mesh
        at, along = divmod(WORLD.rank, width)
        rows = [range(start, start + width) for start in range(0, height * width, width)]
        columns = [range(start, height * width, width) for start in range(width)]
        self.row = Group(rows[at], along, _handle(rows))
        self.column = Group(columns[along], at, _handle(columns))


def _handle(of_ranks: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """That of the one of these groups that has this rank, by the libraries of all ranks.

    (``init_device_mesh`` chooses NCCL on some machines where ranks send by gloo alone.)
    """
    if len(of_ranks) == 1:
        return None  # which is of all ranks
    mine: dist.ProcessGroup | None
    mine, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in of_ranks])
    return mine


def groups(mesh: Mesh) -> Groups:
    """The row and the column of this rank in the grid of a mesh; made at the first call."""
    found: Groups = _known.get((mesh, WORLD.size, WORLD.rank), lambda: Groups(mesh))
    return found


def counts(rows: Layout, group: Group) -> list[int]:
    """The number of rows that each rank of a group holds."""
    return [rows.counts[rank] for rank in group.ranks]


def places(positions: Tensor, rows: Layout, group: Group) -> Tensor:
    """int64: where the rows at global positions are among those of the ranks of a group."""
    starts = torch.zeros(WORLD.size, dtype=torch.int64, device=HOST)
    of_ranks = torch.tensor(counts(rows, group), device=HOST)
    starts[torch.tensor(group.ranks, device=HOST)] = of_ranks.cumsum(0) - of_ranks
    held = rows.held(positions)
    return starts[held.owner] + held.row


def replicated(tensors: Sequence[Tensor], rows: Layout, group: Group) -> list[Tensor]:
    """The rows of all ranks of a group on each of them, ``[of the group, ...]``.

    Backward: each rank adds up what all have for its rows.
    """
    return from_owners([x.expand(group.size, *x.shape) for x in tensors], rows, group)


def to_owners(tensors: Sequence[Tensor], rows: Layout, group: Group) -> list[Tensor]:
    """The rows that each rank of a group has for this one.

    Args:
        tensors: ``[of the group, ...]`` each.
        rows: the layout of their first dimension.
        group: whose rows there are.

    Returns:
        ``[ranks of the group, mine, ...]`` each. This rank sends all but what is for itself, in one
        collective.
    """
    if group.size == 1:
        return [x.unsqueeze(0) for x in tensors]
    return list(applied(_ToOwners, rows, group, *tensors))


def from_owners(tensors: Sequence[Tensor], rows: Layout, group: Group) -> list[Tensor]:
    """For each rank of a group what the owners of all rows have for it.

    The transpose of :func:`to_owners`.
    """
    if group.size == 1:
        return [x.squeeze(0) for x in tensors]
    return list(applied(_FromOwners, rows, group, *tensors))


Send = Callable[[Sequence[Tensor], Layout, Group], list[Tensor]]


class _OfGroup(Context):
    rows: Layout
    group: Group


class _ToOwners(Function):
    @staticmethod
    def forward(ctx: _OfGroup, rows: Layout, group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        of_group = counts(rows, group)
        receives = [rows.mine] * group.size
        received = transport.all_to_all_together(tensors, of_group, receives, group=group)
        shape = group.size, rows.mine
        return _marked(ctx, rows, group, [x.view(*shape, *x.shape[1:]) for x in received])

    @staticmethod
    def backward(ctx: _OfGroup, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_wanted(ctx, grads, from_owners)


class _FromOwners(Function):
    @staticmethod
    def forward(ctx: _OfGroup, rows: Layout, group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        of_group = counts(rows, group)
        sends = [rows.mine] * group.size
        flat = [x.reshape(sum(sends), *x.shape[2:]) for x in tensors]
        received = transport.all_to_all_together(flat, sends, of_group, group=group)
        return _marked(ctx, rows, group, received)

    @staticmethod
    def backward(ctx: _OfGroup, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_wanted(ctx, grads, to_owners)


def _marked(ctx: _OfGroup, rows: Layout, group: Group, found: list[Tensor]) -> tuple[Tensor, ...]:
    """Results, of which those have no gradient whose operands have none."""
    ctx.rows, ctx.group = rows, group
    needed = ctx.needs_input_grad[2:]
    ctx.mark_non_differentiable(*(x for x, need in zip(found, needed, strict=True) if not need))
    return tuple(found)


def _wanted(ctx: _OfGroup, grads: Sequence[Tensor], send: Send) -> list[Tensor | None]:
    """The gradients that somebody waits for; all ranks wait for the same ones."""
    wanted = [i for i, needed in enumerate(wanted_gradients(ctx)[2:]) if needed]
    found: list[Tensor | None] = [None] * len(grads)
    sent = send([grads[i] for i in wanted], ctx.rows, ctx.group)
    for i, grad in zip(wanted, sent, strict=True):
        found[i] = grad
    return found
