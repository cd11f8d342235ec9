"""Transforms: what they write of graphs of any shape, and that PyG batches it."""

from __future__ import annotations

from typing import Any

import networkx as nx
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.loader import DataLoader
from torch_geometric.transforms import Compose
from torch_geometric.utils import get_laplacian, to_dense_adj

import fastgraph.transforms
from fastgraph import ops
from fastgraph.nn import Graphormer, GraphTransformer
from fastgraph.transforms import (
    AttentionPattern,
    ClusterOrder,
    Degrees,
    LaplacianPositions,
    ShortestPaths,
)

ALL = (
    ClusterOrder(2),
    ClusterOrder(),
    AttentionPattern(),
    AttentionPattern(3, path=True),
    ShortestPaths(3),
    ShortestPaths(pairs="edge_index"),
    Degrees(),
    LaplacianPositions(3, ncv=9),
)


def graph(num_nodes: int, edges: list[list[int]]) -> Data:
    index = torch.tensor(edges, dtype=torch.int64).view(2, -1)
    draw = torch.Generator().manual_seed(num_nodes)
    x = torch.randn(num_nodes, 5, generator=draw, dtype=torch.float64)
    return Data(x=x, edge_index=index, edge_attr=index[0].double())


def graphs() -> list[Data]:
    """With loops, duplicates, several components, one node, and as many edges as nodes."""
    return [
        graph(6, [[0, 1, 2, 2, 2, 4, 4], [1, 2, 3, 3, 0, 5, 4]]),
        graph(1, [[], []]),
        graph(4, [[0, 1, 2, 3], [1, 2, 3, 0]]),
        graph(1, [[0], [0]]),
        graph(5, [[], []]),
    ]


def same(a: Data, b: Data) -> bool:
    one, other = a.to_dict(), b.to_dict()
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("transform", ALL, ids=repr)
def test_a_dataset_may_name_it(transform: Any) -> None:
    """PyG compares the text of a ``pre_transform`` with that of its files."""
    again = eval(repr(transform), vars(fastgraph.transforms))
    assert repr(again) == repr(transform)
    for given in [*graphs(), graph(0, [[], []])]:
        before = given.clone()
        found = transform(given)
        assert same(given, before) and len(found.keys()) > len(given.keys())
        assert same(transform(given), found) and same(again(given), found)
        assert found.num_nodes == given.num_nodes


def test_all_are_exported() -> None:
    assert {type(transform).__name__ for transform in ALL} == set(fastgraph.transforms.__all__)


@pytest.mark.parametrize("hops", [1, 3])
def test_patterns_and_degrees_of_batches(hops: int) -> None:
    """A model has the results that it has of the graphs one by one, and of their edges."""
    transform = Compose([ClusterOrder(2), AttentionPattern(hops), Degrees()])
    made = [transform(one) for one in graphs()]
    batch = next(iter(DataLoader(made, batch_size=len(made))))
    torch.manual_seed(0)
    model = Graphormer.slim(5, 3, hops=4).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    degrees = batch.in_degree, batch.out_degree
    found = model(batch.x, batch.attn_index, batch.batch, types=batch.attn_type, degrees=degrees)
    pattern = model.pattern(batch.edge_index, batch.num_nodes, batch.batch, hops=hops)
    assert torch.equal(found, model(batch.x, pattern))
    alone = [
        model(one.x, one.attn_index, types=one.attn_type, degrees=(one.in_degree, one.out_degree))
        for one in made
    ]
    assert torch.allclose(found, torch.cat(alone), rtol=1e-12, atol=1e-12)
    back = [ClusterOrder.back(out, one) for out, one in zip(alone, made, strict=True)]
    assert torch.allclose(ClusterOrder.back(found, batch), torch.cat(back), rtol=1e-12, atol=1e-12)
    edges = [model(one.x, model.pattern(one.edge_index, len(one.x), hops=hops)) for one in graphs()]
    assert torch.allclose(torch.cat(back), torch.cat(edges), rtol=1e-10, atol=1e-10)
    assert all(map(same, Batch.to_data_list(batch), made))


