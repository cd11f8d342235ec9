"""Graph construction and the memo."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.utils import add_self_loops, remove_self_loops

import fastgraph
from fastgraph import Graph, ops, settings
from fastgraph.backends.building import BY_TORCH
from fastgraph.backends.tasks import CHUNK, SMALL_CHUNK, chunk_of
from fastgraph.graphs import groups, memo
from fastgraph.graphs.edges import Edges, Grouped, graph_of, renumbered_graph
from fastgraph.graphs.graph import beside
from fastgraph.graphs.memo import MEMO
from fastgraph.registry.registry import REGISTRY
from tests.graphs import Case, all_cases, random_edges


@pytest.fixture(autouse=True)
def empty_memo() -> None:
    fastgraph.clear_cache()


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_structures(case: Case) -> None:
    graph = Graph(case.edge_index, case.num_src, case.num_dst)
    src, dst = case.edge_index.long()
    assert all(map(torch.equal, graph.edge_list(), (src, dst)))
    for rows, row, col in ((graph.by_destination, dst, src), (graph.by_source, src, dst)):
        identity = torch.arange(src.numel())
        edge = identity if rows.edge_id is None else rows.edge_id.long()
        assert torch.equal(edge.sort().values, identity)
        assert torch.equal(rows.col.long(), col[edge])
        assert torch.equal(torch.repeat_interleave(rows.ptr.diff()), row[edge])
    stable = dst.argsort(stable=True)
    edge = graph.by_destination.edge_id
    assert torch.equal(stable, torch.arange(src.numel()) if edge is None else edge.long())


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_self_loops_are_those_of_pyg(case: Case) -> None:
    num_nodes = min(case.num_src, case.num_dst)
    for number in {num_nodes, num_nodes // 2} - {0}:
        edges, _ = remove_self_loops(case.edge_index)
        edges, _ = add_self_loops(edges, num_nodes=number)
        ours = Graph(case.edge_index, case.num_src, case.num_dst, self_loops=number)
        expected = Graph(edges, case.num_src, case.num_dst)
        assert ours.num_edges == expected.num_edges == edges.shape[1]
        assert all(map(torch.equal, ours.edge_list(), edges.long()))
        for transpose in (False, True):
            rows, theirs = (g.grouped(transpose=transpose) for g in (ours, expected))
            assert torch.equal(rows.ptr, theirs.ptr) and torch.equal(rows.col, theirs.col)


def test_self_loops_outside_the_nodes_are_dropped_and_other_edges_refused() -> None:
    edges = torch.tensor([[7, 0], [7, 1]])
    assert Graph(edges, 3, 3, self_loops=3).num_edges == 4
    with pytest.raises(IndexError, match="index 7 in row 0, expected 0 <= index < 3"):
        Graph(torch.tensor([[8, 7], [8, 1]]), 3, 3, self_loops=3)


@pytest.mark.parametrize(
    ("number", "error", "text"),
    [
        (-1, ValueError, "self_loops must be an integer >= 0, got -1"),
        (1.5, TypeError, "self_loops must be an integer >= 0, got 1.5"),
        (4, ValueError, "at most the number of nodes, and 0 with ptr, got 4 for 3 sources and 5"),
    ],
)
def test_bad_numbers_of_self_loops(number: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Graph(torch.tensor([[0], [1]]), 3, 5, self_loops=number)


def test_a_compressed_matrix_gets_no_self_loops() -> None:
    with pytest.raises(ValueError, match="0 with ptr, got 2"):
        Graph(torch.tensor([0]), 2, 2, torch.tensor([0, 1, 1]), self_loops=2)


@pytest.mark.parametrize("self_loops", [0, 4])
def test_a_renumbered_graph_is_remembered_and_has_its_edges_by_destination(self_loops: int) -> None:
    index = torch.tensor([[1, 0, 3, 2, 0], [2, 1, 0, 1, 1]])
    graph = renumbered_graph(index, 4, 4, self_loops)
    assert renumbered_graph(index, 4, 4, self_loops) is graph
    rows, expected = graph.by_destination, Graph(index, 4, 4, self_loops=self_loops).by_destination
    assert rows.edge_id is None
    assert expected.edge_id is not None
    assert rows.ptr.equal(expected.ptr)
    assert rows.col.equal(expected.col)
    assert graph_of(rows.col, rows.ptr, 4, 4) is graph


def test_sorted_input_needs_no_edge_map() -> None:
    edges = random_edges(9, 9, 30)
    edges = edges[:, edges[1].argsort(stable=True)]
    assert Graph(edges, 9, 9).by_destination.edge_id is None


def test_sources_and_destinations_one_by_one() -> None:
    index = random_edges(9, 5, 30)
    graph, expected = Graph((index[0], index[1]), 9, 5), Graph(index, 9, 5)
    assert all(map(torch.equal, graph.edge_list(), expected.edge_list()))
    for pair in ((index[0], index[1] + 5), (index[0].clone(), index[1] + 5)):
        with pytest.raises(IndexError, match="in row 1, expected 0 <= index < 5"):
            Graph(pair, 9, 5)
    with pytest.raises(ValueError, match="must be sources and destinations, got 1 entries"):
        Graph((index[0],), 9, 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"as many, .* got 30 of torch\.int64 on cpu and 29 of"):
        Graph((index[0], index[1, 1:]), 9, 5)
    with pytest.raises(TypeError, match=r"destinations must be a torch\.Tensor, got list"):
        Graph((index[0], [0]), 9, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_inverse_degrees_are_those_of_torch(dtype: torch.dtype) -> None:
    graph = Graph(random_edges(50, 40_000, 60_000), 50, 40_000)
    expected = BY_TORCH.inverse_degree(graph.by_destination.ptr, dtype)
    assert torch.equal(graph.inverse_degree(transpose=False, dtype=dtype), expected)


def test_degrees_and_repr() -> None:
    graph = Graph(torch.tensor([[0, 1, 2], [0, 0, 2]]), 3, 4)
    inverse = graph.inverse_degree(transpose=False, dtype=torch.float32)
    assert inverse.tolist() == [0.5, 1.0, 1.0, 1.0]
    assert graph.inverse_degree(transpose=False, dtype=torch.float32) is inverse
    held = sum(rows.nbytes for rows in (graph.by_destination, graph.by_source))
    assert graph.nbytes == held
    assert repr(graph) == "Graph(num_src=3, num_dst=4, num_edges=3)"


def test_what_a_renumbered_graph_shares_counts_once() -> None:
    edges = random_edges(50, 40, 600)
    graph = Graph(edges, 50, 40)
    alone = graph.nbytes
    renumbered = beside(graph, "renumbered", graph.renumbered)
    rows = renumbered.by_destination
    shared = [t for t in (rows.ptr, rows.col) if any(t is own for own in graph.by_destination)]
    assert len(shared) == 2 and graph.by_destination.edge_id is not None
    assert graph.nbytes == alone + renumbered.nbytes - sum(t.nbytes for t in shared)
    tensors = [*graph.by_destination, *graph.by_source, *rows, *renumbered.by_source]
    held = {id(t): t.nbytes for t in tensors if isinstance(t, Tensor)}
    assert graph.nbytes == sum(held.values())


def lookup(index: Tensor) -> Graph:
    return graph_of(index, None, 9, 9)


def test_a_graph_is_found_again_through_any_alias() -> None:
    edges = random_edges(9, 9, 30)
    graph = lookup(edges)
    assert lookup(edges) is graph
    assert lookup(edges.detach()) is graph
    assert lookup(edges[:]) is graph
    assert lookup(edges.clone()) is not graph
    assert lookup(edges[:, :20]) is not graph
    assert graph_of(edges, None, 9, 10) is not graph


def test_an_edit_is_seen() -> None:
    edges = random_edges(9, 9, 30)
    graph = lookup(edges)
    edges[0, 0] = (edges[0, 0] + 1) % 9
    assert lookup(edges) is not graph
    x = torch.randn(9, 2)
    before = ops.spmm(x, edges)
    edges.copy_(edges.flip(0))
    after = ops.spmm(x, edges)
    torch.testing.assert_close(after, torch.zeros(9, 2).index_add(0, edges[1], x[edges[0]]))
    assert not torch.equal(before, after)


def test_an_edit_behind_torch_is_seen() -> None:
    edges = torch.tensor([[0, 1], [1, 0]])
    graph = lookup(edges)
    assert lookup(edges) is graph
    version = edges._version
    edges.numpy()[0, 0] = 1
    assert edges._version == version
    assert ops.spmm(torch.ones(2, 1), edges).tolist() == [[1.0], [1.0]]
    assert lookup(edges) is not graph


def test_the_check_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    unchecked = settings.current().replace(check_cache=False)
    monkeypatch.setattr(settings, "_current", unchecked)
    edges = torch.tensor([[0, 1], [1, 0]])
    graph = lookup(edges)
    edges.numpy()[0, 0] = 1
    assert lookup(edges) is graph


def test_a_freed_tensor_frees_its_graph_and_its_address_is_not_mistaken() -> None:
    x = torch.randn(9, 2)
    for seed in range(50):
        edges = random_edges(9, 9, 30, seed=seed)
        expected = torch.zeros(9, 2).index_add(0, edges[1], x[edges[0]])
        torch.testing.assert_close(ops.spmm(x, edges), expected)
        del edges
    assert len(MEMO) <= 2


def test_the_memo_is_bounded_by_bytes() -> None:
    kept = [random_edges(9, 9, 1000, seed=seed) for seed in range(20)]
    first = lookup(kept[0])
    with fastgraph.enabled(cache_bytes=5 * first.nbytes):
        for edges in kept:
            lookup(edges)
        assert MEMO.nbytes <= 5 * first.nbytes
        newest = lookup(kept[-1])
        assert lookup(kept[-1]) is newest
        assert lookup(kept[0]) is not first
    with fastgraph.enabled(cache_bytes=0):
        out = ops.spmm(torch.ones(9, 1), kept[0])
        assert out.sum() == 1000 and len(MEMO) == 0


class OnGpu(Tensor):
    def get_device(self) -> int:
        return 0


def test_each_device_has_a_bound_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo, "quarter_of_memory", {-1: 250, 0: 150}.get)
    known = memo.Memo()
    tensors = [torch.zeros(1) for _ in range(5)]
    for number, tensor in enumerate(tensors):
        on_device = tensor.as_subclass(OnGpu) if number % 2 else tensor
        known.put((number,), SimpleNamespace(nbytes=100), on_device)
    found = [known.get((number,), tensor) for number, tensor in enumerate(tensors)]
    assert [value is not None for value in found] == [False, False] + 3 * [True]
    assert known.nbytes == 300
    with fastgraph.enabled(cache_bytes=100):
        known.trim()
    assert known.nbytes == 200


def test_freed_graphs_go_while_many_others_live() -> None:
    kept = [random_edges(9, 9, 30, seed=seed) for seed in range(40)]
    graphs = [lookup(edges) for edges in kept]
    for seed in range(200):
        lookup(random_edges(9, 9, 30, seed=seed))
    assert len(MEMO) <= 2 * len(kept)
    assert all(lookup(edges) is graph for edges, graph in zip(kept, graphs, strict=True))
    MEMO.trim()
    assert len(MEMO) == len(kept)
    assert MEMO.nbytes == sum(graph.nbytes for graph in graphs)


def test_inference_tensors_are_not_remembered() -> None:
    with torch.inference_mode():
        edges = torch.tensor([[0, 1], [1, 0]])
        assert ops.spmm(torch.tensor([[1.0], [2.0]]), edges).tolist() == [[2.0], [1.0]]
        edges[0, 0] = 1
        assert ops.spmm(torch.tensor([[1.0], [2.0]]), edges).tolist() == [[2.0], [2.0]]
    assert len(MEMO) == 0


def test_a_graph_first_met_in_inference_mode_serves_training() -> None:
    edges = random_edges(9, 9, 30)
    x = torch.randn(9, 2, dtype=torch.float64, requires_grad=True)
    with torch.inference_mode():
        ops.spmm(x, edges, reduce="mean")
        ops.segment_reduce(x, edges)
    known = len(MEMO)
    assert torch.autograd.gradgradcheck(lambda x: ops.segment_reduce(x, edges), x)
    assert torch.autograd.gradcheck(lambda x: ops.spmm(x, edges, reduce="mean"), x)
    assert len(MEMO) == known


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((torch.rand(2, 3), 3, 3), ValueError, "edge_index must be int64 or int32"),
        ((torch.zeros(3, 3).long(), 3, 3), ValueError, r"must be \[2, num_edges\], got shape"),
        ((torch.tensor([[3], [0]]), 3, 3), IndexError, "index 3 in row 0, expected 0 <= index < 3"),
        ((torch.tensor([[0], [-2]]), 3, 3), IndexError, "index -2 in row 1"),
        ((torch.tensor([[0], [0]]), 2**31, 3), ValueError, "at most 2147483647 nodes and edges"),
        ((torch.tensor([[0], [0]]), -1, 3), ValueError, "num_src must be an integer >= 0, got -1"),
        ((torch.tensor([[0], [0]]), 3, -1), ValueError, "num_dst must be an integer >= 0, got -1"),
        (
            (torch.tensor([[0], [0]]), 3.0, 3),
            TypeError,
            r"num_src must be an integer >= 0, got 3\.0",
        ),
        (([[0], [1]], 3, 3), TypeError, "edge_index must be a torch.Tensor, got list"),
        (
            (torch.tensor([0, 3]), 3, 2, torch.tensor([0, 1, 2])),
            IndexError,
            "index holds 3 at position 1, expected 0 <= index < 3",
        ),
        ((torch.tensor([0]), 3, 1, [0, 1]), TypeError, "ptr must be a torch.Tensor, got list"),
    ],
)
def test_bad_input(arguments: tuple[object, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Graph(*arguments)


@contextmanager
def plain_torch() -> Iterator[None]:
    """Graphs are built by the last resort."""
    REGISTRY.select("reference")
    try:
        yield
    finally:
        REGISTRY.select(None)


@pytest.mark.parametrize("is_native", [True, False])
def test_edges_without_their_numbers_are_where_they_are_with_them(is_native: bool) -> None:
    with nullcontext() if is_native else plain_torch():
        for case in all_cases():
            given = case.edge_index, case.num_src, case.num_dst
            for self_loops in {0, min(case.num_src, case.num_dst)}:
                graph = Graph(*given, self_loops=self_loops)
                plain = Graph(*given, self_loops=self_loops, numbered=False)
                assert plain.by_destination.edge_id is None
                for transpose in (False, True):
                    expected = graph.grouped(transpose=transpose)
                    for rows in (
                        plain.grouped(transpose=transpose),
                        plain.ends(transpose=transpose),
                    ):
                        assert torch.equal(rows.ptr, expected.ptr)
                        assert torch.equal(rows.col, expected.col)


def test_the_ends_of_edges_come_without_numbers_until_somebody_needs_these() -> None:
    graph = Graph(random_edges(50, 40, 600), 50, 40)
    assert graph.ends(transpose=False) is graph.by_destination
    ends = graph.ends(transpose=True)
    assert ends.edge_id is None and graph.ends(transpose=True) is ends
    assert graph.renumbered().ends(transpose=True) is ends
    assert graph.by_source.edge_id is not None
    assert graph.ends(transpose=True) is graph.by_source


@pytest.mark.parametrize("transpose", [False, True])
def test_rows_up_to_the_last_one_with_edges(transpose: bool) -> None:
    """Counted in the groups that sums along these edges use, of each graph made of another."""
    for case in all_cases():
        graph = Graph(case.edge_index, case.num_src, case.num_dst)
        graph.ends(transpose=transpose)
        graph.count_rows(transpose=transpose)
        assert graph._by_source is None
        sources = torch.full((case.num_edges,), 2, dtype=torch.int32)
        for made in (
            graph,
            graph.renumbered(),
            graph.backwards(),
            graph.from_each_edge(case.edge_index[1].int()),
            graph.from_sources(sources, 7),
        ):
            nodes = made.edge_list()[0 if transpose else 1]
            expected = 0 if nodes.numel() == 0 else int(nodes.max()) + 1
            assert made.count_rows(transpose=transpose) == expected


@pytest.mark.parametrize("is_native", [True, False])
def test_the_edges_of_each_node_from_the_last_to_the_first(is_native: bool) -> None:
    with nullcontext() if is_native else plain_torch():
        for case in all_cases():
            graph = Graph(case.edge_index, case.num_src, case.num_dst)
            graph.ends(transpose=True)
            rows, backwards = graph.by_destination, graph.backwards()
            reversed_rows = backwards.by_destination
            lengths = rows.ptr.diff().tolist()
            for one, other in zip(
                rows.col.split(lengths), reversed_rows.col.split(lengths), strict=True
            ):
                assert torch.equal(one.flip(0), other)
            assert torch.equal(reversed_rows.ptr, rows.ptr) and reversed_rows.edge_id is None
            entries = torch.arange(graph.num_edges)
            of_entry = torch.repeat_interleave(rows.ptr.diff())
            by_source = backwards.by_source
            edge = entries if by_source.edge_id is None else by_source.edge_id.long()
            assert torch.equal(by_source.col.long(), of_entry[edge])
            assert torch.equal(backwards.edge_list()[0], reversed_rows.col.long())


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("is_sorted", [True, False])
def test_an_edit_of_the_given_tensors_leaves_a_graph_alone(
    is_native: bool, is_sorted: bool
) -> None:
    edges = random_edges(9, 9, 40).int()
    if is_sorted:
        edges = edges[:, edges[1].argsort(stable=True)]
    with nullcontext() if is_native else plain_torch():
        for make in (
            lambda given: Graph(given, 9, 9),
            lambda given: Graph(given, 9, 9, numbered=False),
            lambda given: Graph(tuple(given), 9, 9, self_loops=3),
            lambda given: groups.grouped(given[1], 9).graph,
        ):
            given = edges.clone()
            expected, graph = make(edges.clone()), make(given)
            given.fill_(8)
            for transpose in (False, True):
                ours, theirs = (g.grouped(transpose=transpose) for g in (graph, expected))
                assert torch.equal(ours.col, theirs.col) and torch.equal(ours.ptr, theirs.ptr)


def test_without_a_native_builder() -> None:
    """The same structures come out of plain torch, as on a GPU."""
    for case in all_cases():
        native = Graph(case.edge_index, case.num_src, case.num_dst)
        with plain_torch():
            plain = Graph(case.edge_index, case.num_src, case.num_dst)
            assert all(map(torch.equal, native.edge_list(), plain.edge_list()))
            for name in ("by_destination", "by_source"):
                ours, theirs = getattr(native, name), getattr(plain, name)
                for a, b in zip(ours[:3], theirs[:3], strict=True):
                    assert (a is None and b is None) or torch.equal(a, b)
                pieces = [-(-n // SMALL_CHUNK) for n in ours.ptr.diff().tolist()]
                assert theirs.num_cut == sum(n > 1 for n in pieces)
                assert theirs.num_pieces == sum(n for n in pieces if n > 1)
    assert chunk_of(2**18, 2**18 - 1) == SMALL_CHUNK < chunk_of(2**18, 2**18) == CHUNK
    with plain_torch():
        with pytest.raises(IndexError, match="index 7 in row 1, expected 0 <= index < 3"):
            Graph(torch.tensor([[0], [7]]), 3, 3)
        with pytest.raises(IndexError, match="index -1 in row 0, expected 0 <= index < 3"):
            Graph(torch.tensor([[-1], [1]]), 3, 3)
        with pytest.raises(ValueError, match="ptr must rise from 0"):
            Graph(torch.tensor([0, 1]), 3, 2, torch.tensor([0, 2, 1]))
        with pytest.raises(IndexError, match="index holds 3 at position 1, expected 0 <= index"):
            Graph(torch.tensor([0, 3]), 3, 2, torch.tensor([0, 1, 2]))


@pytest.mark.parametrize("dtypes", itertools.product((torch.int32, torch.int64), repeat=2), ids=str)
def test_indices_and_their_offsets_of_any_two_dtypes(dtypes: tuple[torch.dtype, ...]) -> None:
    index, ptr = torch.tensor([2, 0, 1]), torch.tensor([0, 2, 2, 3])
    rows = Graph(index.to(dtypes[0]), 3, 3, ptr.to(dtypes[1])).by_destination
    assert rows.col.tolist() == index.tolist()
    assert rows.ptr.tolist() == ptr.tolist()


def test_edges_with_numbers_of_their_own() -> None:
    """As DGL's CSC, which says which edge each entry is."""
    edges = random_edges(9, 9, 40)
    graph = Graph(edges, 9, 9)
    rows = graph.by_destination
    for dtype in (torch.int32, torch.int64):
        same = Graph(rows.col.to(dtype), 9, 9, rows.ptr, edge_ids=rows.edge_id.to(dtype))
        assert all(map(torch.equal, same.edge_list(), graph.edge_list()))
        assert torch.equal(same.by_source.edge_id, graph.by_source.edge_id)
        assert torch.equal(torch.stack(same.edge_list()), edges)


