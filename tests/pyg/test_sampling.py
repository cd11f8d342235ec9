"""PyG's loaders by our sampler, which it finds where it finds no other."""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

import pytest
import torch
import torch_geometric.typing
from torch import Tensor
from torch_geometric import EdgeIndex, Index
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import (
    ClusterData,
    ClusterLoader,
    GraphSAINTRandomWalkSampler,
    HGTLoader,
    LinkNeighborLoader,
    NeighborLoader,
    ShaDowKHopSampler,
    ZipLoader,
)
from torch_geometric.loader import NeighborSampler as SamplerByLayer
from torch_geometric.nn import MetaPath2Vec, Node2Vec
from torch_geometric.nn.to_hetero_module import ToHeteroLinear
from torch_geometric.sampler import NeighborSampler
from torch_geometric.utils import dropout_path, k_hop_subgraph, subgraph

import fastgraph
from fastgraph.pyg import sampling
from fastgraph.pyg.hgt_sampling import _Budget, hgt_sample
from fastgraph.pyg.sampling_functions import hetero_neighbor_sample
from tests.pyg.mini_batches import WITHOUT_SAMPLER
from tests.sampling.oracle import hetero_sample

pytestmark = [WITHOUT_SAMPLER, pytest.mark.usefixtures("sampling_enabled")]


def graph(nodes: int = 60, edges: int = 400) -> Data:
    """A graph with a hub, duplicates, loops and, as the last two nodes, isolated ones."""
    generator = torch.Generator().manual_seed(7)
    index = torch.randint(nodes - 2, (2, edges), generator=generator)
    index[1, :80] = 3
    index[:, 80:90] = index[:, 90:100]
    index[1, 100:110] = index[0, 100:110]
    time = torch.randint(9, (nodes,), generator=generator)  # with ties
    return Data(
        x=torch.arange(nodes).float().unsqueeze(1),
        edge_index=index,
        edge_attr=torch.arange(edges),
        time=time,
        edge_time=torch.randint(9, (edges,), generator=generator),
        weight=torch.rand(edges, generator=generator),
    )


def hetero_graph() -> HeteroData:
    generator = torch.Generator().manual_seed(3)
    data = HeteroData()
    data["paper"].x = torch.arange(30.0).unsqueeze(1)
    data["author"].x = torch.arange(20.0).unsqueeze(1)
    data["venue"].x = torch.arange(4.0).unsqueeze(1)  # without edges
    sizes = {"paper": 30, "author": 20}
    for source, relation, target in (
        ("paper", "cites", "paper"),
        ("author", "writes", "paper"),
        ("paper", "by", "author"),
    ):
        index = torch.stack(
            [torch.randint(sizes[end], (90,), generator=generator) for end in (source, target)]
        )
        data[source, relation, target].edge_index = index
        data[source, relation, target].edge_attr = torch.arange(90)
    return data


def content(batch: Any) -> list[Any]:
    """All of a batch that depends on chance."""
    return [
        (name, value.tolist() if isinstance(value, Tensor) else value)
        for store in batch.stores
        for name, value in sorted(store.items(), key=lambda item: item[0])
    ]


def contents(loader: Any) -> list[Any]:
    batches = (batch if isinstance(batch, tuple) else (batch,) for batch in loader)
    return [[content(part) for part in batch] for batch in batches]


# Against the definition ##########################################################################


