"""Giving the rows of a graph to other ranks while a program uses it.

Where rows are never changes a result, so that sharded tensors of the layout before and of the one
after may meet. Rows are exchanged inside the tensors that the program holds, whichever names it has
for them; what cannot be exchanged stays as it is, and is aligned when it is used.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.dist.graphs.dgl import is_dgl_graph
from fastgraph.dist.graphs.owners import owner_of_edges
from fastgraph.dist.graphs.protocols import AnyGraph, NodeStore
from fastgraph.dist.graphs.pyg import num_nodes
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.own_device import HOST
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor import memo
from fastgraph.dist.tensor.layout import Layout, know, known, layout_of
from fastgraph.dist.tensor.sharded import NUMBERS, CopiedView, ShardedTensor, is_sharded, version

Memory = tuple[int, int, torch.Size, tuple[int, ...]]
"""Part of a storage: which storage, offset, shape and strides."""


@dataclass
class Placement:
    """Who holds the nodes and edges of a sharded graph.

    Attributes:
        nodes: a layout for each type of nodes.
        edges: ``edge_index`` of each type of edges.
        ends: the positions in ``nodes`` of the types that these edges come from and lead to.
        fixed: why they cannot be given to other ranks, or nothing.
    """

    nodes: list[Layout]
    edges: list[ShardedTensor]
    ends: list[tuple[int, int]]
    fixed: str = ""

    @classmethod
    def of(cls, data: AnyGraph) -> Placement:
        """That of a graph which :func:`fastgraph.dist.shard` has given.

        Raises:
            ValueError: it has no sharded edges.
        """
        found = cls.find(data)
        if found is None:
            raise ValueError(
                "data must be a graph whose nodes and edges are sharded: give what "
                "fastgraph.dist.shard() or load_shards() returned"
            )
        return found

    @classmethod
    def find(cls, data: AnyGraph) -> Placement | None:
        """The same, or ``None`` for a graph without sharded edges, as of a sparse matrix."""
        if is_dgl_graph(data):
            from fastgraph.dist.graphs.dgl.graphs import holders

            found = holders(data)
            return found and cls(*found, fixed="rows of a graph of DGL stay where they are")
        if not hasattr(data, "node_stores"):
            return None
        sizes = num_nodes(data)
        types = [store._key for store in data.node_stores]
        edges, ends = [], []
        for store in data.edge_stores:
            index = store.get("edge_index")
            if isinstance(index, ShardedTensor) and index.axis == 1:
                source, _, target = store._key or (None, None, None)
                edges.append(index)
                ends.append((types.index(source), types.index(target)))
        stores = zip(data.node_stores, sizes, strict=True)
        nodes = [_of_nodes(store, size) or known(size) for store, size in stores]
        if not edges or any(rows is None for rows in nodes):
            return None
        return cls([rows for rows in nodes if rows is not None], edges, ends)

    def counts(self) -> tuple[list[int], list[int]]:
        """The number of nodes and edges that each rank holds."""
        of_nodes = [sum(counts) for counts in zip(*(r.counts for r in self.nodes), strict=True)]
        of_edges = [sum(c) for c in zip(*(x.rows.counts for x in self.edges), strict=True)]
        return of_nodes, of_edges

    def halo(self) -> list[int]:
        """The number of halo nodes of each rank. All ranks must call it."""
        far = 0
        for index, (source, _) in zip(self.edges, self.ends, strict=True):
            positions = index.local[0].unique()
            far += int((self.nodes[source].held(positions).owner != WORLD.rank).sum())
        return transport.all_gather(torch.tensor([far], device=HOST), [1] * WORLD.size).tolist()

    def joint_edges(self) -> Tensor:
        """All edges on rank 0 and none elsewhere, nodes of all types numbered one after another.

        int64 ``[2, E]``, in no order. All ranks must call it.
        """
        starts = [0]
        for rows in self.nodes:
            starts.append(starts[-1] + rows.n)
        found = []
        for index, (source, target) in zip(self.edges, self.ends, strict=True):
            pair = memo.on_host(index.local) + torch.tensor(
                [[starts[source]], [starts[target]]], device=HOST
            )
            sends = [pair.shape[1], *[0] * (WORLD.size - 1)]
            receives = index.rows.counts if WORLD.rank == 0 else [0] * WORLD.size
            found.append(transport.all_to_all(pair.t(), sends, receives).t())
        return torch.cat(found, 1)


def _of_nodes(store: NodeStore, size: int) -> Layout | None:
    """The layout of the nodes of a store, if it has a tensor with a row for each."""
    for key, value in store.items():
        if is_sharded(value) and value.rows.n == size and store.is_node_attr(key):
            return value.rows
    return None


@dataclass(frozen=True)
class Moved:
    """The numbers of sharded tensors of a program that have the new layout, and the old one.

    Attributes:
        tensors: how many have the new layout.
        left: how many of the old layout stay there: results of a model that autograd may go back
            through, and views of parts of other tensors.
    """

    tensors: int
    left: int


def obstacle(*, parameters: bool = True) -> str | None:
    """Why rows cannot be given to other ranks now; all ranks get the same answer.

    Args:
        parameters: whether sharded parameters may be moved, too. A graph of autograd that was
            recorded before cannot be gone back through then.
    """
    made = transport.gather_objects(next(NUMBERS))
    if len(set(made)) > 1:
        return (
            f"ranks have made different numbers of sharded tensors, {made}: the program does not "
            "do the same on all of them"
        )
    if not parameters:
        own = any(x.local.requires_grad and x.local.grad_fn is None for x in _living())
        if not transport.agree(not own):
            return "the program has sharded parameters"
    return None


def bytes_of_rows() -> int:
    """Bytes of the sharded tensors of this rank, each memory counted once."""
    storages = [x.local.untyped_storage() for x in _living()]
    return sum({one._cdata: one.nbytes() for one in storages}.values())


def move(placement: Placement, owners: Sequence[Tensor]) -> Moved:
    """Give nodes to other ranks, and edges to those of their nodes. All ranks must call it.

    There must be no :func:`obstacle`. Takes the memory of one tensor at a time, beside the plan.

    Args:
        placement: of the graph, changed to the new one.
        owners: for each type of nodes the rank of each, int64 ``[n]``, the same on all ranks.
    """
    before = [*placement.nodes, *(index.rows for index in placement.edges)]
    nodes = [
        layout_of(owner, old.mode, old.mesh, _order_of(old))
        for owner, old in zip(owners, placement.nodes, strict=True)
    ]
    edges = [
        _edges(index, owners[source], owners[target], nodes[target])
        for index, (source, target) in zip(placement.edges, placement.ends, strict=True)
    ]
    after = [*nodes, *edges]
    found = _exchange(before, after)
    for rows in reversed(after):  # nodes last, whose lengths come first
        know(rows)
    for rows in before:
        memo.forget(rows)
    placement.nodes = nodes
    return found


def _order_of(rows: Layout) -> Tensor | None:
    """The order of all rows that :func:`layout_of` was given, rank by rank, if it was given one."""
    if transport.agree(bool((rows.key.diff() > 0).all())):
        return None
    return rows.order.argsort()


def _edges(index: ShardedTensor, sources: Tensor, destinations: Tensor, nodes: Layout) -> Layout:
    """The layout of edges that are where they belong, by the owners of their nodes."""
    src, dst = memo.on_host(index.local).long()
    to = owner_of_edges(sources[src], destinations[dst], nodes.mode, nodes.mesh)
    sends = torch.bincount(to, minlength=WORLD.size)
    table = transport.all_gather(sends[None], [1] * WORLD.size)
    positions = index.rows.position[to.argsort(stable=True)]
    receives = table[:, WORLD.rank].tolist()
    positions = transport.all_to_all(positions, sends.tolist(), receives)
    return Layout(positions.sort().values, index.rows.n, table.sum(0).tolist())


def _living() -> list[ShardedTensor]:
    """The sharded tensors of this process, in the order in which they were made."""
    gc.collect()
    found = [x for x in gc.get_objects() if type(x) is ShardedTensor]
    return sorted(found, key=lambda x: x.number)


def _exchange(before: Sequence[Layout], after: Sequence[Layout]) -> Moved:
    living = _living()
    concerned = {x.number: x for x in living if _which(x.rows, before) is not None}
    views = defaultdict(list)
    for x in living:
        views[x.local.untyped_storage()._cdata].append(x)
    described = {
        number: _described(x, views[x.local.untyped_storage()._cdata], before)
        for number, x in concerned.items()
    }
    # What only some ranks still hold is garbage there.
    first, *others = transport.gather_objects(described)
    agreed = [number for number in first if all(o.get(number) == first[number] for o in others)]
    numbers = [number for number in sorted(agreed) if first[number].can_move]
    moved: dict[Memory, Tensor] = {}
    versions = {number: version(concerned[number]) for number in numbers}
    with torch.no_grad():
        for number in numbers:
            x = concerned[number]
            layout = first[number].layout
            assert layout is not None  # as of all that are concerned
            _move(x, after[layout], moved)
    _keep_copies({id(concerned[number]): versions[number] for number in numbers})
    return Moved(len(numbers), len(agreed) - len(numbers))


def _which(rows: Layout, layouts: Sequence[Layout]) -> int | None:
    """The position of a layout, or of one by which this rank holds the same rows."""
    for position, layout in enumerate(layouts):
        if rows is layout:
            return position
    for position, layout in enumerate(layouts):
        alike = rows.counts == layout.counts and rows.bound == layout.bound
        if alike and torch.equal(rows.key, layout.key):
            return position
    return None


class _Facts(NamedTuple):
    """The facts that ranks must agree on before a tensor is moved.

    Attributes:
        can_move: true if its memory can be exchanged.
        layout: the position of its layout among those that change.
        views: the numbers of all tensors with its memory.
        shape, dtype, axis, requires_grad: its own.
        has_grad: true if there is a gradient.
    """

    can_move: bool
    layout: int | None
    views: list[int]
    shape: tuple[int, ...]
    dtype: str
    axis: int
    requires_grad: bool
    has_grad: bool


def _described(x: ShardedTensor, views: list[ShardedTensor], before: Sequence[Layout]) -> _Facts:
    local, grad = x.local, x.local.grad if x.local.is_leaf else None
    return _Facts(
        can_move=all(_is_movable(one) and _view(one) == _view(x) for one in views),
        layout=_which(x.rows, before),
        views=[one.number for one in views],
        shape=tuple(x.shape),
        dtype=str(local.dtype),
        axis=x.axis,
        requires_grad=local.requires_grad,
        has_grad=grad is not None,
    )


def _is_movable(x: ShardedTensor) -> bool:
    local = x.local
    hooks = local._backward_hooks or getattr(local, "_post_accumulate_grad_hooks", None)
    return local.grad_fn is None and not hooks


def _view(x: ShardedTensor) -> tuple[Memory, int, int]:
    """A key of a tensor: equal for two that are the same view of the same memory."""
    return _memory(x.local), x.axis, id(x.rows)


def _memory(local: Tensor) -> Memory:
    storage = local.untyped_storage()._cdata  # which tells those of empty tensors apart, too
    return storage, int(local.storage_offset()), local.shape, local.stride()


def _move(x: ShardedTensor, rows: Layout, moved: dict[Memory, Tensor]) -> None:
    old = x.local
    local = _relaid_rows(old, x, rows, moved)
    if old.requires_grad:
        local = local.detach().requires_grad_()
        if old.grad is not None:
            local.grad = _relaid_rows(old.grad, x, rows, moved)
        old.register_hook(_refuse)
    x.local, x.rows = local, rows


def _relaid_rows(
    local: Tensor, x: ShardedTensor, rows: Layout, moved: dict[Memory, Tensor]
) -> Tensor:
    """Rows under another layout; tensors that share memory share it again.

    Memory that is asked for was there before anything was moved, so that none has got its place.
    """
    key = _memory(local)
    if key not in moved:
        moved[key] = ShardedTensor(local.detach(), x.rows, x.axis).aligned(rows)
    return moved[key]


def _refuse(grad: Tensor) -> Tensor:
    raise RuntimeError(
        "this graph of autograd was recorded before fastgraph.dist.rebalance(), which has given "
        "the rows of its parameters to other ranks: compute the loss again"
    )


def _keep_copies(versions: dict[int, int | None]) -> None:
    """Copies of rows know the edits of the tensors that they come from."""
    for x in gc.get_objects():
        if type(x) is ShardedTensor or type(x) is CopiedView:  # and ask no proxy for its class
            source = x.source
            if source is None or not is_sharded(source.parent):
                continue
            if source.version == versions.get(id(source.parent), object()):
                source.version = version(source.parent)
