"""Functions of PyG that write rows into a new tensor, or sort all of them, computed by rows.

Every rank has all of a tensor that a function makes itself, and what is written into one comes from
all ranks. These functions are replaced in all modules of PyG: labels as unit vectors, edges that
are dropped in pairs, and what is done to groups of rows (those of the edges of a node) where each
group is on the rank that holds the node. All other calls are upstream's.

Nothing here imports PyG before the program has.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from wrapt import register_post_import_hook

from fastgraph.dist.ranks import transport
from fastgraph.dist.tensor.exchange import plan
from fastgraph.dist.tensor.hooks import PATCHES
from fastgraph.dist.tensor.layout import Layout, known
from fastgraph.dist.tensor.memo import on
from fastgraph.dist.tensor.sharded import ShardedTensor, is_sharded, placed

_PYG = "torch_geometric"
_AWAITED: set[str] = set()

Pair = tuple[Tensor, Tensor | None]


def install() -> None:
    """Replace the functions, from the import of PyG on."""
    if _PYG not in _AWAITED:
        _AWAITED.add(_PYG)
        register_post_import_hook(_after_import, _PYG)  # at once if it is imported already


def _after_import(_: ModuleType) -> None:
    from torch_geometric.nn.aggr.quantile import QuantileAggregation
    from torch_geometric.utils import dropout_edge, one_hot, to_dense_batch

    _replace(dropout_edge, _dropout_edge(dropout_edge))
    _replace(one_hot, _one_hot(one_hot))
    _replace(to_dense_batch, _to_dense_batch(to_dense_batch))
    PATCHES.replace(QuantileAggregation, "forward", _quantiles(QuantileAggregation.forward))


def _replace(upstream: object, replacement: object) -> None:
    """Replace a function in all modules of PyG that have it."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == _PYG:
            for key, value in list(vars(module).items()):
                if value is upstream:
                    PATCHES.replace(module, key, replacement)


class _Groups(NamedTuple):
    """Groups of rows, each of which is on the rank that holds what it belongs to.

    Attributes:
        rows: the layout of that.
        place: int64, the local group of each local row.
        most: of rows in a group, on any rank.
        order: int64, the local rows group by group, if they are in another order.
    """

    rows: Layout
    place: Tensor
    most: int
    order: Tensor | None


def _groups(index: object, num_groups: int | None, rows: Layout) -> _Groups | None:
    """The groups that an index says, if no rank has rows of a group of another.

    Args:
        index: the group of each row.
        num_groups: as many as there are nodes, or ``None``.
        rows: the layout of the rows that are grouped.
    """
    if not is_sharded(index) or index.dim() != 1 or index.dtype != torch.int64:
        return None
    layout = None if num_groups is None else known(num_groups)
    if layout is None or index.rows.n != rows.n or not rows.n:
        return None
    if index.rows is not rows:
        index = ShardedTensor(index.aligned(rows), rows, 0)

    def make() -> _Groups | None:
        found = plan(index.local, layout)
        if found.remote:
            return None
        of_rank = torch.bincount(found.place, minlength=1).amax()
        place = on(found.place, index.local.device)
        # Within a group rows stand as in the whole graph, wherever they are on this rank.
        first = rows.position.argsort()
        by_group = first[found.place[first].argsort(stable=True)]
        is_in_order = bool((by_group.diff() == 1).all())
        order = None if is_in_order else on(by_group, place.device)
        return _Groups(layout, place, int(transport.table_of(of_rank.view(1)).amax()), order)

    return index.cached(("groups", layout), make)


