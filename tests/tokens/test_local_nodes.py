"""Local nodes beside sets of nodes that are found by Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fastgraph.tokens import NeighborLists, TokenGraph, local_nodes, open_graph, write_graph
from fastgraph.tokens.graph_files import graph_of_edges
from fastgraph.tokens.local_nodes import LocalNodesSampler, checked_manner

NODES = 60


def edges() -> Tensor:
    """Hubs, chains, self-loops, duplicates, and nodes 50 to 59 without edges."""
    generator = torch.Generator().manual_seed(0)
    some = torch.randint(0, 30, (2, 90), generator=generator)
    hub = torch.stack([torch.arange(50), torch.full((50,), 7)])
    chain = torch.stack([torch.arange(40, 49), torch.arange(41, 50)])
    loops = torch.tensor([[3, 3, 45], [3, 3, 45]])
    return torch.cat([some, some[:, :20], hub, chain, loops, torch.tensor([[33], [34]])], 1)


def one_hop(edge_index: Tensor, direction: str) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(NODES)]
    for source, target in edge_index.t().tolist():
        if direction in ("in", "both"):
            found[target].append(source)
        if direction in ("out", "both"):
            found[source].append(target)
    return found


def two_hops(near: list[list[int]]) -> list[set[int]]:
    return [{far for through in own for far in near[through]} for own in near]


@pytest.mark.parametrize("direction", ["in", "out", "both"])
@pytest.mark.parametrize("k", [1, 2, 5, 17, 40, 100])
def test_rows_hold_what_is_one_or_two_hops_away(k: int, direction: str) -> None:
    near = one_hop(edges(), direction)
    far = two_hops(near)
    rows = local_nodes(edges(), k, num_nodes=NODES, direction=direction, seed=k)
    assert rows.dtype == torch.int32
    assert rows.shape == (NODES, k)
    kinds = set()
    for node, row in enumerate(rows.tolist()):
        possible = ({*near[node]} | far[node]) - {node}
        assert row[0] == node
        drawn = row[1:]
        if len(possible) >= k - 1:
            assert len({*drawn}) == k - 1
            assert {*drawn} <= possible
            kinds.add("enough")
        elif possible:
            assert {*drawn} <= possible
            kinds.add("few")
        else:
            assert {*drawn} <= {*range(NODES)}
            assert len({*drawn}) == k - 1 or k > NODES
            kinds.add("none")
    assert kinds == {"enough", "few", "none"} or (k, direction) not in ((5, "in"), (17, "out"))


@pytest.mark.parametrize("direction", ["in", "out"])
@pytest.mark.parametrize("k", [2, 12, 60, 130])
def test_the_release_samples_from_both_lists(k: int, direction: str) -> None:
    # Its matrix is one of scipy, which holds an edge once.
    edge_index = edges().unique(dim=1)
    near = [sorted(own) for own in one_hop(edge_index, direction)]
    far = [sorted(own) for own in two_hops(near)]
    rows = local_nodes(edges(), k, num_nodes=NODES, direction=direction, variant="release")
    seen_twice = False
    for node, (own, *drawn) in enumerate(rows.tolist()):
        assert own == node
        both = near[node] + far[node]
        if not both:
            assert len({*drawn}) == k - 1 or k > NODES
        elif len(both) < k - 1:
            assert drawn == (both * k)[: k - 1]
        else:
            for other in {*drawn}:
                assert drawn.count(other) <= both.count(other)
                seen_twice |= drawn.count(other) == 2
    assert seen_twice or (k, direction) != (60, "in")


@pytest.mark.parametrize("variant", ["paper", "release"])
@pytest.mark.parametrize("hub_cap", [None, 3])
def test_rows_depend_on_their_node_alone(variant: str, hub_cap: int | None) -> None:
    options = {"num_nodes": NODES, "variant": variant, "hub_cap": hub_cap, "seed": -5}
    rows = local_nodes(edges(), 9, **options)
    before = torch.get_num_threads()
    for count in (1, 2, 8):
        torch.set_num_threads(count)
        try:  # as many that several threads share them
            again = local_nodes(edges(), 9, nodes=torch.arange(NODES).repeat(40), **options)
        finally:
            torch.set_num_threads(before)
        assert torch.equal(again, rows.repeat(40, 1))
    some = torch.tensor([59, 7, 7, 0, 33], dtype=torch.int32)
    assert torch.equal(local_nodes(edges(), 9, nodes=some, **options), rows[some.long()])
    order = torch.randperm(edges().shape[1])
    assert torch.equal(local_nodes(edges()[:, order], 9, **options), rows)
    assert not torch.equal(local_nodes(edges(), 9, **{**options, "seed": 1}), rows)


def test_a_smaller_sample_is_the_beginning_of_a_larger_one() -> None:
    larger = local_nodes(edges(), 20, num_nodes=NODES, direction="both")
    smaller = local_nodes(edges(), 6, num_nodes=NODES, direction="both")
    possible = two_hops(one_hop(edges(), "both"))
    enough = torch.tensor([len(own) > 20 for own in possible])
    assert int(enough.sum()) > 10
    assert torch.equal(larger[enough][:, :6], smaller[enough])


@pytest.mark.parametrize("ptr_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_forms_of_a_graph_give_the_same_bytes(tmp_path, ptr_dtype, index_dtype) -> None:
    graph = graph_of_edges(edges(), NODES)
    rows = {d: local_nodes(edges(), 9, num_nodes=NODES, direction=d) for d in ("in", "out", "both")}
    arrays = [
        NeighborLists(
            torch.from_numpy(own.ptr.numpy().astype(ptr_dtype)),
            torch.from_numpy(own.neighbors.numpy().astype(index_dtype)),
        )
        for own in (graph.into, graph.out)
    ]
    write_graph(tmp_path / "graph", TokenGraph(*arrays))
    mapped = open_graph(tmp_path / "graph")
    for direction, expected in rows.items():
        for hub_cap in (None, 10**6):  # no list is longer
            found = local_nodes(mapped, 9, direction=direction, hub_cap=hub_cap)
            assert torch.equal(found, expected)
    pair = tuple(values.numpy() for values in arrays[0])
    assert torch.equal(local_nodes(pair, 9), rows["in"])
    raw = tmp_path / "raw"
    pair[1].tofile(raw)
    raw_map = np.memmap(raw, index_dtype, "r")
    assert torch.equal(local_nodes((pair[0], raw_map), 9), rows["in"])


@pytest.mark.parametrize("variant", ["paper", "release"])
@pytest.mark.parametrize("hub_cap", [None, 3])
def test_pages_that_are_asked_for_change_nothing(tmp_path, variant, hub_cap) -> None:
    graph = graph_of_edges(edges(), NODES)
    write_graph(tmp_path / "graph", graph)
    for direction in ("in", "both"):
        manner = checked_manner(9, 3, direction, hub_cap, variant)
        lists = open_graph(tmp_path / "graph").lists(direction)
        assert not LocalNodesSampler(lists, manner).is_elsewhere  # as it fits into memory
        nodes = torch.arange(NODES).repeat(5)
        for one in (lists, graph.lists(direction)):
            there, counts = LocalNodesSampler(one, manner, is_elsewhere=True).sample(nodes)
            expected, others = LocalNodesSampler(one, manner, is_elsewhere=False).sample(nodes)
            assert torch.equal(there, expected)
            assert counts == others
    broken = [NeighborLists(LISTS[0], torch.tensor([1, 9]))]
    with pytest.raises(IndexError, match="row holds node 9 at position 1"):
        LocalNodesSampler(broken, manner._replace(direction="in", hub_cap=None),
                          is_elsewhere=True).sample(torch.arange(3))  # fmt: skip


def test_hubs_are_thinned_once() -> None:
    # From 1,000 nodes to a hub, and from it to others, which have no other neighbours.
    leaves = torch.arange(1, 1001)
    others = torch.arange(1001, 1031)
    edge_index = torch.cat(
        [
            torch.stack([leaves, torch.zeros_like(leaves)]),
            torch.stack([torch.zeros_like(others), others]),
        ],
        1,
    )
    rows = local_nodes(edge_index, 1100, nodes=torch.cat([torch.tensor([0]), others]), hub_cap=64)
    kept = {*rows[0, 1:].tolist()}
    assert len(kept) == 64
    for row in rows[1:]:
        assert {*row[1:].tolist()} == {0} | kept
    others_kept = {*local_nodes(edge_index, 1100, hub_cap=64, seed=1)[0, 1:].tolist()}
    assert len(others_kept) == 64
    assert others_kept != kept


def test_a_hub_with_duplicates_has_fewer() -> None:
    edge_index = torch.tensor([[1, 2, 3] * 50, [0] * 150])
    assert {*local_nodes(edge_index, 90, hub_cap=64)[0, 1:].tolist()} == {1, 2, 3}
    assert len({*local_nodes(edge_index, 90, hub_cap=2)[0, 1:].tolist()}) == 2


@pytest.mark.parametrize("k", [1, 3])
def test_of_nothing_there_is_nothing(k: int) -> None:
    none = torch.empty(2, 0, dtype=torch.int64)
    assert local_nodes(none, k).shape == (0, k)
    assert local_nodes(none, k, num_nodes=2, nodes=torch.empty(0, dtype=torch.int64)).shape == (
        0,
        k,
    )
    assert {*local_nodes(none, k, num_nodes=1).flatten().tolist()} == {0}
    assert local_nodes(none, k, num_nodes=1, direction="both", hub_cap=1).tolist() == [[0] * k]


def test_many_neighbours_of_many_paths() -> None:
    # Far more candidates than are kept at once, each on many paths.
    size = 3000
    generator = torch.Generator().manual_seed(1)
    edge_index = torch.randint(0, size, (2, 240_000), generator=generator)
    rows = local_nodes(edge_index, 1500, nodes=torch.arange(4))
    adjacency = torch.zeros(size, size, dtype=torch.bool)
    adjacency[edge_index[1], edge_index[0]] = True
    for node, row in enumerate(rows.long()):
        near = adjacency[node]
        possible = near | adjacency[near].any(0)
        possible[node] = False
        assert len(row.unique()) == 1500
        assert bool(possible[row[1:]].all())


def test_a_bound_that_is_a_power_of_two() -> None:
    """With this seed node 0 gives node 387 the priority 2^31, which begins a bucket of its own."""
    seed, middle, size = 1648016, 387, 2000
    others = torch.arange(1, size)

    def row(sources: Tensor, k: int) -> Tensor:
        graph = torch.stack([sources, torch.zeros_like(sources)])
        return local_nodes(graph, k, seed=seed, nodes=torch.tensor([0]), num_nodes=size)[0]

    order = row(others, size)[1:]
    place = int((order == middle).nonzero())
    assert 600 < place < 1400  # as its priority is in the middle
    order = order.long()
    for k in (2, 3, 30):  # first those from the bound on, and then those below it
        begin = place - k + 2
        sources = torch.cat([order[begin:], order[:begin]])
        assert torch.equal(row(sources, k)[1:], order[: k - 1].int())


LISTS = (torch.tensor([0, 1, 2, 2]), torch.tensor([1, 0]))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"k": 0}, ValueError, "k must be in"),
        ({"k": 2.0}, TypeError, "k must be an int"),
        ({"k": True}, TypeError, "k must be an int"),
        ({"seed": None}, TypeError, "^seed must be an int, got None"),
        ({"seed": True}, TypeError, "^seed must be an int, got True"),
        ({"seed": 2**63}, ValueError, "^seed must be in"),
        ({"seed": -(2**63) - 1}, ValueError, "^seed must be in"),
        ({"hub_cap": 0}, ValueError, "hub_cap must be in"),
        ({"direction": "up"}, ValueError, "direction must be one of"),
        ({"direction": "out"}, ValueError, "needs an edge_index"),
        ({"variant": "other"}, ValueError, "variant must be one of"),
        ({"num_nodes": 3}, ValueError, "num_nodes is for an edge_index"),
        ({"nodes": torch.tensor([3])}, IndexError, "nodes holds node 3"),
        ({"nodes": torch.tensor([-1])}, IndexError, "nodes holds node -1"),
        ({"nodes": torch.tensor([0.0])}, TypeError, "nodes must be int64"),
        ({"nodes": torch.zeros(1, 1, dtype=torch.int64)}, ValueError, "nodes"),
        ({"nodes": [0]}, TypeError, "nodes must be a tensor"),
        ({"nodes": torch.ones(2, dtype=torch.bool)}, ValueError, "mask of 3 nodes, got 2"),
        ({"graph": (LISTS[0], torch.tensor([1.0, 0.0]))}, TypeError, "neighbors must be int32"),
        ({"graph": (LISTS[0], None)}, TypeError, "neighbors must be a tensor, got None"),
        ({"graph": (LISTS[0].double(), LISTS[1])}, TypeError, "ptr must be int32"),
        ({"graph": (torch.tensor([0, 2, 1, 2]), LISTS[1])}, ValueError, "colptr must ascend"),
        ({"graph": (torch.tensor([0, 1, 1]), LISTS[1])}, ValueError, "colptr must run from 0 to 2"),
        ({"graph": (torch.tensor([1, 1, 2]), LISTS[1])}, ValueError, "colptr must run from 0 to 2"),
        (
            {"graph": (LISTS[0], LISTS[1][:1]), "nodes": torch.empty(0, dtype=torch.int64)},
            ValueError,
            "colptr must run from 0 to 1",
        ),
        ({"graph": (LISTS[0][:0], LISTS[1])}, ValueError, "ptr must hold at least one value"),
        ({"graph": (LISTS[0], torch.tensor([1, 3]))}, IndexError, "row holds node 3 at position 1"),
        ({"graph": (LISTS[0], torch.tensor([1, -1]))}, IndexError, "row holds node -1"),
        ({"graph": (LISTS[0], torch.tensor([2**32, 1]))}, IndexError, f"row holds node {2**32}"),
        ({"graph": LISTS[:1]}, ValueError, "pair"),
        ({"graph": "graph"}, TypeError, "graph must be"),
        ({"graph": torch.tensor([[0], [2]]), "num_nodes": 2}, IndexError, "edge_index must hold"),
        ({"graph": torch.tensor([[-1], [2]])}, IndexError, "edge_index must hold"),
        ({"graph": torch.tensor([[0.0], [2]])}, TypeError, "edge_index must be"),
        ({"graph": torch.tensor([0, 2])}, ValueError, "edge_index must have 2 dimensions"),
        ({"graph": torch.zeros(3, 1, dtype=torch.int64)}, ValueError, "edge_index must have shape"),
        ({"graph": torch.tensor([[0], [2**31]])}, ValueError, "less than 2\\^31"),
        ({"graph": TokenGraph(None, NeighborLists(*LISTS))}, ValueError, "direction 'in' needs"),
    ],
)
def test_bad_arguments_are_named(change, error, text) -> None:
    arguments = {"graph": LISTS, "k": 3, **change}
    with pytest.raises(error, match=text):
        local_nodes(arguments.pop("graph"), arguments.pop("k"), **arguments)


def test_bad_files_are_named(tmp_path) -> None:
    folder = tmp_path / "graph"
    write_graph(folder, TokenGraph(NeighborLists(*LISTS), None))
    with pytest.raises(FileExistsError):
        write_graph(folder, TokenGraph(NeighborLists(*LISTS), None))
    row = folder / "row.npy"
    whole = row.read_bytes()
    row.write_bytes(whole[:-3])
    with pytest.raises(ValueError, match=r"row\.npy: expected a whole"):
        open_graph(folder)
    row.write_bytes(b"no array")
    with pytest.raises(ValueError, match=r"row\.npy: expected a whole"):
        open_graph(folder)
    np.save(row, np.zeros(2))
    with pytest.raises(TypeError, match=r"row\.npy must be int32 or int64, got float64"):
        open_graph(folder)
    np.save(row, np.zeros(2, ">i8"))
    with pytest.raises(TypeError, match=r"row\.npy must be int32 or int64"):
        open_graph(folder)
    row.unlink()
    with pytest.raises(FileNotFoundError, match="got one alone"):
        open_graph(folder)
    with pytest.raises(FileNotFoundError, match="got neither"):
        open_graph(tmp_path)
