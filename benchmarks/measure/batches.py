"""Loaders and models that ``mini_batches.py`` measures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import DataLoader, NeighborLoader
from torch_geometric.nn import (
    GAT,
    PNA,
    GraphSAGE,
    HeteroConv,
    MessagePassing,
    SAGEConv,
    global_mean_pool,
    to_hetero,
)
from torch_geometric.utils import degree

from measure.graphs import load

FANOUTS = (15, 10)
BATCH = 1024
FEATURES = 128
CLASSES = 8

MODELS = ("SAGE mean", "SAGE max", "GAT", "GATv2", "PNA", "HeteroConv of SAGE")
SOURCES = ("tolokers", "wordnet", "sparse", "hetero", "molecules")
TRIMMED = ("tolokers", "wordnet", "sparse")
"""Sources whose samples can be trimmed to what a layer needs."""

Step = Callable[[nn.Module, Any], Tensor]
"""The loss of a batch."""


def _edges(name: str) -> tuple[Tensor, int]:
    if name == "sparse":
        return torch.randint(38_000, (2, 190_000)), 38_000
    graph = load(name)
    return graph.edge_index, graph.num_nodes


def loader_of(name: str, num_batches: int) -> Any:
    """Batches of a source."""
    torch.manual_seed(0)
    if name == "molecules":
        graphs = [_molecule() for _ in range(128 * num_batches)]
        return DataLoader(graphs, batch_size=128, shuffle=True)
    if name == "hetero":
        data, kind = hetero_data(), "paper"
        seeds = (kind, torch.randperm(data[kind].num_nodes)[: BATCH * num_batches])
    else:
        edge_index, num_nodes = _edges(name)
        data = Data(
            x=torch.randn(num_nodes, FEATURES),
            y=torch.randint(CLASSES, (num_nodes,)),
            edge_index=edge_index,
        )
        seeds = torch.randperm(num_nodes)[: BATCH * num_batches]
    return NeighborLoader(data, list(FANOUTS), input_nodes=seeds, batch_size=BATCH, shuffle=True)


def hetero_data() -> HeteroData:
    """Papers, authors and institutions."""
    data = HeteroData()
    sizes = {"paper": 30_000, "author": 40_000, "institution": 2_000}
    for kind, size in sizes.items():
        data[kind].x = torch.randn(size, FEATURES)
        data[kind].y = torch.randint(CLASSES, (size,))
    counts = {
        ("author", "writes", "paper"): 120_000,
        ("paper", "cites", "paper"): 200_000,
        ("author", "at", "institution"): 50_000,
    }
    for (source, name, target), count in counts.items():
        ends = [torch.randint(sizes[kind], (count,)) for kind in (source, target)]
        data[source, name, target].edge_index = torch.stack(ends)
        data[target, f"rev_{name}", source].edge_index = torch.stack(ends[::-1])
    return data


def _molecule() -> Data:
    """A random tree with some rings, both directions of each bond."""
    size = int(torch.randint(12, 36, ()))
    parents = (torch.rand(size - 1) * torch.arange(1, size)).long()
    bonds = torch.stack([torch.arange(1, size), parents])
    rings = torch.randint(size, (2, size // 8))
    bonds = torch.cat([bonds, rings], dim=1)
    edge_index = torch.cat([bonds, bonds.flip(0)], dim=1)
    return Data(
        x=torch.randn(size, FEATURES), edge_index=edge_index, y=torch.randint(CLASSES, (1,))
    )


def model(kind: str, source: str, loader: Any) -> nn.Module:
    """Two layers of a kind, or three for molecules, over all types of edges."""
    if kind == "HeteroConv of SAGE":
        return _SumsOverTypes(loader.data.edge_types)
    name, _, aggregation = kind.partition(" ")
    is_hetero = source == "hetero"
    sizes = {
        "in_channels": FEATURES,
        "hidden_channels": FEATURES,
        "num_layers": 3 if source == "molecules" else len(FANOUTS),
        "out_channels": CLASSES,
    }
    network: nn.Module
    if name == "SAGE":
        network = GraphSAGE(**sizes, aggr=aggregation)
    elif name == "PNA":
        network = PNA(
            **sizes,
            aggregators=["mean", "min", "max", "std"],
            scalers=["identity", "amplification", "attenuation"],
            deg=_histogram(next(iter(loader))),
        )
    else:
        network = GAT(**sizes, heads=4, v2=name == "GATv2", add_self_loops=not is_hetero)
    return to_hetero(network, loader.data.metadata()) if is_hetero else network


class _SumsOverTypes(nn.Module):
    """Two layers of ``SAGEConv`` for each type of edges, which ``HeteroConv`` adds up."""

    def __init__(self, edge_types: list[tuple[str, str, str]]) -> None:
        super().__init__()
        sizes = (FEATURES, FEATURES), (FEATURES, CLASSES)
        self.layers = nn.ModuleList(
            HeteroConv({kind: SAGEConv((size, size), out) for kind in edge_types})
            for size, out in sizes
        )

    def forward(self, x_dict: Any, edge_index_dict: Any) -> Any:
        first, second = self.layers
        x_dict = {kind: x.relu() for kind, x in first(x_dict, edge_index_dict).items()}
        return second(x_dict, edge_index_dict)


def can_train(kind: str, source: str) -> bool:
    """False for PyG's ``PNAConv`` between two types of nodes, and ``HeteroConv`` of one type."""
    return kind != "PNA" if source == "hetero" else kind != "HeteroConv of SAGE"


