"""Dual-interleaved attention: along edges in some turns, of all pairs in others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastgraph import ops
from fastgraph.graphs.memo import remembered
from fastgraph.layers.arguments import (
    check_choices,
    check_flags,
    check_heads,
    check_integers,
    check_kinds,
    check_rates,
)
from fastgraph.layers.few_rows import ELSEWHERE, Entries
from fastgraph.layers.typed_pairs import TypesOf, attention_by_types
from fastgraph.nn.conditions import Conditions
from fastgraph.nn.dual_pattern import (
    LONGEST,
    TYPES,
    DualPattern,
    Split,
    dual_pattern,
    refuse_beside_pattern,
    without_rows,
)
from fastgraph.nn.probe import Probe, probe
from fastgraph.nn.reformation import Reformation
from fastgraph.nn.schedule import Schedule
from fastgraph.nn.sub_blocks import Reformed
from fastgraph.ops.heads import drawn_seed

MAX_PAIRS = 1 << 32
"""Of a call: one graph of 65,536 nodes."""


@dataclass(frozen=True)
class DualReport:
    """Which attention a layer computes for a pattern in this step, why, and at what cost.

    It follows from the pattern, the schedule and the step alone, and is the same on all ranks that
    have these.

    Attributes:
        dense: for each graph, whether it attends to all pairs.
        reason: in words.
        pairs: of rows that attend to all, each with a score for each head.
        entries: of rows that attend along edges.
        conditions: of each graph, where the policy asks for them.
        reformation: what became of edges, in words, where a reformation changes or lays them out.
    """

    dense: tuple[bool, ...]
    reason: str
    pairs: int
    entries: int
    conditions: tuple[Conditions, ...] | None = None
    reformation: str | None = None

    def __str__(self) -> str:
        lines = [
            f"{sum(self.dense)} of {len(self.dense)} graphs dense: {self.reason}",
            f"{self.pairs} pairs, {self.entries} entries along edges",
        ]
        if self.reformation is not None:
            lines.append(self.reformation)
        for number, found in enumerate(self.conditions or ()):
            lines += [f"graph {number}:", *(f"  {line}" for line in str(found).splitlines())]
        return "\n".join(lines)


class DualInterleavedAttention(nn.Module):
    r"""Multi-head attention of nodes that is sparse in some turns and dense in others.

    After TorchGT (Zhang et al., SC 2024, section III-B). In a sparse turn each node attends to its
    neighbours, itself and the global token of its graph, in a dense one to all nodes of its graph
    and the token. Both are :math:`\mathrm{softmax}(q k^T / \sqrt{d}) v`, with the same parameters,
    and dropout of weights in either; nothing of the size of all pairs is stored.

    Policies:

    - ``"union"``, the default. Yun et al. (NeurIPS 2020, assumption 1) need a Hamiltonian path in
      the union of the patterns of all layers only. A dense layer in each forward pass has one:
      without a ``schedule`` that is the first of ``layers``. With ``path=True`` consecutive nodes
      attend to each other instead, and without a ``schedule`` no turn is dense.
    - ``"paper"``: a graph is sparse if :func:`fastgraph.nn.conditions` answers all three questions
      by yes, and dense otherwise, undecided ones included. A ``schedule`` adds dense turns.

    Self-loops are part of every pattern. In a batch each graph has the numbers that it has alone.
    Parameters have the names of ``torch.nn.MultiheadAttention``, whose ``state_dict`` it loads.

    Args:
        channels: of nodes, a multiple of ``heads``.
        heads: of attention.
        policy: "union" or "paper".
        schedule: when turns are dense, shared by the layers of a model.
        layers: of the model, at least 1.
        layer: which of them this is, from 0 on.
        path: whether consecutive nodes of a graph attend to each other in sparse turns. Nodes
            should be in the order of clusters; a token is what makes all reach each other.
        dropout: of weights of attention, in training mode.
        bias: whether projections have one.
        type_bias: whether scores have a learned bias of each head by the type of the pair: a loop,
            an edge, a token, the path, or none of these. In dense turns it takes a byte for each
            pair, and little more while it is made, which is kept beside the pattern up to 64 MiB.
        hops: with ``type_bias``, up to which distance along edges, 1 to 250, pairs have biases of
            their own in dense turns: Graphormer's spatial encoding (Ying et al., NeurIPS 2021).
        max_pairs: beyond which a dense turn is refused.
        reformation: of the edges of sparse turns, shared by the layers of a model; it changes what
            they compute, unless its ``select`` is "exact". Conditions and types of pairs are those
            of the edges before.

    Raises:
        ValueError: an argument is out of its range.
        TypeError: ``schedule`` or ``reformation`` is none, or an option no bool.
    """

    def __init__(
        self,
        channels: int,
        heads: int,
        *,
        policy: str = "union",
        schedule: Schedule | None = None,
        layers: int = 1,
        layer: int = 0,
        path: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        type_bias: bool = False,
        hops: int = 1,
        max_pairs: int = MAX_PAIRS,
        reformation: Reformation | None = None,
    ) -> None:
        super().__init__()
        check_heads(channels, heads)
        check_choices(policy=(policy, ("union", "paper")))
        check_integers(layers=layers)
        check_integers(0, layers - 1, layer=layer)
        check_flags(path=path, bias=bias, type_bias=type_bias)
        check_integers(1, LONGEST, hops=hops)
        if hops > 1 and not type_bias:
            raise ValueError(f"hops: expected 1 without type_bias, got {hops}")
        check_rates(dropout=dropout)
        check_kinds(Schedule, or_none=True, schedule=schedule)
        check_kinds(Reformation, or_none=True, reformation=reformation)
        check_integers(0, max_pairs=max_pairs)
        if schedule is None and policy == "union" and not path:
            schedule = Schedule("layer", layers)
        self.channels, self.heads, self.policy, self.schedule = channels, heads, policy, schedule
        self.layers, self.layer, self.path = layers, layer, path
        self.dropout, self.hops, self.max_pairs = dropout, hops, max_pairs
        self.reformation = reformation
        # Named as torch's, so that a MultiheadAttention's state_dict can be loaded.
        self.in_proj_weight = nn.Parameter(torch.empty(3 * channels, channels))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * channels)) if bias else None
        self.out_proj = nn.Linear(channels, channels, bias=bias)
        types = TYPES + hops - 1
        self.type_bias = nn.Parameter(torch.empty(types, heads)) if type_bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew, as ``torch.nn.MultiheadAttention`` does."""
        nn.init.xavier_uniform_(self.in_proj_weight)
        self.out_proj.reset_parameters()
        for zero in (self.in_proj_bias, self.out_proj.bias, self.type_bias):
            if zero is not None:
                nn.init.zeros_(zero)

    _reset_parameters = reset_parameters  # by which PyG's GPSConv calls it

    def pattern(
        self,
        edge_index: Tensor,
        num_nodes: int,
        batch: Tensor | None = None,
        num_graphs: int | None = None,
        token: bool = False,
        hops: int = 1,
        types: Tensor | None = None,
    ) -> DualPattern:
        """:func:`fastgraph.nn.dual_pattern` of this layer, for as long as these tensors live."""
        make = partial(_pattern, num_graphs=num_graphs, token=token, path=self.path, hops=hops)
        name = f"dual pattern {num_graphs} {token} {self.path} {hops}"
        return remembered(name, make, edge_index, num_nodes, batch, types)

    def forward(
        self,
        x: Tensor,
        edges: Tensor | DualPattern,
        batch: Tensor | None = None,
        token: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of the nodes of each graph.

        Args:
            x: ``[nodes, channels]``.
            edges: int64 or int32 ``[2, E]``, where node ``edges[1, e]`` attends to ``edges[0, e]``;
                or a pattern, which several layers may share, and which compiled code needs. With
                ``type_bias`` or the policy ``"paper"`` it must have been used once before, not
                compiled, as what is derived from it depends on its values.
            batch: the graph of each node, int64 ``[nodes]``, ascending; default: one graph.
            token: the global token of each graph, ``[graphs, channels]``.

        Returns:
            ``[nodes, channels]``, and if there are tokens ``[graphs, channels]`` for them.

        Raises:
            ValueError: an argument has the wrong shape, dtype or order; a pattern is of other
                nodes, tokens or ``path``; or a dense turn has more than ``max_pairs`` pairs.
            IndexError: ``edges`` points outside the nodes.
        """
        pattern = self._checked(x, edges, batch, token)
        rows = x if token is None else torch.cat([x, token])
        query, key, value = self._projected(rows)
        out = self._attention(query, key, value, pattern)
        out = self.out_proj(out.reshape(rows.shape))
        return out if token is None else (out[: len(x)], out[len(x) :])

    def report(self, pattern: DualPattern) -> DualReport:
        """A description of the attention that :meth:`forward` computes for a pattern now."""
        graphs = pattern.num_graphs
        if self._is_dense_turn():
            reason = f"a dense turn of {self.schedule!r}"
            return DualReport((True,) * graphs, reason, pattern.pairs, 0)
        reformation, entries = self._reformation(pattern), len(self._entries(pattern).sources)
        if self.policy == "paper":
            found, split = pattern.conditions(self.layers), pattern.split(self.layers)
            is_dense = tuple(not one.hold for one in found)
            reason = "those of which a condition is not answered by yes"
            return DualReport(is_dense, reason, split.pairs, entries, found, reformation)
        union = self._union(pattern)
        return DualReport((False,) * graphs, union, 0, entries, reformation=reformation)

    def probe(
        self,
        x: Tensor,
        edges: Tensor | DualPattern,
        batch: Tensor | None = None,
        token: Tensor | None = None,
        *,
        queries: int = 64,
        seed: int = 0,
    ) -> Probe:
        """A measure of what sparse turns miss of dense ones, at random nodes and tokens.

        Takes time and memory of ``queries`` times nodes, at any ``max_pairs``.

        Args:
            x: as for :meth:`forward`.
            edges: likewise.
            batch: likewise.
            token: likewise.
            queries: how many, at least 1; at most all are looked at.
            seed: of their choice.

        Raises:
            ValueError: as :meth:`forward`, or there are no nodes.
        """
        pattern = self._checked(x, edges, batch, token)
        projected = self._projected(x if token is None else torch.cat([x, token]))
        table, reformed = self._table(projected[0]), self._reformed(pattern)
        entries = pattern if reformed is None else reformed
        return probe(*projected, pattern, entries, table, self.hops, queries, seed)

    def _checked(
        self,
        x: Tensor,
        edges: Tensor | DualPattern,
        batch: Tensor | None,
        token: Tensor | None,
    ) -> DualPattern:
        """The pattern of a call."""
        if x.dim() != 2 or x.shape[1] != self.channels:
            raise ValueError(f"x: expected [nodes, {self.channels}], got {list(x.shape)}")
        if token is not None and (token.dim() != 2 or token.shape[1] != self.channels):
            raise ValueError(f"token: expected [graphs, {self.channels}], got {list(token.shape)}")
        if isinstance(edges, Tensor):
            index, edges = edges, self.pattern(edges, len(x), batch, token=token is not None)
            if token is not None and batch is not None and len(token) > edges.num_graphs:
                edges = self.pattern(index, len(x), batch, len(token), token=True)
        else:
            refuse_beside_pattern(batch=batch)
        if edges.num_nodes != len(x):
            raise ValueError(f"edges: expected a pattern of {len(x)} nodes, got {edges.num_nodes}")
        if self.type_bias is not None and edges.hops > self.hops:
            raise ValueError(
                f"edges: expected a pattern of hops up to {self.hops}, as the layer has, got "
                f"{edges.hops}"
            )
        if edges.has_path != self.path:
            wanted, got = ("one", "none") if self.path else ("none", "one")
            raise ValueError(
                f"edges: expected a pattern of path={self.path}, as the layer has, with "
                f"{wanted} along consecutive nodes, got a pattern with {got}"
            )
        if edges.has_token != (token is not None):
            raise ValueError(
                f"token: expected {'one for each graph' if edges.has_token else 'None'}, as the "
                f"pattern has, got {'None' if token is None else 'tokens'}"
            )
        if token is not None and len(token) != edges.num_graphs:
            raise ValueError(
                f"token: expected one for each of {edges.num_graphs} graphs, got {len(token)}"
            )
        return edges

    def _projected(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        projected = F.linear(rows, self.in_proj_weight, self.in_proj_bias)
        by_head = projected.view(len(rows), 3, self.heads, self.channels // self.heads)
        query, key, value = by_head.unbind(1)
        return query, key, value

    def _table(self, query: Tensor) -> Tensor | None:
        return None if self.type_bias is None else self.type_bias.to(query.dtype)

    def _is_dense_turn(self) -> bool:
        return self.schedule is not None and self.schedule.is_dense(self.layer, self.training)

    def _union(self, pattern: DualPattern) -> str:
        """Why a sparse turn of the policy "union" is one."""
        turns = range(self.layers) if self.schedule is not None else ()
        for layer in turns:
            if self.schedule is not None and self.schedule.is_dense(layer, self.training):
                return f"layer {layer} attends to all pairs, which has a Hamiltonian path"
        if not pattern.has_path:
            return f"a sparse turn of {self.schedule!r}, whose layers need not have a path"
        if pattern.has_token:
            return "the path joins consecutive nodes, and the token all"
        return "the path joins consecutive nodes; without a token not all reach each other"

    def _row_bytes(self) -> int:
        return self.channels * self.in_proj_weight.element_size()

    def _reformed(self, pattern: DualPattern) -> Reformed | None:
        """The entries that a reformation makes of a pattern, if there is one."""
        if self.reformation is None:
            return None
        hops = 1 if self.type_bias is None else self.hops
        return self.reformation.entries(
            pattern, self._row_bytes(), hops=hops, layer=self.layer, training=self.training
        )

    def _entries(self, pattern: DualPattern) -> DualPattern | Split | Reformed:
        """The entries of a sparse turn, by the policy "paper" those of sparse graphs."""
        reformed = self._reformed(pattern)
        if self.policy == "union":
            return pattern if reformed is None else reformed
        split = pattern.split(self.layers)
        if reformed is None:
            return split
        if not split.pairs:
            return reformed
        sources, ptr, types = without_rows(
            reformed.sources, reformed.ptr, reformed.types, split.rows
        )
        return replace(split, sources=sources, ptr=ptr, types=types)

    def _reformation(self, pattern: DualPattern) -> str | None:
        """An account of what became of edges."""
        if self.reformation is None:
            return None
        reformed = self._reformed(pattern)
        if reformed is not None:
            dense = ", of dense graphs, too" if self.policy == "paper" else ""
            return f"{self.reformation!r}: {reformed}{dense}"
        is_mass = self.reformation.select == "mass"
        waits = is_mass and (self.training or self.reformation.evaluation == "same")
        reason = "no pairs are selected before they are measured" if waits else "not in evaluation"
        return f"{self.reformation!r}: {reason}"

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, pattern: DualPattern) -> Tensor:
        if self._is_dense_turn():
            self._refuse_too_many(pattern.pairs)
            query, key, value = (pattern.in_order(x) for x in (query, key, value))
            types_of: TypesOf = partial(pattern.pair_types_between, hops=self.hops)
            return pattern.back(self._dense(query, key, value, pattern.offsets, types_of))
        if self.reformation is not None and self.reformation.is_measuring:
            table = self._table(query)
            self.reformation.measure(
                query, key, value, pattern, table, self._row_bytes(), self.layer
            )
        out = self._sparse(query, key, value, self._entries(pattern), pattern.num_nodes)
        if self.policy == "union":
            return out
        split = pattern.split(self.layers)
        if not split.pairs:
            return out
        self._refuse_too_many(split.pairs)
        rows = split.rows
        types_of = lambda begin, end: pattern.pair_types(rows[begin:end], self.hops)  # noqa: E731
        dense = self._dense(query[rows], key[rows], value[rows], split.offsets, types_of)
        return out.index_copy(0, rows, dense)

    def _dense(
        self, query: Tensor, key: Tensor, value: Tensor, ptr: Tensor, types_of: TypesOf
    ) -> Tensor:
        table, rate = self._table(query), self.dropout if self.training else 0.0
        if table is not None:
            return attention_by_types(query, key, value, ptr, table, types_of, rate)
        out, _ = ops.dense_attention(query, key, value, ptr, dropout=rate, seed=drawn_seed(rate))
        return out

    def _sparse(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        entries: DualPattern | Split | Reformed,
        num_nodes: int,
    ) -> Tensor:
        table, rate = self._table(query), self.dropout if self.training else 0.0
        sources, ptr, seed = entries.sources, entries.ptr, drawn_seed(rate)
        types = None if table is None else entries.types
        of_tokens, attend = None, ELSEWHERE.get(type(query))
        if attend is not None and num_nodes < len(query):
            first = int(ptr[num_nodes])  # entries of nodes come first, and keep their numbers
            further = None if types is None else types[first:]
            own = Entries(sources[first:], ptr[num_nodes:], further, first)
            of_tokens = attend(query[num_nodes:], key, value, own, table, rate, seed)
        if of_tokens is not None:
            query, sources, ptr = query[:num_nodes], sources[:first], ptr[: num_nodes + 1]
            types = None if types is None else types[:first]
        if rate == 0 and self.reformation is not None and self.reformation.kernel == "blocks":
            out, _ = ops.block_attention(
                query, key, value, sources, ptr=ptr, bias=table, bias_index=types
            )
        else:
            out, *_ = ops.attention(
                query,
                key,
                value,
                sources,
                ptr=ptr,
                bias=table,
                bias_index=types,
                dropout=rate,
                seed=seed,
            )
        return out if of_tokens is None else torch.cat([out, of_tokens])

    def _refuse_too_many(self, pairs: int) -> None:
        """Raise a ValueError with an estimate if so many pairs are too many."""
        if pairs > self.max_pairs:
            width = self.channels // self.heads
            operations = 4 * pairs * self.channels
            raise ValueError(
                f"dense attention does not fit: it has {pairs} pairs, expected at most "
                f"max_pairs={self.max_pairs}. A forward pass would take about "
                f"{operations / 1e12:.3g} * 10^12 operations ({self.heads} heads of {width} "
                f"channels), and {pairs * self.heads * 4 / 2**30:.3g} GiB where torch stores the "
                "scores. A larger max_pairs allows it; path=True, or a schedule without a dense "
                "turn here, avoids it"
            )

    def extra_repr(self) -> str:
        """The options, as they are printed."""
        return (
            f"{self.channels}, heads={self.heads}, policy={self.policy!r}, "
            f"layer={self.layer} of {self.layers}, schedule={self.schedule!r}"
        )


def _pattern(
    edge_index: Tensor, num_nodes: int, batch: Tensor | None, types: Tensor | None, **options: Any
) -> DualPattern:
    return dual_pattern(edge_index, num_nodes, batch, types=types, **options)