def test_degrees_that_edges_have_lost() -> None:
    torch.manual_seed(0)
    model, (one, *_) = GraphTransformer(5, 3, 16, max_degree=2).double().eval(), graphs()
    whole = Degrees(2)(one)
    assert whole.in_degree.tolist() == [1, 1, 1, 1, 0, 1]
    assert whole.out_degree.tolist() == [1, 1, 2, 0, 1, 0]
    assert Degrees(1)(one).out_degree.tolist() == [1, 1, 1, 0, 1, 0]
    index, given = one.edge_index[:, :2], (whole.in_degree, whole.out_degree)
    assert torch.equal(model(one.x, one.edge_index), model(one.x, one.edge_index, degrees=given))
    assert not torch.equal(model(one.x, index), model(one.x, index, degrees=given))
    with pytest.raises(ValueError, match=r"degrees: expected int64 \[6\] twice, got torch.int32"):
        model(one.x, index, degrees=(given[0].int(), given[1]))
    with pytest.raises(ValueError, match="degrees: expected numbers from 0 on, got -1"):
        model(one.x, index, degrees=(given[0], given[1] - 1))
    wrong: Any
    for wrong in (given[0], given[:1], (None, None)):
        with pytest.raises(ValueError, match="degrees: expected two tensors, got"):
            model(one.x, index, degrees=wrong)
    with pytest.raises(ValueError, match="degrees: expected None without max_degree"):
        GraphTransformer(5, 3, 16).double()(one.x, index, degrees=given)


def distances(one: Data, longest: int) -> Tensor:
    made = nx.DiGraph(one.edge_index.T.tolist())
    made.add_nodes_from(range(one.num_nodes))
    found = torch.full((one.num_nodes, one.num_nodes), longest + 1, dtype=torch.uint8)
    for key, lengths in nx.all_pairs_shortest_path_length(made, cutoff=longest):
        for query, length in lengths.items():
            found[query, key] = length
    return found


@pytest.mark.parametrize("longest", [0, 2, 254])
def test_distances(longest: int) -> None:
    made = [ShortestPaths(longest)(one) for one in graphs()]
    expected = [distances(one, longest) for one in graphs()]
    for found, right in zip(made, expected, strict=True):
        assert torch.equal(found.distance, right.flatten())
    for one, right in zip(graphs(), expected, strict=True):
        pairs = AttentionPattern(3)(one)
        found = ShortestPaths(longest, pairs="attn_index")(pairs).distance
        key, query = pairs.attn_index
        assert torch.equal(found, right[query, key])
    batch = Batch.from_data_list(made)
    query, table = batch.x.view(-1, 1, 5), torch.randn(longest + 2, 1, dtype=torch.float64)
    out, _ = ops.dense_attention(
        query, query, query, batch.ptr, bias=table, pair_type=batch.distance
    )
    alone = [
        (one.x @ one.x.T / 5**0.5 + table[right.long(), 0]).softmax(1) @ one.x
        for one, right in zip(made, expected, strict=True)
    ]
    assert torch.allclose(out[:, 0], torch.cat(alone))


