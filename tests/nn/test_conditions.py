"""The three conditions of sparse attention beside all orders of nodes, and all distances."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from fastgraph.nn import Answer, Conditions, conditions
from fastgraph.nn.adjacency import Adjacency
from fastgraph.nn.conditions import BUDGET
from fastgraph.nn.hamiltonian_search import Draws, exact_path, path_by_rotations

Edges = list[tuple[int, int]]
FAR = 99


def answers(edges: Edges, nodes: int, layers: int = 2, **options: bool | int) -> Conditions:
    index = torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).T
    return conditions(index, nodes, layers, **options)


def undirected(edges: Edges) -> Edges:
    return [*edges, *(edge[::-1] for edge in edges)]


def with_token(edges: Edges, nodes: int) -> Edges:
    return [*edges, *undirected([(node, nodes) for node in range(nodes)])]


def has_path(edges: Edges, nodes: int) -> bool:
    """True if there is a Hamiltonian path, by all of its beginnings."""
    after: dict[int, set[int]] = {node: set() for node in range(nodes)}
    for source, destination in edges:
        after[source].add(destination)

    def ends(last: int, left: set[int]) -> bool:
        return not left or any(ends(node, left - {node}) for node in after[last] & left)

    everything = set(range(nodes))
    return nodes == 0 or any(ends(node, everything - {node}) for node in range(nodes))


def distances(edges: Edges, nodes: int) -> list[list[int]]:
    """Of all pairs, by Floyd and Warshall."""
    found = [[0 if i == j else FAR for j in range(nodes)] for i in range(nodes)]
    for source, destination in edges:
        found[source][destination] = min(found[source][destination], 1)
    for k, i, j in itertools.product(range(nodes), repeat=3):
        found[i][j] = min(found[i][j], found[i][k] + found[k][j])
    return found


def follows(path: list[int], edges: Edges, nodes: int) -> bool:
    return sorted(path) == list(range(nodes)) and set(itertools.pairwise(path)) <= set(edges)


def check_path(answer: Answer, edges: Edges, nodes: int) -> None:
    """An answer about the graph, of which a token is part by now."""
    assert answer.verdict == ("yes" if has_path(edges, nodes) else "no"), (edges, answer)
    if answer.reason == "a path was found":
        assert answer.witness is not None and follows(answer.witness.tolist(), edges, nodes)


def check_reach(answer: Answer, edges: Edges, nodes: int, layers: int) -> None:
    far = distances(edges, nodes)
    is_near = all(max(row) <= layers for row in far)
    assert answer.verdict == ("yes" if is_near else "no"), (edges, layers, answer)
    if not is_near:
        assert answer.witness is not None
        source, destination = answer.witness.tolist()
        assert far[source][destination] > layers
    elif answer.witness is not None and not answer.reason.startswith("there is at most one"):
        (centre,) = answer.witness.tolist()
        assert max(far[centre]) + max(row[centre] for row in far) <= layers


def all_undirected(nodes: int) -> Iterator[Edges]:
    pairs = list(itertools.combinations(range(nodes), 2))
    for chosen in itertools.product([False, True], repeat=len(pairs)):
        yield undirected(list(itertools.compress(pairs, chosen)))


def some_directed(count: int, most: int) -> Iterator[tuple[Edges, int]]:
    draw = random.Random(0)
    for _ in range(count):
        nodes, density = draw.randint(1, most), draw.choice([0.15, 0.25, 0.35, 0.5])
        pairs = itertools.product(range(nodes), repeat=2)
        yield [pair for pair in pairs if draw.random() < density], nodes


@pytest.mark.parametrize("nodes", [0, 1, 2, 3, 4, 5, pytest.param(6, marks=pytest.mark.exhaustive)])
def test_all_undirected_graphs(nodes: int) -> None:
    for edges in all_undirected(nodes):
        joined = with_token(edges, nodes)
        alone, beside = answers(edges, nodes), answers(edges, nodes, token=True)
        check_path(alone.hamiltonian_path, edges, nodes)
        check_path(beside.hamiltonian_path, joined, nodes + 1)
        check_reach(alone.reachability, edges, nodes, 2)
        check_reach(beside.reachability, joined, nodes + 1, 2)


def test_directed_graphs() -> None:
    for edges, nodes in some_directed(120, 8):
        joined = with_token(edges, nodes)
        for layers in (1, 2, 3):
            alone = answers(edges, nodes, layers)
            beside = answers(edges, nodes, layers, token=True)
            check_reach(alone.reachability, edges, nodes, layers)
            check_reach(beside.reachability, joined, nodes + 1, layers)
        check_path(alone.hamiltonian_path, edges, nodes)
        check_path(beside.hamiltonian_path, joined, nodes + 1)


def adjacency(edges: Edges, nodes: int) -> Adjacency:
    ends = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    return Adjacency(ends[0], ends[1], nodes)


@pytest.mark.parametrize("is_symmetric", [False, True])
def test_searches_by_themselves(is_symmetric: bool) -> None:
    """The exact one is right, and the other finds no path where there is none."""
    found = 0
    for edges, nodes in some_directed(200, 9):
        graph = undirected(edges) if is_symmetric else edges
        exists = has_path(graph, nodes)
        exact = exact_path(adjacency(graph, nodes))
        assert (exact is not None) == exists
        assert exact is None or follows(exact.tolist(), graph, nodes)
        path = path_by_rotations(adjacency(graph, nodes), 10_000)
        assert path is None or follows(path.tolist(), graph, nodes)
        found += path is not None
    assert found > 20


@pytest.mark.parametrize("is_symmetric", [False, True])
def test_long_paths_are_found(is_symmetric: bool) -> None:
    """Through a sparse graph of 500 nodes, in which a path is hidden."""
    draw, nodes = random.Random(1), 500
    order = draw.sample(range(nodes), nodes)
    edges = [*itertools.pairwise(order)]
    edges += [(draw.randrange(nodes), draw.randrange(nodes)) for _ in range(5 * nodes)]
    graph = undirected(edges) if is_symmetric else edges
    answer = answers(graph, nodes).hamiltonian_path
    assert answer.verdict == "yes" and answer.reason == "a path was found"
    assert answer.witness is not None and follows(answer.witness.tolist(), graph, nodes)
    again = answers(graph, nodes).hamiltonian_path
    assert again.witness is not None and torch.equal(answer.witness, again.witness)


def star(leaves: int) -> Edges:
    return undirected([(0, leaf) for leaf in range(1, leaves + 1)])


def cliques(sizes: list[int], is_joined: bool) -> Edges:
    """Complete graphs, which share node 0 or are apart."""
    edges, first = [], 0
    for size in sizes:
        members = [*range(first, first + size)]
        if is_joined:
            members = [0, *range(first + 1, first + size)]
        edges += list(itertools.permutations(members, 2))
        first += size - is_joined
    return edges


TREE = undirected([(0, 1), (1, 2), (1, 3), (3, 4), (3, 5)])  # four leaves
LINE = [*itertools.pairwise(range(40))]
# Two ways of strong components from one to another; then three.
DIAMOND = [*undirected([(0, 1), (2, 3), (4, 5)]), (1, 2), (1, 4), (3, 6), (5, 6)]
FORK = [*DIAMOND, (1, 7), (7, 6)]
SQUARE = undirected([(i, (i + 1) % 40) for i in range(40)])
HALF = [(i, j) for i, j in itertools.permutations(range(10), 2) if i < 5 or j < 5]  # K5 and 5 alone


@pytest.mark.parametrize(
    ("edges", "nodes", "alone", "beside"),
    [
        (star(2), 3, "yes: Dirac", "yes: Dirac"),
        (star(4), 5, "no: 4 nodes have one neighbour and 0 none, but there are 2", "no: without"),
        (TREE, 6, "no: 4 nodes have one neighbour", "yes: "),
        (star(5), 6, "no: 5 nodes have one", "no: 5 nodes have one neighbour and 0 none, but .* 4"),
        (star(2), 5, "no: 2 nodes have one neighbour and 2 none", "no: 2 nodes .* are 4 ends"),
        (cliques([4, 4], False), 8, "no: there are 2 components", "yes: Dirac"),
        (cliques([4, 4, 4], False), 12, "no: there are 3", "no: there are 3 components"),
        (cliques([4, 4, 4], True), 10, "no: without node 0 there are 3 parts", "yes: "),
        (cliques([5] * 4, True), 17, "no: without node 0 there are 4", "no: without node 0 there"),
        (LINE, 40, "yes: a path was found", "yes: a path was found"),
        ([*LINE[:-1], (39, 38)], 40, "no: no edge leads out of|no: no edge leads into", "yes: a"),
        (DIAMOND, 7, "no: 2 strong components do not reach", "yes: "),
        (FORK, 8, "no: 3 strong components do not reach", "no: 3 strong components"),
        (SQUARE, 40, "yes: a path was found", "yes: a path was found"),
        (HALF, 10, "yes: Dirac", "yes: Dirac"),
    ],
)
def test_reasons(edges: Edges, nodes: int, alone: str, beside: str) -> None:
    for token, text in ((False, alone), (True, beside)):
        answer = answers(edges, nodes, token=token).hamiltonian_path
        assert any(str(answer).startswith(part.split(" .*")[0]) for part in text.split("|")), answer
        assert answer.verdict == "yes" or answer.witness is not None


def test_ores_condition_suffices() -> None:
    """Without a search: a degree sequence as Ore's has is Chvatal's."""
    met = 0
    for nodes in (3, 4, 5):
        for edges in all_undirected(nodes):
            degrees = [sum(source == node for source, _ in edges) for node in range(nodes)]
            apart = set(itertools.combinations(range(nodes), 2)) - set(edges)
            if all(degrees[i] + degrees[j] >= nodes - 1 for i, j in apart):
                reason = answers(edges, nodes).hamiltonian_path.reason
                assert reason.startswith(("Dirac", "Chvatal"))
                met += reason.startswith("Chvatal")
    assert met


def test_what_no_rule_decides() -> None:
    """A complete bipartite graph of 16 and 14 nodes has no path, but the search cannot know."""
    edges = undirected([*itertools.product(range(14), range(14, 30))])
    answer = answers(edges, 30, budget=20_000).hamiltonian_path
    assert answer.verdict == "undecided" and "budget of 20000" in answer.reason
    smaller = undirected([*itertools.product(range(7), range(7, 16))])
    assert answers(smaller, 16).hamiltonian_path.verdict == "no"


def test_exact_searches_keep_to_the_budget() -> None:
    edges = undirected([*itertools.product(range(7), range(7, 16))])
    enough = 1 << 15  # half a word for each of all sets
    poor, rich = (answers(edges, 16, budget=b).hamiltonian_path for b in (enough - 1, enough))
    assert (poor.verdict, rich.verdict) == ("undecided", "no")
    assert f"budget of {enough - 1}" in poor.reason
    assert 2 * BUDGET >= 1 << 26  # decides 26 nodes


def test_complete_graphs_of_one_layer_have_no_centre() -> None:
    edges = [*itertools.permutations(range(3), 2)]
    one, two = (answers(edges, 3, layers).reachability for layers in (1, 2))
    assert one.verdict == two.verdict == "yes"
    assert one.witness is None and two.witness is not None and two.witness.tolist() == [0]


def test_loops() -> None:
    edges = [(0, 0), (1, 0), (2, 2), (2, 2)]
    answer = answers(edges, 4).self_attention
    assert answer.verdict == "no" and answer.witness is not None
    assert answer.witness.tolist() == [1, 3]
    whole = answers([*edges, (1, 1), (3, 3)], 4).self_attention
    assert whole.verdict == "yes" and whole.witness is not None
    assert whole.witness.tolist()[1:2] == [4] and whole.witness.tolist()[3] == 5
    assert answers(edges, 4, self_loops=True).self_attention.verdict == "yes"


def test_loops_and_equal_edges_count_once() -> None:
    twice = [*star(3), *star(3), *[(node, node) for node in range(4)]]
    for token in (False, True):
        once, other = (answers(edges, 4, token=token) for edges in (star(3), twice))
        assert once.hamiltonian_path == other.hamiltonian_path
        assert once.reachability == other.reachability


@pytest.mark.parametrize("nodes", [400, 4200])
@pytest.mark.parametrize("is_directed", [False, True])
def test_reach_in_rings_with_chords(is_directed: bool, nodes: int) -> None:
    steps = (1, 4, 16, 64, 256, 1024) if is_directed else (1, 8, 64, 512)
    edges = [(node, (node + step) % nodes) for node in range(nodes) for step in steps]
    graph = edges if is_directed else undirected(edges)
    rows = adjacency(graph, nodes).along
    farthest = int(rows.depths(0, nodes).max())  # from any node, as from all others
    at, under = (answers(graph, nodes, far).reachability for far in (farthest, farthest - 1))
    assert at.verdict == "yes" and "outermost nodes reach all" in at.reason
    assert under.verdict == "no" and under.witness is not None
    source, destination = under.witness.tolist()
    assert rows.depths(source, nodes)[destination] == farthest
    poor = answers(graph, nodes, farthest, budget=10).reachability
    assert poor.verdict == "undecided" and "more than 32 times the budget of 10" in poor.reason


def test_random_numbers_are_those_of_no_library() -> None:
    first = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    draws = Draws()  # beside those that Vigna's splitmix64.c gives for the seed 0
    assert draws.words(3).tolist() == first[:3] and draws.words(1).tolist() == first[3:]
    assert Draws().below(100) == first[0] * 100 >> 64
    assert Draws().shuffled(np.array([5, 6, 7])).tolist() == [7, 6, 5]
    counts = np.bincount([draws.one_of(np.arange(3, 6)) for _ in range(3000)])[3:]
    assert counts.shape == (3,) and counts.min() > 900


def test_far_pairs_besides_a_near_middle() -> None:
    """A pair that no search from a centre shows: bitsets find it, in either direction."""
    nodes = 4100
    hub = [(0, node) for node in range(1, nodes)] + [(node, 0) for node in range(1, nodes)]
    tail = [*hub, (1, nodes), (nodes, 1), (2, nodes + 1), (nodes + 1, 2)]
    answer = answers(tail, nodes + 2, 3).reachability
    assert answer.verdict == "no" and answer.witness is not None
    assert set(answer.witness.tolist()) == {nodes, nodes + 1}
    assert answers(tail, nodes + 2, 4).reachability.verdict == "yes"


def test_an_answer_is_no_truth_value() -> None:
    with pytest.raises(TypeError, match="compare its verdict with"):
        bool(answers([], 1).hamiltonian_path)
    both = answers(cliques([4], False), 4)
    assert not both.hold and answers(cliques([4], False), 4, self_loops=True).hold
    assert str(both).splitlines()[0] == "C1 no: 4 of 4 nodes have no self-loop"


def real_graphs() -> Iterator[tuple[str, Callable[[Path], tuple[torch.Tensor, int]]]]:
    def planetoid(folder: Path, name: str) -> tuple[torch.Tensor, int]:
        import pickle

        with open(folder / "Planetoid" / name / "raw" / f"ind.{name.lower()}.graph", "rb") as file:
            lists = pickle.load(file, encoding="latin1")
        edges = [(node, other) for node, others in lists.items() for other in others]
        return torch.tensor(edges).T, len(lists)

    def archive(folder: Path, name: str) -> tuple[torch.Tensor, int]:
        stored = np.load(folder / f"{name}.npz")
        return torch.from_numpy(stored["edge_index"].astype(np.int64)), len(stored["x"])

    def tolokers(folder: Path, name: str) -> tuple[torch.Tensor, int]:
        (path,) = (folder / "HeterophilousGraphDataset" / name).glob("raw/*.npz")
        stored = np.load(path)
        edges = torch.from_numpy(stored["edges"].astype(np.int64)).T
        return torch.cat([edges, edges.flip(0)], 1), len(stored["node_features"])

    for name, read in (
        ("Cora", planetoid),
        ("CiteSeer", planetoid),
        ("tolokers", tolokers),
        ("wordnet", archive),
        ("debian", archive),
    ):
        yield name, partial(read, name=name)


@pytest.mark.skipif("FASTGRAPH_DATA" not in os.environ, reason="FASTGRAPH_DATA is not set")
@pytest.mark.parametrize(("name", "read"), [*real_graphs()])
def test_real_graphs(name: str, read: Callable[[Path], tuple[torch.Tensor, int]]) -> None:
    """No path, token or not, by leaves; and no reach within four layers without a token."""
    index, nodes = read(Path(os.environ["FASTGRAPH_DATA"]))
    alone = conditions(index, nodes, 4)
    beside = conditions(index, nodes, 4, token=True)
    for found in (alone, beside):
        assert found.hamiltonian_path.verdict == "no"
        assert "nodes have one neighbour" in found.hamiltonian_path.reason
    assert alone.reachability.verdict == "no" and beside.reachability.verdict == "yes"
    if name == "Cora":
        assert "485 nodes have one neighbour" in alone.hamiltonian_path.reason


@pytest.mark.parametrize(
    ("index", "nodes", "layers", "error", "text"),
    [
        (torch.zeros(3, 2).long(), 3, 1, ValueError, r"index: expected int64 or int32 \[2, E\]"),
        (torch.zeros(2, 2), 3, 1, ValueError, "index: expected int64 or int32 .*torch.float32"),
        (torch.tensor([[0], [3]]), 3, 1, IndexError, "index: expected nodes of 0 to 2, got 3"),
        (torch.tensor([[-1], [2]]), 3, 1, IndexError, "got -1"),
        (torch.zeros(2, 0).long(), -1, 1, ValueError, "num_nodes: expected .* at least 0, got -1"),
        (torch.zeros(2, 0).long(), 3, 0, ValueError, "layers: expected .* at least 1, got 0"),
        (torch.zeros(2, 0).long(), 3, True, ValueError, "layers: expected an integer"),
    ],
)
def test_bad_input(
    index: torch.Tensor, nodes: int, layers: int, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        conditions(index, nodes, layers)
    with pytest.raises(ValueError, match="budget: expected"):
        conditions(torch.zeros(2, 0).int(), 3, 1, budget=-1)