@pytest.mark.parametrize("options", ["plain", "disjoint", "node time", "edge time"])
def test_batches_are_those_of_the_definition(options: str) -> None:
    data = graph()
    seeds = torch.tensor([3, 59, 0, 17])  # the hub and an isolated node among them
    given: dict[str, Any] = {
        "plain": {},
        "disjoint": {"disjoint": True},
        "node time": {"time_attr": "time", "temporal_strategy": "last"},
        "edge time": {"time_attr": "edge_time", "temporal_strategy": "last"},
    }[options]
    if options == "edge time":
        given["input_time"] = torch.tensor([4, 4, 8, 0])
    counts = [2, 3] if "time" in options else [-1, -1]
    loader = NeighborLoader(data, counts, input_nodes=seeds, batch_size=4, **given)
    batch = next(iter(loader))

    sampler = loader.node_sampler
    kind = ("n", "e", "n")
    expected = hetero_sample(
        {kind: sampler.colptr},
        {kind: sampler.row},
        {"n": seeds},
        {kind: counts},
        node_time={"n": data.time} if options == "node time" else None,
        edge_time={kind: sampler.edge_time} if options == "edge time" else None,
        seed_time={"n": given["input_time"]} if options == "edge time" else None,
        disjoint=options != "plain",
    )
    groups, nodes = zip(*expected["nodes"]["n"], strict=True)
    rows, cols, edges = zip(*expected["edges"][kind], strict=True)
    assert batch.n_id.tolist() == list(nodes)
    assert batch.edge_index.tolist() == [list(rows), list(cols)]
    assert batch.e_id.tolist() == sampler.perm[list(edges)].tolist()
    assert batch.num_sampled_nodes == expected["node_counts"]["n"]
    assert batch.num_sampled_edges == expected["edge_counts"][kind]
    if options != "plain":
        assert batch.batch.tolist() == list(groups)


def test_batches_of_many_types_are_those_of_the_definition() -> None:
    data = hetero_graph()
    seeds = torch.tensor([4, 0, 29])
    loader = NeighborLoader(data, [-1, -1], input_nodes=("paper", seeds), batch_size=3)
    batch = next(iter(loader))
    sampler = loader.node_sampler
    kinds = sampler.to_edge_type
    expected = hetero_sample(
        {kinds[name]: colptr for name, colptr in sampler.colptr_dict.items()},
        {kinds[name]: row for name, row in sampler.row_dict.items()},
        {"paper": seeds},
        {key: [-1, -1] for key in data.edge_types},
    )
    for name in ("paper", "author"):
        assert batch[name].n_id.tolist() == [node for _, node in expected["nodes"][name]]
        assert batch[name].num_sampled_nodes == expected["node_counts"][name]
    assert batch["venue"].n_id.numel() == 0
    for edge_type in data.edge_types:
        store, edges = batch[edge_type], expected["edges"][edge_type]
        assert store.edge_index.t().tolist() == [list(edge[:2]) for edge in edges]
        assert store.e_id.tolist() == sampler.perm[edge_type][[e[2] for e in edges]].tolist()


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("weight", [None, "weight"])
def test_draws_are_edges_and_as_many_as_asked_for(replace: bool, weight: str | None) -> None:
    data = graph()
    degrees = torch.bincount(data.edge_index[1], minlength=60)
    loader = NeighborLoader(
        data, [4], input_nodes=torch.arange(60), batch_size=60, replace=replace, weight_attr=weight
    )
    batch = next(iter(loader))
    assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
    drawn = torch.bincount(batch.edge_index[1], minlength=60)[:60]
    expected = 4 * (degrees > 0) if replace else degrees.clamp(max=4)
    assert torch.equal(drawn, expected)
    if not replace:
        assert batch.e_id.unique().numel() == batch.e_id.numel()


@pytest.mark.parametrize("make", [graph, hetero_graph])
def test_an_induced_subgraph_has_all_edges_between_its_nodes(make: Any) -> None:
    data = make()
    nodes = torch.tensor([5, 2, 8])
    is_typed = isinstance(data, HeteroData)
    loader = NeighborLoader(
        data,
        [3, 2],
        input_nodes=("paper", nodes) if is_typed else nodes,
        batch_size=3,
        subgraph_type="induced",
    )
    batch = next(iter(loader))
    if is_typed:
        for kind in data.edge_types:
            source, target = (
                torch.isin(data[kind].edge_index[i], batch[kind[i * 2]].n_id) for i in (0, 1)
            )
            expected = (source & target).nonzero().flatten()
            assert batch[kind].e_id.sort().values.tolist() == expected.tolist()
        return
    mask = torch.zeros(60, dtype=torch.bool)
    mask[batch.n_id] = True
    expected = subgraph(mask, data.edge_index, data.edge_attr)[1]
    assert batch.e_id.sort().values.tolist() == expected.tolist()
    with pytest.raises(ValueError, match="'disjoint' sampling not supported"):
        next(iter(NeighborLoader(data, [3], subgraph_type="induced", disjoint=True)))


