"""DGL's own message passing on sharded graphs: gathers by sharded indices, and scatters.

All of it ends in a few autograd functions (``dgl.backend.pytorch.sparse``). Those calls which the
routes do not give to operators are done here as they are defined: features of the ends of edges are
gathered, combined, and reduced at the destinations, by torch's operations on sharded tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fastgraph import ops
from fastgraph.dgl.conditions import last_wins
from fastgraph.dgl.gspmm import extremum
from fastgraph.dist.graphs.dgl.index import ShardedIndex
from fastgraph.dist.graphs.dgl.structure import ShardedStructure
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.layout import usual
from fastgraph.dist.tensor.sharded import ShardedTensor, is_sharded, placed
from fastgraph.dist.tensor.table import NoRuleError, TorchFunction, rule, unpacked
from fastgraph.plugins.backend import FLOATING

_MODULE = "dgl.backend.pytorch.sparse"


def _relation_of(gidx: object) -> ShardedStructure:
    if not isinstance(gidx, ShardedIndex) or gidx.number_of_etypes() != 1:
        raise NoRuleError
    return gidx.relation(0)


_COMBINED: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "dot": lambda lhs, rhs: (lhs * rhs).sum(-1, keepdim=True),
}
"""DGL's functions of two operands, which have as many dimensions; it negates to subtract."""


@rule(f"{_MODULE}.GSpMM")
@unpacked
def reduced(
    func: TorchFunction, gidx: object, op: str, reduce: str, lhs: Tensor | None, rhs: Tensor | None
) -> Tensor:
    """The messages of edges, reduced at their destinations."""
    return _reduced(_relation_of(gidx), op, reduce, lhs, rhs)


