"""Cache of aggregations of sharded features that stay the same from step to step.

It is that of :mod:`fastgraph.layers.constant`, for what all ranks keep or none: rows are told to be
what they were by edits, which all ranks count, and no content is read.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from fastgraph.dist.operators.rank_graph import part_of
from fastgraph.dist.ranks import transport
from fastgraph.dist.tensor import originals
from fastgraph.dist.tensor.memo import cached
from fastgraph.dist.tensor.sharded import ShardedTensor, check_sources
from fastgraph.graphs.graph import normal_mode
from fastgraph.graphs.memo import MEMO
from fastgraph.layers.aggregation import Aggregation
from fastgraph.layers.constant import ELSEWHERE
from fastgraph.machine.memory import new_rows


class _Seen:
    """An aggregation along some edges, as long as they live unchanged.

    Attributes:
        operands: what it was computed of last, if that lives unchanged.
    """

    def __init__(self) -> None:
        self.operands: tuple[weakref.ref[_Content], ...] = ()


class _Content:
    """The content of a tensor, until that is edited or freed.

    Attributes:
        kept: what was aggregated of it twice, each until its edges are edited or freed; ``None``
            where a rank has no room for it.
    """

    def __init__(self) -> None:
        kept: weakref.WeakKeyDictionary[_Seen, ShardedTensor | None] = weakref.WeakKeyDictionary()
        self.kept = kept


def aggregated(aggregation: Aggregation, *, is_private: bool) -> Tensor:
    """See :func:`fastgraph.layers.constant.aggregated`; all ranks call it together."""
    x, edges, weight = aggregation.x, aggregation.edges, aggregation.weight
    given = [tensor for tensor in (x, edges.index, weight) if tensor is not None]
    sharded = [tensor for tensor in given if isinstance(tensor, ShardedTensor)]
    if len(sharded) < len(given) or any(tensor.local.is_inference() for tensor in sharded):
        return aggregation.compute()
    check_sources(sharded)
    originals.follow()  # no operation does it that is not done again
    originals.confirm(tensor.local for tensor in sharded)
    key = (
        "aggregation",
        *((tensor.rows, tensor.axis) for tensor in sharded),
        *(edges.transpose, edges.self_loops),
        *(aggregation.reduce, aggregation.num_out, aggregation.node_dim),
    )
    index, operands = edges.index, [x, *([] if weight is None else [weight])]
    seen: _Seen = cached(part_of(index), key, _Seen, is_part=True)
    contents = [cached(part_of(t), ("content",), _Content, is_part=True) for t in operands]
    features = contents[0]
    if [content() for content in seen.operands] != contents:
        seen.operands = tuple(map(weakref.ref, contents))
        features.kept.pop(seen, None)
        return aggregation.compute()
    if seen not in features.kept:
        with normal_mode(), torch.no_grad():  # what is kept must serve training as well
            found = aggregation.compute()
        assert isinstance(found, ShardedTensor)
        has_room = transport.agree(MEMO.has_room_for(found.local.nbytes, -1))
        features.kept[seen] = found if has_room else None
        if not has_room:
            return found
    kept: ShardedTensor | None = features.kept[seen]
    if kept is None:
        return aggregation.compute()
    if is_private:
        return kept
    local = new_rows(kept.local, kept.local.shape).copy_(kept.local)
    return ShardedTensor(local, kept.rows, kept.axis)


ELSEWHERE[ShardedTensor] = aggregated
