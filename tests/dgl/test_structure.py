"""DGL's graphs are sorted once, found again whichever way they come, and freed with DGL's own."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import fastgraph
from fastgraph import Graph
from fastgraph.graphs import witness
from fastgraph.graphs.memo import MEMO
from tests.dgl.graphs import ORDINARY, dgl, graph, of_case
from tests.graphs import random_edges

import dgl.function as fn  # isort: skip
import dgl.nn as dglnn  # isort: skip
from fastgraph.dgl import structure  # isort: skip


@pytest.fixture(autouse=True)
def nothing_remembered() -> None:
    fastgraph.clear_cache()


def layer() -> Any:
    return dglnn.GATConv(4, 3, 2, allow_zero_in_degree=True)


def step(module: Any, g: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = module(g, x)
    out.square().sum().backward()
    return out.detach()


def test_a_graph_is_built_once(sorted_graphs: list[Graph]) -> None:
    g, x, module = of_case(ORDINARY), torch.randn(30, 4), layer()
    with fastgraph.enabled(strict=True):
        for _ in range(3):
            step(module, g, x)
            with g.local_scope():
                step(module, g.local_var(), x)
            dgl.ops.copy_u_sum(g, x)
        assert len(sorted_graphs) == 1
        for _ in range(3):
            dgl.ops.u_mul_e_sum(g, x, torch.rand(150, 1))
        assert len(sorted_graphs) == 2  # which knows the numbers of edges


@pytest.mark.parametrize("norm", ["none", "right", "both"])
@pytest.mark.parametrize("has_csc", [True, False])
def test_a_call_reads_a_csc_of_dgls_once(
    norm: str, has_csc: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    checksums = witness._checksums

    def counted(tensors: Sequence[torch.Tensor]) -> Any:
        read.append(len(tensors))
        return checksums(tensors)

    nodes = torch.arange(9)
    g, x = dgl.graph((nodes, (nodes + 1) % 9)), torch.randn(9, 4)  # in which none is lonely
    module = dglnn.GraphConv(4, 3, norm=norm)
    if has_csc:
        g.in_degrees()
    with fastgraph.enabled(strict=True):
        step(module, g, x)
        step(module, g, x)  # makes a checksum
        monkeypatch.setattr(witness, "_checksums", counted)
        step(module, g, x)
    assert read == ([2] if has_csc else [])


def test_what_inference_has_found_serves_training() -> None:
    g, x = of_case(ORDINARY), torch.randn(30, 16, requires_grad=True)
    expected = dgl.ops.copy_u_max(g, x.detach())
    with fastgraph.enabled(strict=True):
        with torch.inference_mode():
            dgl.ops.copy_u_max(g, x)
        out = dgl.ops.copy_u_max(g, x)
        out.nan_to_num(0, 0, 0).sum().backward()
    torch.testing.assert_close(out, expected)


def test_one_that_is_sorted_already_needs_no_numbers(sorted_graphs: list[Graph]) -> None:
    g = dgl.graph(("csc", (torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1]), torch.tensor([]))))
    with fastgraph.enabled(strict=True):
        dgl.ops.copy_u_sum(g, torch.randn(2, 4))
        dgl.ops.u_mul_e_sum(g, torch.randn(2, 4), torch.rand(3, 1))
    assert len(sorted_graphs) == 1


def test_a_relation_is_found_by_its_graph(sorted_graphs: list[Graph]) -> None:
    relations = {
        ("a", name, "a"): tuple(random_edges(9, 9, 40, seed=s)) for s, name in enumerate("rs")
    }
    g, x, module = dgl.heterograph(relations), torch.randn(9, 4), layer()
    with fastgraph.enabled(strict=True):
        for _ in range(3):
            for name in "rs":
                out = step(module, g[name], x)
    assert len(sorted_graphs) == 2
    torch.testing.assert_close(out, module(g["s"], x).detach())


def test_the_only_relation_of_a_graph_is_the_graph(sorted_graphs: list[Graph]) -> None:
    g, x = of_case(ORDINARY), torch.randn(30, 4)
    copy_u, add = dgl.function.copy_u, dgl.function.sum
    expected = dgl.ops.copy_u_sum(of_case(ORDINARY), x)
    with fastgraph.enabled(strict=True):
        found = []
        for etype in (None, "_E"):
            with g.local_scope():
                g.ndata["x"] = x
                g.update_all(copy_u("x", "m"), add("m", "y"), etype=etype)
                found.append(g.ndata["y"])
        found.append(dgl.ops.copy_u_sum(g, x))
    torch.testing.assert_close(found, 3 * [expected])
    assert len(sorted_graphs) == 1


def test_reversing_a_graph_turns_round_what_is_there(sorted_graphs: list[Graph]) -> None:
    g, x, w = of_case(ORDINARY), torch.randn(30, 4), torch.rand(150, 1)
    back = dgl.reverse(g)
    expected = dgl.ops.u_mul_e_sum(back, x, w), dgl.ops.copy_u_max(back, x)
    with fastgraph.enabled(strict=True):
        dgl.ops.u_mul_e_sum(g, x, w)
        for _ in range(2):
            out = dgl.ops.u_mul_e_sum(dgl.reverse(g), x, w)
        twice = dgl.ops.u_mul_e_sum(dgl.reverse(dgl.reverse(g)), x, w)
        assert len(sorted_graphs) == 1
        largest = dgl.ops.copy_u_max(dgl.reverse(g), x)
    torch.testing.assert_close((out, largest), expected)
    torch.testing.assert_close(twice, dgl.ops.u_mul_e_sum(g, x, w))


def test_a_reversed_graph_outlives_the_other() -> None:
    g, x = of_case(ORDINARY), torch.randn(30, 4)
    expected = dgl.ops.copy_u_sum(dgl.reverse(g), x)
    with fastgraph.enabled(strict=True):
        known, unknown = dgl.reverse(g), dgl.reverse(graph(ORDINARY.edge_index, 30))
        dgl.ops.copy_u_sum(g, x)
        del g
        gc.collect()
        torch.testing.assert_close(dgl.ops.copy_u_sum(known, x), expected)
        torch.testing.assert_close(dgl.ops.copy_u_sum(unknown, x), expected)


def test_the_reverse_of_a_bipartite_graph() -> None:
    g = graph(random_edges(9, 4, 30), 9, 4)
    x = torch.randn(4, 3)
    expected = dgl.ops.copy_u_sum(dgl.reverse(g), x)
    with fastgraph.enabled(strict=True):
        torch.testing.assert_close(dgl.ops.copy_u_sum(dgl.reverse(g), x), expected)


def test_graphs_go_when_dgls_do() -> None:
    with fastgraph.enabled(strict=True):
        relations = {("a", name, "a"): tuple(random_edges(9, 9, 40)) for name in "rs"}
        g, single = dgl.heterograph(relations), of_case(ORDINARY)
        g.create_formats_()
        single.create_formats_()
        step(layer(), g["r"], torch.randn(9, 4))
        step(layer(), single, torch.randn(30, 4))
        dgl.ops.copy_u_sum(dgl.reverse(single), torch.randn(30, 4))
    sources = [weakref.ref(structure._source_of(graph._graph)) for graph in (g, single)]
    assert len(MEMO) == 2
    del g
    gc.collect()
    MEMO.trim()
    assert len(MEMO) == 1
    assert sources[0]() is None
    del single
    gc.collect()
    MEMO.trim()
    assert len(MEMO) == 0 and MEMO.nbytes == 0
    assert sources[1]() is None


def test_so_do_those_of_which_dgl_has_no_csc(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[Graph] = weakref.WeakSet()
    build = Graph.__init__

    def recording(graph: Graph, *given: Any, **options: Any) -> None:
        alive.add(graph)
        build(graph, *given, **options)

    monkeypatch.setattr(Graph, "__init__", recording)
    with fastgraph.enabled(strict=True):
        g, x = of_case(ORDINARY), torch.randn(30, 16, requires_grad=True)
        step(layer(), g, torch.randn(30, 4))
        dgl.ops.copy_u_max(g, x).nan_to_num(0, 0, 0).sum().backward()
        dgl.ops.copy_e_sum(g, torch.randn(150, 128))
    assert len(alive) > 1 and len(MEMO) == 0
    del g
    gc.collect()
    assert not alive


def test_new_graphs_in_old_places_are_new() -> None:
    module, x = layer(), torch.randn(8, 4)
    for seed in range(50):
        g = graph(random_edges(8, 8, 20, seed=seed), 8)
        expected = module(g, x)
        with fastgraph.enabled(strict=True):
            torch.testing.assert_close(module(g, x), expected)


@pytest.mark.parametrize("order", ["ascending", "almost ascending", "any"])
@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_edges_in_their_order_need_no_csc_of_dgls(idtype: torch.dtype, order: str) -> None:
    index = random_edges(30, 20, 300).to(idtype)
    if order != "any":
        index = index[:, index[1].argsort(stable=True)]
    if order == "almost ascending":
        index[:, [1, 298]] = index[:, [298, 1]]
    x, w, edges = torch.randn(30, 8), torch.rand(300, 1), torch.randn(300, 128)
    g, ours = graph(index, 30, 20), graph(index, 30, 20)
    functions = (
        lambda g: dgl.ops.copy_u_sum(g, x),
        lambda g: dgl.ops.u_mul_e_sum(g, x, w),
        lambda g: dgl.ops.copy_u_max(g, x),
        lambda g: dgl.ops.copy_e_sum(g, edges),
    )
    expected = [function(g) for function in functions]
    with fastgraph.enabled(strict=True):
        torch.testing.assert_close([function(ours) for function in functions], expected)
    assert "csc" in g.formats()["created"] and ours.formats()["created"] == ["coo"]
    assert len(MEMO) == 0


@pytest.mark.parametrize("first", ["plain", "numbered"])
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(("nodes", "edges"), [(1, 0), (9, 40), (700, 30), (3000, 90_000)])
def test_edges_are_grouped_as_dgl_groups_them(
    nodes: int, edges: int, threads: int, first: str, restore_threads: None
) -> None:
    torch.set_num_threads(threads)
    g = graph(random_edges(nodes, nodes, edges), nodes)
    found = structure.structure_of(g._graph)
    assert isinstance(found, structure.Structure) and found.num_edges == edges
    getattr(found, first)()
    ptr, index, numbers = g.adj_tensors("csc")
    assert torch.equal(found.ptr, ptr) and torch.equal(found.index.long(), index)
    assert found.edge_ids is not None or torch.equal(numbers, torch.arange(edges))
    if found.edge_ids is not None:
        assert torch.equal(found.edge_ids.long(), numbers)
    plain, numbered = found.plain(), found.numbered()
    assert found.plain() is plain and found.numbered() is numbered
    assert torch.equal(plain.edges.index.long(), index)


def test_numbers_of_edges_are_kept_once_somebody_asks(sorted_graphs: list[Graph]) -> None:
    g, x = of_case(ORDINARY), torch.randn(30, 4)
    with fastgraph.enabled(strict=True):
        dgl.ops.u_mul_e_sum(g, x, torch.rand(150, 1))
        dgl.ops.copy_u_sum(g, x)
    assert len(sorted_graphs) == 1


@pytest.mark.parametrize("is_created", [False, True])
def test_a_csc_of_dgls_is_taken_where_there_is_one(is_created: bool) -> None:
    g, x = of_case(ORDINARY), torch.randn(30, 4)
    expected = dgl.ops.copy_u_sum(of_case(ORDINARY), x)
    if is_created:
        g.in_degrees()
    with fastgraph.enabled(strict=True):
        torch.testing.assert_close(dgl.ops.copy_u_sum(g, x), expected)
    assert len(MEMO) == is_created
    assert ("csc" in g.formats()["created"]) == is_created


def test_views_of_other_graphs_leave_the_groups_as_they_are(sorted_graphs: list[Graph]) -> None:
    g, other, x = of_case(ORDINARY), of_case(ORDINARY), torch.randn(30, 4)
    with fastgraph.enabled(strict=True):
        for _ in range(2):
            dgl.ops.copy_u_sum(g, x)
            other.adj_tensors("csc")
    assert len(sorted_graphs) == 1 and g.formats()["created"] == ["coo"]


def test_an_edit_of_a_csc_that_was_given_out_while_nobody_counted() -> None:
    g, module, x = of_case(ORDINARY), layer(), torch.randn(30, 4)
    with fastgraph.enabled(strict=True):
        module(g, x)
    _, index, _ = g.adj_tensors("csc")
    index[:10] = 0
    with fastgraph.enabled(strict=True):
        ours = module(g, x)
    by_csc = dgl.graph(("csc", g.adj_tensors("csc")), num_nodes=30)
    torch.testing.assert_close(ours, module(by_csc, x))


def test_an_edit_by_the_reversed_graph() -> None:
    g, x = of_case(ORDINARY), torch.randn(30, 4)
    with fastgraph.enabled(strict=True):
        dgl.ops.copy_u_sum(g, x)
        g.create_formats_()
        _, index, _ = dgl.reverse(g).adj_tensors("csr")
        index[:10] = 0
        ours = dgl.ops.copy_u_sum(g, x)
    torch.testing.assert_close(ours, dgl.ops.copy_u_sum(g, x))


def test_edits_of_a_graph() -> None:
    g, module = of_case(ORDINARY), layer()
    edits = (
        lambda: g.add_edges([0, 1, 2], [5, 5, 5]),
        lambda: g.remove_edges([0, 7]),
        lambda: g.add_nodes(2),
        lambda: g.remove_nodes([3]),
    )
    for edit in edits:
        with fastgraph.enabled(strict=True):
            module(g, torch.randn(g.num_nodes(), 4))
        edit()
        x, w = torch.randn(g.num_nodes(), 4), torch.rand(g.num_edges(), 1)
        expected = module(g, x), dgl.ops.u_mul_e_sum(g, x, w)
        with fastgraph.enabled(strict=True):
            torch.testing.assert_close((module(g, x), dgl.ops.u_mul_e_sum(g, x, w)), expected)


@pytest.mark.parametrize("has_csc", [True, False])
@pytest.mark.parametrize("uses", [1, 2, 3])
def test_edits_of_the_memory_of_a_graph(uses: int, has_csc: bool) -> None:
    g, module, x = of_case(ORDINARY), layer(), torch.randn(30, 4)
    if has_csc:
        g.in_degrees()
    with fastgraph.enabled(strict=True):
        for _ in range(uses):
            module(g, x)
        _, index, _ = g.adj_tensors("csc")
        index[:10] = 0
        ours = module(g, x)
    by_csc = dgl.graph(("csc", g.adj_tensors("csc")), num_nodes=30)
    torch.testing.assert_close(ours, module(by_csc, x))


@pytest.mark.parametrize("weighted", [False, True])
def test_a_graph_that_is_forgotten_between_the_passes(weighted: bool) -> None:
    g, x = of_case(ORDINARY), torch.randn(30, 4, requires_grad=True)
    w = torch.rand(150, 1, requires_grad=True)
    inputs = (x, w) if weighted else (x,)
    function = dgl.ops.u_mul_e_sum if weighted else dgl.ops.copy_u_sum
    expected = torch.autograd.grad(function(g, *inputs).square().sum(), inputs)
    with fastgraph.enabled(strict=True):
        loss = function(g, *inputs).square().sum()
        fastgraph.clear_cache()
        gc.collect()
        torch.testing.assert_close(torch.autograd.grad(loss, inputs), expected)


def test_without_room_to_remember_it_still_computes() -> None:
    g, module, x = of_case(ORDINARY), layer(), torch.randn(30, 4)
    expected = module(g, x)
    with fastgraph.enabled(strict=True, cache_bytes=0):
        torch.testing.assert_close(step(module, g, x), expected)


def test_inference_first_and_training_after_it() -> None:
    g, module, x = of_case(ORDINARY), layer(), torch.randn(30, 4)
    with fastgraph.enabled(strict=True):
        with torch.inference_mode():
            module(g, x)
            dgl.ops.copy_u_max(g, x)
        step(module, g, x)
    assert module.fc.weight.grad is not None


def test_copies_of_a_graph_that_was_used() -> None:
    g, module, x = of_case(ORDINARY), layer(), torch.randn(30, 4)
    with fastgraph.enabled(strict=True):
        out = module(g, x)
        for other in (copy.deepcopy(g), pickle.loads(pickle.dumps(g)), g.int(), g.clone()):
            torch.testing.assert_close(module(other, x), out)
        pickle.loads(pickle.dumps(module))


def test_several_threads() -> None:
    graphs = [graph(random_edges(20, 20, 100, seed=seed), 20) for seed in range(8)]
    module, x = layer().requires_grad_(False), torch.randn(20, 4)
    expected = [module(g, x) for g in graphs]
    failed = []

    def work() -> None:
        for g, out in zip(graphs, expected, strict=True):
            if not torch.allclose(module(g, x), out, atol=1e-5):
                failed.append(g)

    with fastgraph.enabled(strict=True):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed


def of_every_kind() -> dict[str, Any]:
    """Graphs with one relation, whose nodes are of one kind or of two, and with several."""
    ends = tuple(random_edges(9, 9, 40))
    single = dgl.graph(ends, num_nodes=9)
    return {
        "one kind": single,
        "two graphs at once": dgl.batch([single, single]),
        "a block": dgl.to_block(single),
        "two kinds": dgl.heterograph({("a", "to", "b"): ends}),
        "two kinds, the other way round": dgl.heterograph({("b", "to", "a"): ends}),
        "a kind without edges": dgl.heterograph({("a", "to", "a"): ends}, {"a": 9, "b": 2}),
        "several": dgl.heterograph({("a", name, "b"): ends for name in "rs"}),
    }


@pytest.mark.parametrize("kind", of_every_kind())
def test_a_relation_of_a_graph_is_that_of_dgl(kind: str) -> None:
    g = of_every_kind()[kind]
    for number, nodes in enumerate(g.ntypes if not g.is_block else ()):
        g.nodes[nodes].data["x"] = torch.full((g.num_nodes(nodes), 1), float(number))
    etype = g.canonical_etypes[0]
    g.edges[etype].data["w"] = torch.ones(g.num_edges(etype), 1)
    expected = g[etype]
    with fastgraph.enabled(strict=True):
        found = g[etype]
        by_name = g[etype[1]]
    for one in (found, by_name):
        assert type(one) is type(expected)
        assert one.canonical_etypes == expected.canonical_etypes
        assert (one.srctypes, one.dsttypes) == (expected.srctypes, expected.dsttypes)
        assert (one.is_block, one.idtype) == (expected.is_block, expected.idtype)
        assert one.batch_size == expected.batch_size == 1
        assert all(map(torch.equal, one.edges(), expected.edges()))
        assert dict(one.srcdata) == dict(expected.srcdata)
        assert dict(one.dstdata) == dict(expected.dstdata)
        one.edata["w"].add_(1)
        one.srcdata["new"] = torch.zeros(one.num_src_nodes(), 1)
        assert "new" in expected.srcdata and torch.equal(g.edges[etype].data["w"], one.edata["w"])
        del one.srcdata["new"]
    is_whole = len(g.canonical_etypes) == 1 and kind not in (
        "two kinds, the other way round",
        "a kind without edges",
    )
    assert (found._graph is g._graph) is is_whole


def broken(edit: str) -> Any:
    """A block to which DGL has added something, after which it cannot find its relation."""
    g = of_every_kind()["a block"]
    if edit == "edges":
        g.add_edges(torch.tensor([0]), torch.tensor([1]))
    else:
        g.add_nodes(1, ntype=g.srctypes[0])
    g.srcdata["x"] = torch.randn(g.num_src_nodes(), 2)
    return g


@pytest.mark.parametrize("edit", ["edges", "nodes"])
def test_a_block_that_was_added_to_is_dgls_error(edit: str) -> None:
    calls: list[Callable[[Any], Any]] = [
        lambda g: g["_E"],
        lambda g: g[g.canonical_etypes[0]],
        lambda g: g.update_all(dgl.function.copy_u("x", "m"), dgl.function.sum("m", "y")),
        lambda g: g.apply_edges(dgl.function.copy_u("x", "m")),
        lambda g: g.update_all(lambda edges: {"m": edges.src["x"]}, dgl.function.sum("m", "y")),
        lambda g: dglnn.GINConv(None, "sum")(g, (g.srcdata["x"], g.srcdata["x"])),
    ]
    for call in calls:
        with pytest.raises(Exception) as expected:  # whatever DGL raises
            call(broken(edit))
        with fastgraph.enabled(min_edges=0), pytest.raises(type(expected.value)) as found:
            call(broken(edit))
        assert str(found.value) == str(expected.value)


def test_keys_that_name_no_relation_are_dgls_errors() -> None:
    g = of_every_kind()["one kind"]
    with fastgraph.enabled(strict=True):
        for key in ("none", ("_N", "none", "_N"), ("_N", "_E")):
            with pytest.raises(dgl.DGLError):
                g[key]
        assert g["_N", :, "_N"].num_edges() == 40
        assert g[:, "_E", :].num_edges() == 40


def _by_number(edges: Any) -> dict[str, torch.Tensor]:
    return {"m": edges.src["x"] / len(edges)}


def _passed(g: Any, x: torch.Tensor, message: Any, reduce: Any) -> torch.Tensor:
    with g.local_scope():
        g.ndata["x"] = x
        g.update_all(message, reduce)
        out: torch.Tensor = g.ndata["y"]
        return out


def _of_edges(g: Any, x: torch.Tensor) -> torch.Tensor:
    with g.local_scope():
        g.ndata["x"] = x
        g.apply_edges(_by_number)
        out: torch.Tensor = g.edata["m"]
        return out


LEFT: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "a message of users": lambda g, x: _passed(g, x, _by_number, fn.sum("m", "y")),
    "a function of edges": _of_edges,
    "a softmax of few": lambda g, x: dgl.ops.edge_softmax(g, x.sum() * torch.ones(150, 1)),
    "one of sources": lambda g, x: dgl.ops.edge_softmax(g, torch.ones(150, 1), norm_by="src"),
    "weights of channels": lambda g, x: dgl.ops.u_mul_e_sum(g, x, torch.ones(150, 4)),
    "narrow products": lambda g, x: dgl.ops.u_dot_v(g, x, x),
}


@pytest.mark.parametrize("name", LEFT)
def test_nothing_is_read_of_a_new_graph_for_a_call_that_is_left_to_dgl(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, x = LEFT[name], torch.randn(30, 4)
    expected = call(of_case(ORDINARY), x)
    with fastgraph.enabled():
        call(of_case(ORDINARY), x)
        read: list[Any] = []
        monkeypatch.setattr(structure, "_read", read.append)
        found = call(of_case(ORDINARY), x)
    assert read == []
    torch.testing.assert_close(found, expected)
    assert any(row.fell_back == 2 for row in fastgraph.status().rows)