def _histogram(batch: Any) -> Tensor:
    return torch.bincount(degree(batch.edge_index[1], batch.num_nodes, dtype=torch.long))


@contextmanager
def without_messages(network: nn.Module) -> Iterator[None]:
    """Within, layers of PyG pass on what nodes have themselves, for which nothing is computed.

    What remains is torch's: products, elementwise operations, the loss and their gradients. With
    messages passed in no time at all, a step would take as long, or longer where a product has
    lost its gradient, as one of both of GATv2's.
    """

    def own(edge_index: Any, x: Any, **_: Any) -> Tensor:
        sources, destinations = x
        return sources if destinations is None else destinations

    layers = [layer for layer in network.modules() if isinstance(layer, MessagePassing)]
    loops = [getattr(layer, "add_self_loops", None) for layer in layers]
    for layer in layers:
        if hasattr(layer, "add_self_loops"):
            layer.add_self_loops = False
        layer.propagate = own
        layer.edge_updater = lambda *args, **kwargs: None
    try:
        yield
    finally:
        for layer, adds in zip(layers, loops, strict=True):
            if adds is not None:
                layer.add_self_loops = adds
            del layer.propagate, layer.edge_updater


def can_do_without_messages(kind: str) -> bool:
    """False for ``PNA``, which multiplies several aggregates."""
    return kind != "PNA"


def whole(network: nn.Module, batch: Any) -> Tensor:
    """Of a sample, all of which every layer computes."""
    out = network(batch.x, batch.edge_index)[: batch.batch_size]
    return F.cross_entropy(out, batch.y[: batch.batch_size])


def trimmed(network: nn.Module, batch: Any) -> Tensor:
    """Of a sample, of which each layer computes what the next ones need."""
    out = network(
        batch.x,
        batch.edge_index,
        num_sampled_nodes_per_hop=batch.num_sampled_nodes,
        num_sampled_edges_per_hop=batch.num_sampled_edges,
    )[: batch.batch_size]
    return F.cross_entropy(out, batch.y[: batch.batch_size])


def hetero(network: nn.Module, batch: Any) -> Tensor:
    """Of papers."""
    size = batch["paper"].batch_size
    out = network(batch.x_dict, batch.edge_index_dict)["paper"][:size]
    return F.cross_entropy(out, batch["paper"].y[:size])


def molecules(network: nn.Module, batch: Any) -> Tensor:
    """Of graphs."""
    out = global_mean_pool(network(batch.x, batch.edge_index), batch.batch, batch.num_graphs)
    return F.cross_entropy(out, batch.y)


def ways(source: str) -> Iterator[tuple[str, Step]]:
    """The ways to train on batches of a source."""
    if source in TRIMMED:
        yield from (("whole", whole), ("trimmed", trimmed))
    else:
        yield ("", hetero if source == "hetero" else molecules)