def test_clusters_follow_one_another() -> None:
    cliques = torch.block_diag(*[torch.ones(8, 8)] * 4)
    mixed = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    one = Data(edge_index=cliques[mixed][:, mixed].nonzero().T, y=mixed, num_nodes=32)
    made = ClusterOrder(4)(one)
    assert torch.equal(one.y[made.original_index], made.y)
    assert (made.y.view(4, 8) // 8).unique(dim=1).shape == (4, 1)
    again = ClusterOrder(3)(made)
    assert torch.equal(ClusterOrder.back(again.y, again), one.y)
    number = again.original_index
    adjacency = to_dense_adj(again.edge_index, max_num_nodes=32)[0]
    assert torch.equal(adjacency, to_dense_adj(one.edge_index)[0][number][:, number])
    assert torch.equal(ClusterOrder(33)(one).original_index, torch.arange(32))


@pytest.mark.parametrize("size", [12, 130])
def test_positions_are_eigenvectors(size: int) -> None:
    draw = torch.Generator().manual_seed(0)
    line = torch.stack([torch.arange(size - 1), torch.arange(1, size)])
    index = torch.cat([line, torch.randint(size, (2, size), generator=draw)], dim=1)
    one = Data(edge_index=index, num_nodes=size)
    found = LaplacianPositions(4)(one).laplacian_eigenvector_pe.double()
    both = torch.cat([index, index.flip(0)], dim=1).unique(dim=1)
    edges, weights = get_laplacian(both, normalization="sym", num_nodes=size)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    matrix.index_put_(tuple(edges), weights.double(), accumulate=True)
    values = torch.linalg.eigvalsh(matrix)[1:5]
    assert torch.allclose(matrix @ found, found * values, atol=1e-4)  # float32 of PyG's transform
    assert torch.allclose(found.T @ found, torch.eye(4, dtype=torch.float64), atol=1e-4)
    assert bool((found.gather(0, found.abs().argmax(0, keepdim=True)) > 0).all())


def test_positions_of_small_graphs_and_of_none_that_arpack_finds() -> None:
    few = LaplacianPositions(5)(graphs()[2]).laplacian_eigenvector_pe
    assert few.shape == (4, 5) and bool(few[:, :3].any(0).all()) and not few[:, 3:].any()
    whole = Data(edge_index=torch.arange(240).view(2, 120), num_nodes=240)  # 120 components
    assert LaplacianPositions(239)(whole).laplacian_eigenvector_pe.shape == (240, 239)
    ring = torch.arange(240)
    one = Data(edge_index=torch.stack([ring, ring.roll(1)]), num_nodes=240)
    with pytest.raises(RuntimeError, match="ARPACK found no 4 eigenvectors of a graph of 240"):
        LaplacianPositions(4, maxiter=1)(one)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ClusterOrder(0), ValueError, "num_clusters: expected an integer of at least 1"),
        (lambda: ClusterOrder(True), ValueError, "num_clusters: expected an integer of at least 1"),
        (lambda: AttentionPattern(0), ValueError, "hops: expected an integer of 1 to 250, got 0"),
        (lambda: AttentionPattern(2.0), ValueError, "hops: expected an integer"),
        (lambda: ShortestPaths(255), ValueError, "longest: expected an integer of 0 to 254"),
        (lambda: ShortestPaths(max_pairs=-1), ValueError, "max_pairs: expected an integer"),
        (lambda: Degrees(0), ValueError, "max_degree: expected an integer of at least 1, got 0"),
        (lambda: LaplacianPositions(0), ValueError, "k: expected an integer of at least 1, got 0"),
    ],
)
def test_options_out_of_range(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("transform", ALL, ids=repr)
def test_graphs_that_are_none(transform: Any) -> None:
    with pytest.raises(TypeError, match="data must be a Data of PyG, got HeteroData"):
        transform(HeteroData())
    with pytest.raises(ValueError, match="data must have an edge_index, got"):
        transform(Data(x=torch.zeros(3, 1)))
    with pytest.raises(TypeError, match="data must be one graph, got a batch"):
        transform(Batch.from_data_list(graphs()))
    one, index = graphs()[0], graphs()[0].edge_index
    for wrong in (index.double(), index[0]):
        one.edge_index = wrong
        with pytest.raises(ValueError, match="edge_index: expected int64 or int32"):
            transform(one)
    for wrong in (index + 2, index - 1):
        one.edge_index = wrong
        with pytest.raises(IndexError, match="edge_index: expected nodes of 0 to 5, got"):
            transform(one)


def test_outputs_that_cannot_go_back() -> None:
    one = ClusterOrder()(graphs()[0])
    with pytest.raises(ValueError, match=r"out: expected \[6, ...\], got \[5, 2\]"):
        ClusterOrder.back(torch.zeros(5, 2), one)
    with pytest.raises(ValueError, match="data: expected a graph with original_index"):
        ClusterOrder.back(torch.zeros(6, 2), graphs()[0])


def test_pairs_that_are_none() -> None:
    one = graphs()[0]
    with pytest.raises(ValueError, match=r"max_pairs: expected at least 36, those of 6 nodes"):
        ShortestPaths(max_pairs=35)(one)
    with pytest.raises(ValueError, match=r"pairs: expected 'all' or an index .*, got 'other'"):
        ShortestPaths(pairs="other")(one)
    one.other = torch.tensor([[0], [6]])
    with pytest.raises(IndexError, match="other: expected nodes of 0 to 5, got 0 to 6"):
        ShortestPaths(pairs="other")(one)
    with pytest.raises(ValueError, match="data: expected no distance yet"):
        ClusterOrder()(ShortestPaths()(graphs()[0]))
    one.edge_index = torch.tensor([[0], [6]])
    with pytest.raises(IndexError, match="edge_index: expected nodes of 0 to 5, got 6"):
        AttentionPattern()(one)