def test_nothing_leads_to_nodes_without_types_of_edges() -> None:
    seeds = {"paper": torch.tensor([4, 2]), "author": torch.tensor([1])}
    out = hetero_neighbor_sample([*seeds], [], {}, {}, seeds, {}, csc=True, disjoint=True)
    assert out[2]["paper"].tolist() == [[0, 4], [1, 2]]
    assert out[2]["author"].tolist() == [[2, 1]]


def test_hgt_takes_all_nodes_within_reach_where_it_may() -> None:
    data = graph()
    typed = HeteroData({"n": {"x": data.x}, ("n", "to", "n"): {"edge_index": data.edge_index}})
    seeds = torch.tensor([3, 59, 0])
    loader = HGTLoader(typed, [60, 60], input_nodes=("n", seeds), batch_size=3)
    batch = next(iter(loader))
    expected, _, _, _mask = k_hop_subgraph(seeds, 2, data.edge_index, num_nodes=60)
    assert batch["n"].n_id[:3].tolist() == seeds.tolist()
    assert batch["n"].n_id.sort().values.tolist() == expected.tolist()
    between = torch.isin(data.edge_index, expected).all(0)
    e_id = batch["n", "to", "n"].e_id
    assert e_id.sort().values.tolist() == between.nonzero().flatten().tolist()
    assert torch.equal(batch["n"].n_id[batch["n", "to", "n"].edge_index], data.edge_index[:, e_id])


def test_hgt_draws_by_squares_of_budgets() -> None:
    torch.manual_seed(0)
    shares = torch.tensor([1.0, 2.0, 3.0, 0.5], dtype=torch.float64)
    counts = torch.zeros(4, dtype=torch.float64)
    draws = 4000
    for _ in range(draws):
        budget = _Budget()
        budget.add(torch.arange(4), shares, torch.empty(0, dtype=torch.int64))
        drawn = budget.draw(1)
        assert budget.nodes.numel() == 3 and int(drawn) not in budget.nodes.tolist()
        counts[drawn] += 1
    expected = draws * shares.square() / shares.square().sum()
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # 0.1 % of chi-squared with 3


def test_hgt_meets_hubs_and_types_that_nobody_reaches() -> None:
    edges = {"a__to__b": (torch.tensor([0, 700]), torch.arange(700) % 30)}
    colptr = {name: edge[0] for name, edge in edges.items()}
    row = {name: edge[1] for name, edge in edges.items()}
    nodes, rows, cols, drawn = hgt_sample(
        colptr, row, {"b": torch.tensor([0])}, {"a": [5, 4], "b": [5, 5]}, 2
    )
    assert nodes["a"].numel() == nodes["a"].unique().numel() == 9
    assert nodes["b"].tolist() == [0]
    assert set(cols["a__to__b"].tolist()) == {0}
    assert torch.equal(nodes["a"][rows["a__to__b"]], row["a__to__b"][drawn["a__to__b"]])


