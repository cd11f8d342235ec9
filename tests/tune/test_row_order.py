"""The order in which rows are visited is learnt from their use."""

from __future__ import annotations

import torch

import fastgraph
from fastgraph import Graph
from fastgraph.graphs.edges import graph_of
from fastgraph.graphs.memo import MEMO
from fastgraph.machine import native
from fastgraph.tune.row_order import USES_BEFORE_ORDERING, RowOrder
from tests.graphs import mixed_communities, random_edges

rows_of = RowOrder(native.library)

WIDE = torch.empty(5000, 256)


def test_rows_are_put_in_order_after_some_uses() -> None:
    graph = Graph(mixed_communities(5000, 20), 5000, 5000)
    for transpose in (False, True):
        for _ in range(USES_BEFORE_ORDERING):
            assert rows_of(graph, WIDE, transpose=transpose) is graph.grouped(transpose=transpose)
        ordered = rows_of(graph, WIDE, transpose=transpose)
        assert ordered.order is not None
        assert rows_of(graph, WIDE, transpose=transpose) is ordered
        # What depends on the order still comes from rows in theirs.
        assert graph.grouped(transpose=transpose).order is None
    held = [
        rows
        for t in (False, True)
        for rows in (graph.grouped(transpose=t), rows_of(graph, WIDE, transpose=t))
    ]
    assert graph.nbytes == sum(rows.nbytes for rows in held)


def test_the_memo_counts_what_the_order_takes() -> None:
    fastgraph.clear_cache()
    index = mixed_communities(5000, 20)
    graph = graph_of(index, None, 5000, 5000)
    before = MEMO.nbytes
    for _ in range(1 + USES_BEFORE_ORDERING):
        rows = rows_of(graph, WIDE, transpose=False)
    assert MEMO.nbytes == before + rows.nbytes == graph.nbytes


def test_the_widest_features_decide_about_the_order() -> None:
    """The last layer of a model is narrow, and may be the one at hand when the order is made."""
    graph = Graph(mixed_communities(5000, 20), 5000, 5000)
    rows_of(graph, WIDE, transpose=False)
    for _ in range(USES_BEFORE_ORDERING):
        rows_of(graph, torch.empty(5000, 7), transpose=False)
    assert rows_of(graph, WIDE, transpose=False).order is not None


def test_much_narrower_features_get_the_rows_as_they_are() -> None:
    graph = Graph(mixed_communities(5000, 20), 5000, 5000)
    for _ in range(1 + USES_BEFORE_ORDERING):
        rows_of(graph, WIDE, transpose=False)
    assert rows_of(graph, WIDE[:, :64].contiguous(), transpose=False).order is not None
    assert rows_of(graph, torch.empty(5000, 63), transpose=False).order is None


def test_attention_needs_more_of_a_saving() -> None:
    graph = Graph(mixed_communities(5000, 5), 5000, 5000)
    for _ in range(1 + USES_BEFORE_ORDERING):
        rows_of(graph, WIDE, transpose=False)
    assert rows_of(graph, WIDE, transpose=False).order is not None
    assert rows_of(graph, WIDE, transpose=False, attention=True).order is None


def test_isolated_nodes_do_not_stand_in_the_way() -> None:
    graph = Graph(mixed_communities(5000, 20), 50_000, 50_000)
    for _ in range(1 + USES_BEFORE_ORDERING):
        rows_of(graph, torch.empty(50_000, 256), transpose=False)
    assert rows_of(graph, torch.empty(50_000, 256), transpose=False).order is not None


def test_rows_stay_where_they_are_unless_that_helps() -> None:
    no_better = Graph(random_edges(5000, 5000, 100_000), 5000, 5000)
    bipartite = Graph(mixed_communities(5000, 20), 5000, 5001)
    narrow = Graph(mixed_communities(5000, 20), 5000, 5000)
    for _ in range(1 + USES_BEFORE_ORDERING):  # there is little to gather
        rows = rows_of(narrow, torch.empty(5000, 16), transpose=False)
        assert rows is narrow.by_destination
    renumbered = Graph(mixed_communities(5000, 20), 5000, 5000)
    for _ in range(USES_BEFORE_ORDERING):
        rows_of(renumbered, WIDE, transpose=False)
    renumbered = renumbered.renumbered()
    for graph in (no_better, bipartite, renumbered):
        for _ in range(USES_BEFORE_ORDERING):
            rows = rows_of(graph, WIDE, transpose=False)
            assert rows is graph.by_destination
    for graph in (no_better, bipartite):
        assert rows_of(graph, WIDE, transpose=False) is graph.by_destination