@rule(f"{_MODULE}.GSpMM_hetero")
@unpacked
def reduced_over_relations(
    func: TorchFunction, gidx: object, op: str, reduce: str, num_lhs: int, *features: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The same for several relations, whose sums are added up."""
    if not isinstance(gidx, ShardedIndex) or reduce != "sum":
        raise NoRuleError
    lhs, rhs = features[:num_lhs], features[num_lhs:]
    sums: list[Tensor | None] = [None] * gidx.number_of_ntypes()
    for etype in range(gidx.number_of_etypes()):
        source, destination = gidx.ends(etype)
        found = _reduced(gidx.relation(etype), op, reduce, lhs[source], rhs[etype])
        before = sums[destination]
        sums[destination] = found if before is None else before + found
    return tuple(sums)


def _reduced(
    relation: ShardedStructure, op: str, reduce: str, lhs: Tensor | None, rhs: Tensor | None
) -> Tensor:
    given = [x for x in (lhs, rhs) if isinstance(x, Tensor)]
    # A record of where maxima were is for kernels; without any edge DGL has something of its own.
    is_operators = relation.edge_index.shape[1] and all(x.dtype in FLOATING for x in given)
    if reduce != "sum" and not is_operators:
        raise NoRuleError
    messages = _on_edges(relation, op, lhs, rhs, ("u", "e"))
    if reduce == "sum":
        shape = (relation.num_dst, *messages.shape[1:])
        zeros = torch.zeros((), dtype=messages.dtype, device=messages.device).expand(shape)
        rows = usual(relation.num_dst)
        if isinstance(lhs, ShardedTensor) and lhs.rows.n == rows.n:  # the same nodes, maybe
            rows = lhs.rows
        return placed(zeros, rows, 0).index_add(0, relation.destination_rows, messages)
    grouped = relation.incidence(backwards=last_wins(messages))
    return extremum(relation.num_dst, grouped, messages, reduce)


def _of_edges(x: Tensor | None, relation: ShardedStructure) -> Tensor:
    """Features of edges as sharded ones."""
    if x is None or x.dim() == 0 or len(x) != relation.edge_index.shape[1]:
        raise NoRuleError  # DGL's own message
    return x if is_sharded(x) else placed(x, relation.edge_index.rows, 0)


@rule(f"{_MODULE}.GSDDMM")
@unpacked
def on_edges(
    func: TorchFunction,
    gidx: object,
    op: str,
    lhs: Tensor | None,
    rhs: Tensor | None,
    lhs_target: str = "u",
    rhs_target: str = "v",
) -> Tensor:
    """A function of features at the ends of each edge, or of the edge."""
    return _on_edges(_relation_of(gidx), op, lhs, rhs, (lhs_target, rhs_target))


@rule(f"{_MODULE}.GSDDMM_hetero")
@unpacked
def on_edges_of_relations(
    func: TorchFunction,
    gidx: object,
    op: str,
    num_lhs: int,
    lhs_target: str,
    rhs_target: str,
    *features: Tensor | None,
) -> tuple[Tensor, ...]:
    """The same for several relations."""
    if not isinstance(gidx, ShardedIndex):
        raise NoRuleError
    found = []
    for etype in range(gidx.number_of_etypes()):
        source, destination = gidx.ends(etype)
        place = {"u": source, "v": destination, "e": etype}
        lhs, rhs = features[place[lhs_target]], features[num_lhs + place[rhs_target]]
        relation, targets = gidx.relation(etype), (lhs_target, rhs_target)
        found.append(_on_edges(relation, op, lhs, rhs, targets))
    return tuple(found)


def _on_edges(
    relation: ShardedStructure,
    op: str,
    lhs: Tensor | None,
    rhs: Tensor | None,
    targets: tuple[str, str],
) -> Tensor:
    """A function of two operands, each at its end of the edges (``targets``), or a copy of one."""
    of_lhs, of_rhs = targets
    if op == "copy_lhs":
        return _at_edges(lhs, of_lhs, relation)
    if op == "copy_rhs":
        return _at_edges(rhs, of_rhs, relation)
    if op not in _COMBINED:
        raise NoRuleError
    return _COMBINED[op](_at_edges(lhs, of_lhs, relation), _at_edges(rhs, of_rhs, relation))


def _at_edges(x: Tensor | None, target: str, relation: ShardedStructure) -> Tensor:
    if target in ("e", "edge"):
        return _of_edges(x, relation)
    of_sources = target in ("u", "src")
    num_nodes = relation.num_src if of_sources else relation.num_dst
    if x is None or x.dim() == 0 or len(x) != num_nodes:
        raise NoRuleError  # DGL's own message
    ends = relation.source_rows if of_sources else relation.destination_rows
    return x.index_select(0, ends)


@rule(f"{_MODULE}.EdgeSoftmax")
@unpacked
def softmax(
    func: TorchFunction, gidx: object, score: Tensor, eids: Tensor | str, norm_by: str
) -> Tensor:
    """The softmax over the edges of each destination, or source."""
    relation = _relation_of(gidx)
    if score.dtype not in FLOATING:
        raise NoRuleError
    by_source = norm_by == "src"
    sizes = relation.num_src, relation.num_dst
    num_in, num_out = reversed(sizes) if by_source else sizes
    index = relation.edge_index[:, eids] if isinstance(eids, Tensor) else relation.edge_index
    return ops.edge_softmax(score, index, num_out=num_out, num_in=num_in, transpose=by_source)


@rule(f"{_MODULE}.SegmentReduce")
@unpacked
def by_segment(func: TorchFunction, op: str, x: Tensor, offsets: Tensor) -> Tensor:
    """The rows of each segment, as of the nodes of each graph in a batch, reduced; replicated."""
    if not isinstance(x, ShardedTensor) or x.axis != 0 or is_sharded(offsets):
        raise NoRuleError
    if op not in ("sum", "max", "min") or (op != "sum" and x.dtype not in FLOATING):
        raise NoRuleError
    if int(offsets[-1]) != x.rows.n:
        raise NoRuleError  # DGL's own message
    num = len(offsets) - 1
    rows = x.rows.position_on(offsets.device)
    local = torch.searchsorted(offsets[1:].contiguous(), rows, right=True)
    segment = ShardedTensor(local, x.rows, 0)
    zeros = torch.zeros(num, *x.shape[1:], dtype=x.dtype, device=x.device)
    if op == "sum":
        return zeros.index_add(0, segment, x)
    chosen, is_empty = _first_extremes(x, local, num, "amax" if op == "max" else "amin")
    found = zeros.index_add(0, segment, chosen)
    return found.masked_fill(is_empty, float("-inf" if op == "max" else "inf"))


def _first_extremes(
    x: ShardedTensor, segment: Tensor, num: int, reduce: str
) -> tuple[ShardedTensor, Tensor]:
    """The first of the largest or smallest elements of each segment, and zeros for others.

    Args:
        x: ``[rows, ...]``; what is no number is never chosen.
        segment: of each local row.
        num: how many segments there are.
        reduce: ``"amax"`` or ``"amin"``.

    Returns:
        Elements, and where, ``[num, ...]``, a segment has none.
    """
    values = x.local.detach()
    place = segment.view(-1, *[1] * (values.dim() - 1)).expand(values.shape)

    def of_all(own: Tensor, start: float, how: str) -> Tensor:
        reduced = own.new_full((num, *own.shape[1:]), start).scatter_reduce(0, place, own, how)
        found: Tensor = getattr(transport.all_gather(reduced[None], [1] * WORLD.size), how)(0)
        return found

    least = float("-inf" if reduce == "amax" else "inf")
    numbers = torch.where(values.isnan(), least, values)
    is_best = (values == of_all(numbers, least, reduce)[segment]) & ~values.isnan()
    position = x.rows.position_on(values.device).view(-1, *[1] * (values.dim() - 1))
    position = torch.where(is_best, position, x.rows.n)
    first = of_all(position, x.rows.n, "amin")
    is_chosen = is_best & (position == first[segment])
    chosen = x.local.where(is_chosen, 0)
    return ShardedTensor(chosen, x.rows, 0), first == x.rows.n