def test_shadow_has_a_graph_around_each_root() -> None:
    data = graph()
    roots = torch.tensor([3, 59, 0])
    batch = next(iter(ShaDowKHopSampler(data, 2, 100, node_idx=roots, batch_size=3)))
    nodes, at = batch.x.flatten().long(), 0
    for root, position in enumerate(batch.root_n_id.tolist()):
        expected, index, _, _ = k_hop_subgraph(
            int(roots[root]), 2, data.edge_index, relabel_nodes=True, num_nodes=60
        )
        begin, end = int(batch.ptr[root]), int(batch.ptr[root + 1])
        assert nodes[begin:end].tolist() == expected.tolist()
        assert nodes[position] == roots[root]
        # PyG leaves out edges of the nodes that the last hop has found.
        all_edges = subgraph(expected, data.edge_index, relabel_nodes=True, num_nodes=60)[0]
        mine = (batch.batch[batch.edge_index[0]] == root).nonzero().flatten()
        found = batch.edge_index[:, mine] - begin
        assert sorted(found.t().tolist()) == sorted(all_edges.t().tolist())
        assert mine.tolist() == list(range(at, at + len(mine)))
        at += len(mine)
        assert index.shape[1] <= len(mine)
    assert torch.equal(nodes[batch.edge_index], data.edge_index[:, batch.edge_attr])


def test_saint_has_all_edges_between_nodes_of_walks() -> None:
    data = Data(**{k: v for k, v in graph().to_dict().items() if k in ("x", "edge_index")})
    data.e_id = torch.arange(400)
    loader = GraphSAINTRandomWalkSampler(
        data, batch_size=4, walk_length=2, num_steps=3, sample_coverage=5, log=False
    )
    for batch in loader:
        nodes = batch.x.flatten().long()
        expected = subgraph(nodes, data.edge_index, data.e_id)[1]
        assert batch.e_id.sort().values.tolist() == expected.tolist()
        assert torch.equal(nodes[batch.edge_index], data.edge_index[:, batch.e_id])
        assert batch.edge_norm.numel() == batch.num_edges


def test_the_sampler_by_layer_gives_bipartite_graphs() -> None:
    data = graph()
    loader = SamplerByLayer(data.edge_index, [3, -1], num_nodes=60, batch_size=20)
    for size, n_id, adjacencies in loader:
        assert size == 20
        for index, e_id, (sources, targets) in adjacencies:
            assert index[0].max() < sources and index[1].max() < targets
            assert torch.equal(n_id[index], data.edge_index[:, e_id])


def test_clusters_are_a_partition() -> None:
    pytest.importorskip("pymetis")
    data = graph()
    parts = ClusterData(data, num_parts=4, log=False)
    assert parts.partition.node_perm.sort().values.tolist() == list(range(60))
    seen = torch.cat([batch.x for batch in ClusterLoader(parts, batch_size=2)])
    assert seen.flatten().sort().values.tolist() == list(range(60))


def test_walks_follow_edges() -> None:
    data = graph()
    pairs = set(map(tuple, data.edge_index.t().tolist()))
    for p, q in ((1.0, 1.0), (0.25, 4.0)):
        model = Node2Vec(data.edge_index, 4, walk_length=5, context_size=3, p=p, q=q, num_nodes=60)
        walks, _ = model.sample(torch.arange(60))
        assert walks.shape == (180, 3)
        for walk in walks.tolist():
            for step in itertools.pairwise(walk):
                assert step in pairs or step[0] == step[1]
    kept, mask = dropout_path(data.edge_index, p=0.1, num_nodes=60)
    assert torch.equal(kept, data.edge_index[:, mask]) and 0 < int(mask.sum()) < 400


def test_metapath2vec_needs_no_sampler() -> None:
    data = hetero_graph()
    metapath = [("paper", "by", "author"), ("author", "writes", "paper")]
    model = MetaPath2Vec(data.edge_index_dict, 4, metapath, walk_length=4, context_size=3)
    walks, negatives = next(iter(model.loader(batch_size=5)))
    assert torch.isfinite(model.loss(walks, negatives))


# Random numbers ##################################################################################


def link_loader(**options: Any) -> LinkNeighborLoader:
    return LinkNeighborLoader(
        graph(), [3, 2], batch_size=50, neg_sampling="triplet", shuffle=True, **options
    )


