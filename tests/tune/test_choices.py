"""Measured choices are cached, and decide the order of rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fastgraph import Graph
from fastgraph.machine import cache, native
from fastgraph.tune import choices
from fastgraph.tune.choices import KeptOrders, Use, identity_of
from fastgraph.tune.row_order import USES_BEFORE_ORDERING, RowOrder
from tests.graphs import mixed_communities

rows_of = RowOrder(native.library)
WIDE = torch.empty(5000, 256)
OTHER = torch.empty(5000, 240)
SUMS = Use(False, False, 1024)


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KeptOrders]:
    """Choices in a folder of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = KeptOrders()
    with choices.replaced(source):
        yield source


def communities(**options: bool) -> Graph:
    edges = mixed_communities(5000, 20, generator=torch.Generator().manual_seed(0), **options)
    return Graph(edges, 5000, 5000)


def test_a_graph_is_known_again(kept: KeptOrders) -> None:
    graph = communities()
    assert kept.of(graph) == {}
    kept.keep({identity_of(graph): {SUMS: 1024}})
    kept.keep({identity_of(graph): {SUMS._replace(transpose=True): 0}, "another": {SUMS: 0}})
    expected = {SUMS: 1024, SUMS._replace(transpose=True): 0}
    for source in (kept, KeptOrders()):  # in another run, too
        assert source.of(communities()) == expected
        assert source.of(communities().renumbered()) == expected
        assert source.of(communities(mixed=False)) == {}


def test_a_choice_comes_before_the_policy(kept: KeptOrders) -> None:
    graph = communities()
    attention, backward = Use(False, True, 1024), Use(True, False, 1024)
    kept.keep({identity_of(graph): {SUMS: 1024, attention: 0, backward: 0}})
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


def test_attention_may_have_an_order_that_the_model_has_for_sums_alone(kept: KeptOrders) -> None:
    graph = Graph(mixed_communities(5000, 5), 5000, 5000)
    use = Use(False, True, 1024)
    kept.keep({identity_of(graph): {use: 1024}})
    assert rows_of(graph, WIDE, transpose=False, attention=True).order is not None


def test_rows_stay_where_no_order_is_found(kept: KeptOrders) -> None:
    graph = communities(mixed=False)
    bipartite = Graph(mixed_communities(5000, 20), 5000, 5001)
    for one in (graph, bipartite):
        kept.keep({identity_of(one): {SUMS: 1024}})
        assert rows_of(one, WIDE, transpose=False) is one.by_destination


@pytest.mark.parametrize("content", [[], {"a": 1}, {"a": [[1, 2]]}, {"a": [["x", 0, 1, 2, 3]]}, 3])
def test_what_are_no_choices_are_none(kept: KeptOrders, content: object) -> None:
    kept.keep({"a": {SUMS: 0}})
    path = choices.path()
    identity = json.loads(path.read_text())["identity"]
    cache.write("choices-1", identity, content)
    assert KeptOrders().of(communities()) == {}


def test_other_threads_have_other_choices(kept: KeptOrders, restore_threads: None) -> None:
    path = choices.path()
    torch.set_num_threads(torch.get_num_threads() + 1)
    assert choices.path() != path
