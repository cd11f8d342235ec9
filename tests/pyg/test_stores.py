"""PyG's loaders from stores of features and of graphs, in workers, and beside other data sets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader, LinkNeighborLoader, NeighborLoader
from torch_geometric.sampler import NodeSamplerInput
from torch_geometric.testing.feature_store import MyFeatureStore
from torch_geometric.testing.graph_store import MyGraphStore

from tests.pyg.mini_batches import WITHOUT_SAMPLER, graph, hetero

pytestmark = [WITHOUT_SAMPLER, pytest.mark.usefixtures("sampling_enabled")]


def stores(layout: str) -> tuple[MyFeatureStore, MyGraphStore]:
    """The graph of :func:`hetero` in stores."""
    data, features, graphs = hetero(), MyFeatureStore(), MyGraphStore()
    for kind in data.node_types:
        features.put_tensor(data[kind].x, group_name=kind, attr_name="x", index=None)
    for kind in data.edge_types:
        index, size = data[kind].edge_index, (data[kind[0]].num_nodes, data[kind[2]].num_nodes)
        if layout == "csc":
            index = index[:, index[1].argsort(stable=True)]
            ptr = torch.bincount(index[1], minlength=size[1]).cumsum(0)
            value = (index[0], torch.cat([ptr.new_zeros(1), ptr]))
        else:
            value = (index[0], index[1])
        graphs.put_edge_index(
            value, edge_type=kind, layout=layout, size=size, is_sorted=layout == "csc"
        )
    return features, graphs


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("layout", ["coo", "csc"])
def test_batches_from_stores_are_those_of_data(layout: str, workers: int) -> None:
    """Those with all neighbours: which ones are drawn depends on the order of a node's edges."""

    def batches(data: Any, **options: Any) -> list[Any]:
        loader = NeighborLoader(data, [-1, -1], input_nodes=("paper", torch.arange(30)), **options)
        found = []
        for batch in loader:
            n_id = {kind: batch[kind].n_id for kind in batch.node_types}
            for kind in n_id:
                assert batch[kind].x.tolist() == n_id[kind].tolist()
            edges = [
                sorted(zip(n_id[a][e[0]].tolist(), n_id[b][e[1]].tolist(), strict=True))
                for (a, _, b), e in batch.edge_index_dict.items()
            ]
            found.append(([sorted(ids.tolist()) for ids in n_id.values()], edges))
        return found

    options = {"batch_size": 3, "num_workers": workers}
    assert batches(stores(layout), **options) == batches(hetero(), **options)


@pytest.mark.parametrize("per_worker", [False, True])
def test_batches_are_the_same_wherever_they_are_filtered(per_worker: bool) -> None:
    def batches(**options: Any) -> list[Any]:
        torch.manual_seed(0)
        loader = NeighborLoader(graph(), [3, 2], batch_size=13, shuffle=True, **options)
        return [(b.n_id.tolist(), b.x.tolist(), b.edge_attr.tolist()) for b in loader]

    found = batches(filter_per_worker=per_worker, num_workers=2)
    assert found == batches()
    assert found == batches(filter_per_worker=per_worker)


class _Graphs(IterableDataset[Data]):
    """Graphs around nodes, sampled as they are asked for."""

    def __init__(self, loader: NeighborLoader) -> None:
        self._sampler = loader.node_sampler

    def __iter__(self) -> Iterator[Data]:
        for node in range(6):
            out = self._sampler.sample_from_nodes(NodeSamplerInput(None, torch.tensor([node])))
            yield Data(
                num_nodes=len(out.node), n_id=out.node, edge_index=torch.stack([out.row, out.col])
            )


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_that_is_iterated_may_sample(workers: int) -> None:
    data = graph()
    torch.manual_seed(0)
    loader = DataLoader(_Graphs(NeighborLoader(data, [3])), batch_size=3, num_workers=workers)
    edges = set(zip(*data.edge_index.tolist(), strict=True))
    batches = list(loader)
    assert len(batches) == 2
    for batch in batches:
        source, target = batch.n_id[batch.edge_index].tolist()
        assert len(source) > 0
        assert set(zip(source, target, strict=True)) <= edges


def test_links_from_a_store_have_their_negatives() -> None:
    features, graphs = stores("coo")
    kind = ("author", "writes", "paper")
    links = torch.tensor([[0, 1, 2], [3, 4, 5]])
    loader = LinkNeighborLoader(
        (features, graphs), [2], edge_label_index=(kind, links), neg_sampling="binary"
    )
    for batch in loader:
        assert batch[kind].edge_label.tolist() == [1, 0]
        ends = batch[kind].edge_label_index
        link = batch["author"].n_id[ends[0, 0]], batch["paper"].n_id[ends[1, 0]]
        assert list(map(int, link)) in links.t().tolist()