def node_loader(**options: Any) -> NeighborLoader:
    return NeighborLoader(graph(), [3, 2], batch_size=11, shuffle=True, **options)


def hgt_loader(**options: Any) -> HGTLoader:
    return HGTLoader(hetero_graph(), [4, 4], input_nodes="paper", batch_size=7, **options)


def shadow_loader(**options: Any) -> ShaDowKHopSampler:
    return ShaDowKHopSampler(graph(), 2, 3, batch_size=11, shuffle=True, **options)


def zip_loader(**options: Any) -> ZipLoader:
    return ZipLoader([node_loader(), node_loader()], batch_size=11, shuffle=True, **options)


@pytest.mark.parametrize("make", [node_loader, link_loader, hgt_loader, shadow_loader, zip_loader])
def test_samples_are_the_same_for_any_number_of_workers(make: Any) -> None:
    found = []
    for workers in (0, 1, 3):
        torch.manual_seed(5)
        loader = make(num_workers=workers)
        found.append([contents(loader), contents(loader), float(torch.rand(()))])
    assert found[0] == found[1] == found[2]
    assert found[0][0] != found[0][1]  # epochs differ, and so do seeds
    torch.manual_seed(6)
    assert contents(make()) != found[0][0]


def test_workers_that_stay_draw_anew_in_each_epoch() -> None:
    found = []
    for workers in (1, 3):
        torch.manual_seed(5)
        loader = NeighborLoader(
            graph(), [3, 2], batch_size=11, num_workers=workers, persistent_workers=True
        )
        next(iter(loader))  # an epoch that ends early
        found.append([contents(loader), contents(loader)])
        workers_of = getattr(loader._iterator, "iterator", loader._iterator)
        workers_of._shutdown_workers()  # torch waits long where garbage is collected
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_a_batch_that_comes_again_is_drawn_again() -> None:
    data = graph()
    loader = NeighborLoader(data, [3], input_nodes=torch.tensor([3, 3]), batch_size=1)
    first, second = (batch.e_id.tolist() for batch in loader)
    assert first != second
    torch.manual_seed(0)
    assert loader([0]).e_id.tolist() != loader([0]).e_id.tolist()


def test_samples_are_the_same_for_any_number_of_threads() -> None:
    threads = torch.get_num_threads()
    found = []
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        torch.manual_seed(5)
        found.append(contents(node_loader()))
    torch.set_num_threads(threads)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("start", ["forkserver", "spawn"])
def test_workers_that_are_started_anew_have_our_sampler(start: str) -> None:
    torch.manual_seed(5)
    expected = contents(link_loader())
    torch.manual_seed(5)
    assert contents(link_loader(num_workers=1, multiprocessing_context=start)) == expected


class _Killing:
    """A transformation that ends its process."""

    def __call__(self, batch: Data) -> Data:
        os.kill(os.getpid(), signal.SIGKILL)
        return batch


def test_a_killed_worker_is_an_error() -> None:
    loader = node_loader(num_workers=1, filter_per_worker=True, transform=_Killing())
    with pytest.raises(RuntimeError, match=r"DataLoader worker .*(killed|exited)"):
        next(iter(loader))


def test_a_seed_that_is_no_node_is_an_error_that_names_it() -> None:
    with pytest.raises(IndexError, match="seed"):
        next(iter(NeighborLoader(graph(), [2], input_nodes=torch.tensor([60]))))