@pytest.mark.parametrize(
    ("edge_ids", "error", "text"),
    [
        ([0, 1], ValueError, "edge_ids must have 3 elements on cpu, got 2 on cpu"),
        ([0, 1, 1], ValueError, "edge_ids must hold each number once, got one of them twice"),
        ([0, 1, 3], IndexError, "edge_ids holds 3, expected 0 <= edge id < 3"),
        ([0, -1, 2], IndexError, "edge_ids holds -1, expected 0 <= edge id < 3"),
        ([0.0, 1.0, 2.0], ValueError, "edge_ids must be int64 or int32, got torch.float32"),
    ],
)
def test_wrong_numbers_of_edges(edge_ids: list[Any], error: type[Exception], text: str) -> None:
    index, ptr = torch.tensor([0, 1, 0]), torch.tensor([0, 1, 3])
    with pytest.raises(error, match=text):
        Graph(index, 2, 2, ptr, edge_ids=torch.tensor(edge_ids))
    with pytest.raises(ValueError, match="edge_ids must be given together with ptr"):
        Graph(torch.tensor([[0], [1]]), 2, 2, edge_ids=torch.tensor([0]))


def grouped(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Sources and numbers of the edges by destination, and where those of each begin."""
    src, dst = case.edge_index
    order = dst.argsort(stable=True).to(src.dtype)
    ptr = torch.zeros(case.num_dst + 1, dtype=src.dtype)
    ptr[1:] = torch.bincount(dst.long(), minlength=case.num_dst).cumsum(0)
    return src[order.long()], order, ptr


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_groups_with_numbers_of_edges_name_the_same_graph(case: Case, backend: str) -> None:
    sources, numbers, ptr = grouped(case)
    index = torch.stack([sources, numbers])
    assert torch.equal(Edges(index, ptr).as_index(), case.edge_index)
    reversed_index = Edges(index, ptr, transpose=True).as_index()
    assert torch.equal(reversed_index, case.edge_index.flip(0))
    x = torch.randn(case.num_src, 3, dtype=torch.float64, requires_grad=True)
    w = torch.rand(case.num_edges, dtype=torch.float64, requires_grad=True)
    results = []
    for given, offsets in ((case.edge_index, None), (index, ptr)):
        out = ops.spmm(x, given, w, ptr=offsets, num_out=case.num_dst)
        results.append((out, *torch.autograd.grad(out.square().sum(), (x, w))))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_a_grouped_graph_is_named_by_itself_and_says_all_of_it(case: Case) -> None:
    sources, numbers, ptr = grouped(case)
    for edge_ids in (None, numbers):
        found = Grouped.of(sources, ptr, edge_ids, case.num_src, case.num_dst)
        sizes = (case.num_src, case.num_dst)
        edges, expected = found.edges, found.graph.edge_list()
        assert graph_of(edges.index, edges.ptr, *sizes) is found.graph
        assert found.nbytes == found.graph.nbytes
        assert len(MEMO) == 0
        del found
        gc.collect()
        again = graph_of(edges.index, edges.ptr, *sizes)
        assert all(map(torch.equal, again.edge_list(), expected))
        fastgraph.clear_cache()
    assert all(map(torch.equal, expected, case.edge_index.long()))


def test_groups_of_another_shape_are_refused() -> None:
    index, ptr = torch.zeros(3, 4, dtype=torch.int64), torch.tensor([0, 4])
    with pytest.raises(ValueError, match=r"index must be one-dimensional, got shape \[3, 4\]"):
        graph_of(index, ptr, 1, 1)
    with pytest.raises(ValueError, match="edge_ids must hold each number once"):
        graph_of(torch.zeros(2, 4, dtype=torch.int64), ptr, 1, 1)
