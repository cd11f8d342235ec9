"""Options of PyG's loaders in combinations, each batch beside the definition of its sample."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import (
    GraphSAINTEdgeSampler,
    GraphSAINTNodeSampler,
    GraphSAINTRandomWalkSampler,
    HGTLoader,
    LinkNeighborLoader,
    NeighborLoader,
    ShaDowKHopSampler,
)
from torch_geometric.loader import NeighborSampler as SamplerByLayer

from fastgraph.pyg.sampling_functions import hetero_neighbor_sample
from fastgraph.sampling import HeteroNeighborSample
from tests.pyg.mini_batches import WITHOUT_SAMPLER
from tests.sampling.oracle import EDGE, NODE, Call, Columns, check

pytestmark = [WITHOUT_SAMPLER, pytest.mark.usefixtures("sampling_enabled")]

SIZES = {"a": 25, "b": 12, "c": 3}
RELATIONS = {
    ("a", "to", "a"): 90,
    ("b", "to", "a"): 60,
    ("a", "of", "b"): 70,
    ("b", "to", "b"): 0,
    ("c", "to", "a"): 20,  # to which nothing leads
}


def _edges(relation: Any, size: int, dtype: torch.dtype, generator: torch.Generator) -> Any:
    ends = [torch.randint(SIZES[relation[i]], (size,), generator=generator) for i in (0, 2)]
    return {
        "edge_index": torch.stack(ends).to(dtype),
        "edge_attr": torch.arange(size),
        "edge_time": torch.randint(5, (size,), generator=generator),  # with ties
        "weight": torch.randint(3, (size,), generator=generator).float(),  # a third are zeros
    }


def graph(typed: bool, dtype: torch.dtype) -> Any:
    generator = torch.Generator().manual_seed(4)
    nodes = {
        kind: {"x": torch.arange(size), "time": torch.randint(5, (size,), generator=generator)}
        for kind, size in SIZES.items()
    }
    if not typed:
        return Data(**nodes["a"], **_edges(("a", "to", "a"), 90, dtype, generator))
    data: dict[Any, Any] = dict(nodes)
    for relation, size in RELATIONS.items():
        data[relation] = _edges(relation, size, dtype, generator)
    return HeteroData(data)


def _call(loader: Any, data: Any, seed: Tensor, until: Tensor | None) -> tuple[Call, Any]:
    """The call that makes a batch, and the places of edges by their numbers in the data."""
    sampler, typed = loader.node_sampler, isinstance(data, HeteroData)
    columns, fanouts, places = {}, {}, {}
    for kind in data.edge_types if typed else [EDGE]:
        name = "__".join(kind)

        def of_type(values: Any, key: Any) -> Any:
            return values[key] if typed and values is not None else values

        colptr, row = of_type(sampler.colptr_dict, name) if typed else sampler.colptr, None
        row = of_type(sampler.row_dict, name) if typed else sampler.row
        permutation = of_type(sampler.perm, kind)
        store = data[kind] if typed else data
        columns[kind] = Columns(
            colptr,
            row,
            store.weight[permutation] if sampler.edge_weight is not None else None,
            store.edge_time[permutation] if sampler.edge_time is not None else None,
        )
        ends = torch.stack([row, columns[kind].dst.to(row.dtype)])
        assert torch.equal(store.edge_index[:, permutation], ends)
        counts = sampler.num_neighbors
        fanouts[kind] = (
            counts.get_mapped_values(data.edge_types)[name] if typed else counts.get_mapped_values()
        )
        places[kind] = permutation.argsort()
    call = Call(
        columns,
        {loader.input_data.input_type or NODE: seed},
        fanouts,
        replace=sampler.replace,
        disjoint=sampler.disjoint,
        temporal_strategy=sampler.temporal_strategy,
    )
    if sampler.node_time is not None:
        call.node_time = dict(sampler.node_time) if typed else {NODE: sampler.node_time}
    if until is not None:
        call.seed_time = {loader.input_data.input_type or NODE: until}
    return call, places


def _sample(batch: Any, places: Any) -> HeteroNeighborSample:
    """The batch as a sample."""
    typed = isinstance(batch, HeteroData)
    nodes = {kind: batch[kind] for kind in batch.node_types} if typed else {NODE: batch}
    edges = {kind: batch[kind] for kind in batch.edge_types} if typed else {EDGE: batch}
    return HeteroNeighborSample(
        {kind: store.edge_index[0] for kind, store in edges.items()},
        {kind: store.edge_index[1] for kind, store in edges.items()},
        {kind: store.n_id for kind, store in nodes.items()},
        {kind: places[kind][store.e_id] for kind, store in edges.items()},
        {kind: store.batch for kind, store in nodes.items()} if "batch" in batch else None,
        {kind: store.num_sampled_nodes for kind, store in nodes.items()},
        {kind: store.num_sampled_edges for kind, store in edges.items()},
    )


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("time", [None, "time", "edge_time"])
@pytest.mark.parametrize("weight", [None, "weight"])
def test_a_batch_is_what_the_definition_allows(
    typed: bool, dtype: torch.dtype, time: str | None, weight: str | None
) -> None:
    data = graph(typed, dtype)
    seed, until = torch.tensor([3, 0, 24, 7, 3, 11]), torch.tensor([4, 0, 2, 9, 1, -1])
    for replace, disjoint, last in itertools.product((False, True), repeat=3):
        for fanouts in ([-1, 2], [2, 0, 40]):
            by_type: Any = fanouts
            if typed and replace:
                by_type = dict.fromkeys(RELATIONS, fanouts)
                by_type["a", "to", "a"] = fanouts[::-1]
            loader = NeighborLoader(
                data,
                by_type,
                input_nodes=("a", seed) if typed else seed,
                input_time=until if time == "edge_time" else None,
                batch_size=4,
                replace=replace,
                disjoint=disjoint,
                time_attr=time,
                weight_attr=weight,
                temporal_strategy="last" if last else "uniform",
            )
            times = until if time == "edge_time" else None
            for batch, ours in zip(loader, (slice(0, 4), slice(4, 6)), strict=True):
                own = None if times is None else times[ours]
                call, places = _call(loader, data, seed[ours], own)
                check(call, _sample(batch, places))
                stores = zip(batch.stores, data.stores, strict=True)
                for store, whole in stores:
                    if "x" in store:
                        assert torch.equal(store.x, whole.x[store.n_id.long()])
                    if "edge_attr" in store:
                        assert torch.equal(store.edge_attr, store.e_id)


LOADERS: dict[str, Callable[[Data], Any]] = {
    "neighbours": lambda data: NeighborLoader(data, [3, 2], batch_size=50),
    "induced": lambda data: NeighborLoader(data, [3], batch_size=50, subgraph_type="induced"),
    "disjoint": lambda data: NeighborLoader(data, [3, 2], batch_size=50, disjoint=True),
    "links": lambda data: LinkNeighborLoader(data, [3], batch_size=90, neg_sampling="binary"),
    "triplets": lambda data: LinkNeighborLoader(data, [3], batch_size=90, neg_sampling="triplet"),
    "budgets": lambda data: HGTLoader(
        _as_typed(data), [40], ("a", torch.arange(50)), batch_size=50
    ),
    "shadow": lambda data: ShaDowKHopSampler(data, 2, 3, torch.arange(50), batch_size=50),
    "walks": lambda data: GraphSAINTRandomWalkSampler(data, 400, 2),
    "drawn edges": lambda data: GraphSAINTEdgeSampler(data, 300),
    "drawn nodes": lambda data: GraphSAINTNodeSampler(data, 300),
    "by layer": lambda data: SamplerByLayer(
        data.edge_index, [3, 2], torch.arange(50), num_nodes=data.num_nodes, batch_size=50
    ),
}


def _as_typed(data: Data) -> HeteroData:
    index, attr = data.edge_index, data.edge_attr
    return HeteroData(
        {"a": {"x": data.x}, ("a", "to", "a"): {"edge_index": index, "edge_attr": attr}}
    )


@pytest.mark.parametrize("name", LOADERS)
def test_nodes_of_32_bits_give_the_batches_of_64(name: str) -> None:
    """The number of pairs of nodes has more bits."""
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(70_000, (2, 900), generator=generator)
    index[1, :400] %= 50
    found = []
    for dtype in (torch.int64, torch.int32):
        data = Data(x=torch.arange(70_000), edge_index=index.to(dtype), edge_attr=torch.arange(900))
        torch.manual_seed(0)
        batch = next(iter(LOADERS[name](data)))
        if name == "by layer":
            found.append([batch[1].tolist(), *(part.edge_index.tolist() for part in batch[2])])
            sources, targets = batch[1][batch[2][0].edge_index.long()].long()
            assert torch.equal(torch.stack([sources, targets]), index[:, batch[2][0].e_id])
        else:
            edges, nodes = (
                next(s for s in batch.stores[::-1] if k in s) for k in ("edge_attr", "x")
            )
            found.append([nodes.x.tolist(), edges.edge_index.tolist(), edges.edge_attr.tolist()])
            assert edges.edge_attr.numel() > 0
            assert torch.equal(nodes.x[edges.edge_index.long()], index[:, edges.edge_attr])
    assert found[0] == found[1]


def test_samples_do_not_depend_on_the_order_in_which_types_are_named() -> None:
    """PyG has those of a store from a set, whose order differs from process to process."""
    data = graph(True, torch.int64)
    sampler = NeighborLoader(data, [2], input_nodes="a").node_sampler
    found = []
    for types in (data.edge_types, data.edge_types[::-1]):
        torch.manual_seed(0)
        out = hetero_neighbor_sample(
            data.node_types,
            types,
            sampler.colptr_dict,
            sampler.row_dict,
            {"a": torch.arange(9)},
            {"__".join(kind): [2, 2] for kind in types},
            csc=True,
        )
        found.append([{key: values.tolist() for key, values in part.items()} for part in out[:4]])
    assert found[0] == found[1]
