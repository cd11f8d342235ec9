"""Measured choices are cached, and decide the order of rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastgraph import Graph
from fastgraph.machine import cache, native
from fastgraph.tune import choices
from fastgraph.tune.choices import Kept, Orders, Use, identity_of
from fastgraph.tune.row_order import USES_BEFORE_ORDERING, RowOrder
from tests.graphs import mixed_communities

rows_of = RowOrder(native.library)
WIDE = torch.empty(5000, 256)
OTHER = torch.empty(5000, 240)
SUMS = Use(False, False, 1024)


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept[Use, int]:
    """Choices in a folder of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(choices, "ORDERS", choices.ORDERS.again())
    return choices.ORDERS


def keep(graph: Graph, orders: Orders) -> None:
    choices.ORDERS.keep(choices.machine(), {identity_of(graph): orders})


def communities(**options: bool) -> Graph:
    edges = mixed_communities(5000, 20, generator=torch.Generator().manual_seed(0), **options)
    return Graph(edges, 5000, 5000)


def test_a_graph_is_known_again(kept: Kept[Use, int]) -> None:
    graph, machine = communities(), choices.machine()
    assert choices.orders_of(graph) is choices.NOTHING
    keep(graph, {SUMS: 1024})
    backward = {SUMS._replace(transpose=True): 0}
    kept.keep(machine, {identity_of(graph): backward, "another": {SUMS: 0}})
    for source in (kept, kept.again()):  # in another run, too
        assert source.of(machine, communities()) == {SUMS: 1024, **backward}
        assert source.of(machine, communities().renumbered()) == {SUMS: 1024, **backward}
        assert source.of(machine, communities(mixed=False)) == {}
        assert source.of("another", communities()) == {}
    assert choices.orders_of(communities(mixed=False)) is choices.NOTHING


def test_a_choice_comes_before_the_policy(kept: Kept[Use, int]) -> None:
    graph = communities()
    attention, backward = Use(False, True, 1024), Use(True, False, 1024)
    keep(graph, {SUMS: 1024, attention: 0, backward: 0})
    rows = rows_of(graph, WIDE, transpose=False)
    assert rows.order is not None and rows_of(graph, WIDE, transpose=False) is rows
    assert graph.nbytes == rows.nbytes + graph.by_destination.nbytes + graph.by_source.nbytes
    for _ in range(2 * USES_BEFORE_ORDERING):
        assert rows_of(graph, WIDE, transpose=False, attention=True) is graph.by_destination
        assert rows_of(graph, WIDE, transpose=True) is graph.by_source
    # Of another width nothing is known.
    for _ in range(USES_BEFORE_ORDERING):
        assert rows_of(graph, OTHER, transpose=False).order is None
    assert rows_of(graph, OTHER, transpose=False).order is not None


def test_attention_may_have_an_order_that_the_model_has_for_sums_alone(
    kept: Kept[Use, int],
) -> None:
    graph = Graph(mixed_communities(5000, 5), 5000, 5000)
    use = Use(False, True, 1024)
    keep(graph, {use: 1024})
    assert rows_of(graph, WIDE, transpose=False, attention=True).order is not None


def test_rows_stay_where_no_order_is_found(kept: Kept[Use, int]) -> None:
    graph = communities(mixed=False)
    bipartite = Graph(mixed_communities(5000, 20), 5000, 5001)
    for one in (graph, bipartite):
        keep(one, {SUMS: 1024})
        assert rows_of(one, WIDE, transpose=False) is one.by_destination


@pytest.mark.parametrize(
    "content", [[], {"a": 1}, {"a": [[1, 2]]}, {"a": [[["x", 0], 3]]}, {"a": [[[0, 0, "x"], 3]]}, 3]
)
def test_what_are_no_choices_are_none(kept: Kept[Use, int], content: object) -> None:
    cache.write(kept.kind, choices.machine(), content)
    assert kept.exists
    assert choices.orders_of(communities()) is choices.NOTHING


def test_other_threads_have_other_choices(restore_threads: None) -> None:
    path, graph = choices.path(), communities()
    keep(graph, {SUMS: 1024})
    assert path.is_file() and choices.orders_of(graph) == {SUMS: 1024}
    torch.set_num_threads(torch.get_num_threads() + 1)
    assert choices.path() != path
    assert choices.orders_of(graph) is choices.NOTHING