def _one_hot(upstream: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Classes as unit vectors, which each rank makes of its own rows."""

    @functools.wraps(upstream)
    def one_hot(
        index: Tensor, num_classes: int | None = None, dtype: torch.dtype | None = torch.float
    ) -> Tensor:
        if not is_sharded(index) or index.dim() != 1 or not index.numel():
            return upstream(index, num_classes, dtype)
        largest = int(index.max())
        classes = largest + 1 if num_classes is None else num_classes
        if int(index.min()) < 0 or largest >= classes:
            return upstream(index, num_classes, dtype)  # its own message
        return ShardedTensor(upstream(index.local, classes, dtype), index.rows, 0)

    return one_hot


def _dropout_edge(upstream: Callable[..., Pair]) -> Callable[..., Pair]:
    """Edges that are kept or dropped in pairs: upstream changes a mask that all ranks have."""

    @functools.wraps(upstream)
    def dropout_edge(
        edge_index: Tensor, p: float = 0.5, force_undirected: bool = False, training: bool = True
    ) -> Pair:
        is_drawn = training and force_undirected and 0 < p <= 1
        if not is_drawn or not is_sharded(edge_index) or edge_index.axis != 1:
            return upstream(edge_index, p, force_undirected, training)
        source, target = edge_index
        drawn = torch.rand(source.size(0), device=edge_index.device)
        kept = placed(drawn >= p, edge_index.rows, 0) & (source <= target)
        edges = edge_index[:, kept]
        both = torch.cat([edges, edges.flip(0)], dim=1)
        positions = kept.nonzero()
        return both, torch.cat([positions, positions]).squeeze()

    return dropout_edge


def _to_dense_batch(upstream: Callable[..., Pair]) -> Callable[..., Pair]:
    """Rows by groups, ``[groups, rows of the largest, ...]``, and which of these there are."""

    @functools.wraps(upstream)
    def to_dense_batch(
        x: Tensor,
        batch: Tensor | None = None,
        fill_value: float = 0.0,
        max_num_nodes: int | None = None,
        batch_size: int | None = None,
    ) -> Pair:
        if is_sharded(x) and x.axis == 0 and batch is not None:
            if _is_one_set(batch, batch_size, max_num_nodes, x.rows.n):
                return upstream(x)
            groups = _groups(batch, batch_size, x.rows)
            if groups is not None:
                rows, place, most, order = groups
                most = most if max_num_nodes is None else max_num_nodes
                local = x.local
                if order is not None:
                    local, place = local.index_select(0, order), place[order]
                out, mask = upstream(local, place, fill_value, most, rows.mine)
                return ShardedTensor(out, rows, 0), ShardedTensor(mask, rows, 0)
        return upstream(x, batch, fill_value, max_num_nodes, batch_size)

    return to_dense_batch


def _is_one_set(batch: Tensor, size: int | None, most: int | None, n: int) -> bool:
    """True if all rows are of one group, and there is no other."""
    if size not in (None, 1) or most not in (None, n) or batch.shape != (n,) or not n:
        return False
    return int(batch.max()) == 0 and int(batch.min()) == 0


def _quantiles(upstream: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``QuantileAggregation.forward``: each rank sorts the rows of its own groups."""

    @functools.wraps(upstream)
    def forward(
        self: object,
        x: Tensor,
        index: Tensor | None = None,
        ptr: Tensor | None = None,
        dim_size: int | None = None,
        dim: int = -2,
    ) -> Tensor:
        axis = dim % x.dim()
        groups = None
        if is_sharded(x) and x.axis == axis:
            groups = _groups(index, dim_size, x.rows)
        if groups is None or not is_sharded(x):
            return upstream(self, x, index, ptr, dim_size, dim)
        rows, place, *_ = groups
        # Upstream needs rows before a group without any, and a rank may have none: another group of
        # two rows comes first.
        shape = [2 if i == axis else size for i, size in enumerate(x.shape)]
        values = torch.cat([x.local.new_zeros(shape), x.local], axis)
        place = torch.cat([place.new_zeros(2), place + 1])
        out = upstream(self, values, place, None, rows.mine + 1, axis)
        return ShardedTensor(out.narrow(axis, 1, rows.mine), rows, axis)

    return forward