@pytest.mark.parametrize("order", [None, "row"])  # PyG sorts by column anew, each in its way
def test_indices_that_wrap_tensors_are_sampled_as_these(order: str | None) -> None:
    plain, wrapped = graph(), graph()
    wrapped.edge_index = EdgeIndex(plain.edge_index, sparse_size=(60, 60))
    if order is not None:
        wrapped.edge_index, places = wrapped.edge_index.sort_by(order, stable=True)
        plain.edge_index = plain.edge_index[:, places]
        plain.edge_attr = wrapped.edge_attr = plain.edge_attr[places]
    nodes, wrapped_nodes = torch.arange(9), Index(torch.arange(9), dim_size=60)
    roots = {"batch_size": 4}

    def loaders(data: Data, nodes: Tensor) -> list[Any]:
        return [
            NeighborLoader(data, [3, 2], nodes, **roots),
            NeighborLoader(data, [3, 2], nodes, subgraph_type="induced", **roots),
            NeighborLoader(data, [3, 2], nodes, disjoint=True, **roots),
            LinkNeighborLoader(data, [3], data.edge_index, neg_sampling="triplet", **roots),
            ShaDowKHopSampler(data, 2, 3, nodes, **roots),
            GraphSAINTRandomWalkSampler(data, batch_size=6, walk_length=2),
        ]

    for ours, theirs in zip(loaders(wrapped, wrapped_nodes), loaders(plain, nodes), strict=True):
        batches = []
        for loader in (ours, theirs):
            torch.manual_seed(3)
            batches.append(next(iter(loader)))
        for name in ("edge_index", "x"):
            assert torch.equal(batches[0][name], batches[1][name])
    many = HeteroData()
    many["a"].num_nodes = 60
    many["a", "to", "a"].edge_index = wrapped.edge_index
    assert next(iter(NeighborLoader(many, [3], ("a", wrapped_nodes), **roots)))["a"].num_nodes > 4
    assert next(iter(HGTLoader(many, [3], ("a", wrapped_nodes), **roots)))["a"].num_nodes > 4


def test_fanouts_may_be_numbers_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    assert next(iter(NeighborLoader(graph(), [numpy.int64(2)]))).num_sampled_edges[0] <= 2


# Where it stands #################################################################################


def test_what_was_replaced_is_put_back() -> None:
    ours = NeighborSampler._sample
    assert torch_geometric.typing.WITH_PYG_LIB
    fastgraph.disable()
    assert NeighborSampler._sample is not ours
    assert not torch_geometric.typing.WITH_PYG_LIB
    assert not hasattr(torch.ops.pyg, "neighbor_sample")
    assert not hasattr(torch.ops.torch_sparse, "hgt_sample")
    with pytest.raises(ImportError, match="pyg-lib"):
        next(iter(NeighborLoader(graph(), [2])))
    fastgraph.enable()
    assert next(iter(NeighborLoader(graph(), [2]))).n_id[0] == 0


def test_it_stays_while_the_program_or_the_switch_wants_it() -> None:
    fastgraph.disable()
    offer = sampling._Sampling()
    offer.ask("program", True)
    offer.ask("switch", True)
    offer.ask("switch", False)
    assert offer.is_in_place() and torch_geometric.typing.WITH_PYG_LIB
    offer.ask("program", False)
    assert not offer.is_in_place() and not torch_geometric.typing.WITH_PYG_LIB


def test_other_samplers_are_left_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fastgraph.disable()
    monkeypatch.setattr(torch_geometric.typing, "WITH_TORCH_SPARSE", True)
    before = NeighborSampler._sample
    offer = sampling._Sampling()
    offer.ask("switch", True)
    assert not offer.is_in_place() and NeighborSampler._sample is before
    offer.ask("program", True, even_beside_others=True)
    assert offer.is_in_place() and NeighborSampler._sample is not before
    offer.ask("switch", False)
    assert offer.is_in_place()
    offer.ask("program", False)
    assert NeighborSampler._sample is before


def test_layers_of_many_types_keep_their_own_products() -> None:
    torch.manual_seed(0)
    layer = ToHeteroLinear(torch.nn.Linear(4, 3), ["a", "b"])
    x = {"a": torch.rand(5, 4), "b": torch.rand(2, 4)}
    ours = layer.dict_forward(x)
    fastgraph.disable()
    for kind, plain in layer.dict_forward(x).items():
        assert torch.equal(ours[kind], plain)
