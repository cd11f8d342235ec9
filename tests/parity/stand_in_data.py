"""Random graphs in place of the data sets of PyG's examples, which are gigabytes of downloads.

Each has the attributes by which the examples know it, with labels that follow from the features,
so that what is learnt can be seen, and is made when the module that has it is imported.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData, InMemoryDataset
from torch_geometric.utils import index_to_mask, to_undirected
from wrapt import register_post_import_hook

_FEATURES = 32


class StandIn(InMemoryDataset):
    """Graphs that are made rather than downloaded; ``root`` and other arguments are of no use."""

    def __init__(
        self, graphs: Sequence[Any], transform: Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__(tempfile.mkdtemp(), transform)
        Path(self.processed_dir).mkdir()
        self.data, self.slices = self.collate(list(graphs))

    @property
    def num_classes(self) -> int:
        """Of the nodes that have labels, or how many labels a node has."""
        store = next(store for store in self._data.node_stores if "y" in store)
        return store.y.shape[1] if store.y.is_floating_point() else int(store.y.max()) + 1


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(sum(name.encode()))


def _labelled(name: str, nodes: int, classes: int) -> tuple[Tensor, Tensor]:
    generator = _generator(name)
    x = torch.randn(nodes, _FEATURES, generator=generator)
    return x, (x @ torch.randn(_FEATURES, classes, generator=generator)).argmax(1)


def _edges(name: str, sources: int, targets: int, edges: int) -> Tensor:
    """Of which a tenth leads to one in a hundred nodes, and some nodes have none."""
    generator = _generator(name)
    ends = torch.rand(2, edges, generator=generator) * 0.98
    ends[1, : edges // 10] *= 0.01
    return (ends * torch.tensor([[sources], [targets]])).long()


def graph(name: str, nodes: int, edges: int, classes: int, parts: Sequence[float]) -> Data:
    """One graph with masks of nodes to train, validate and test on, the rest of which are last."""
    x, y = _labelled(name, nodes, classes)
    data = Data(
        x=x, edge_index=to_undirected(_edges(name, nodes, nodes, edges), num_nodes=nodes), y=y
    )
    order = torch.randperm(nodes, generator=_generator(name))
    first = int(parts[0] * nodes)
    last = first + int(parts[1] * nodes)
    for kind, chosen in zip(
        ("train", "val", "test"), order.tensor_split([first, last]), strict=True
    ):
        data[f"{kind}_mask"] = index_to_mask(chosen, nodes)
    return data


def single(name: str, *shape: Any) -> Callable[..., StandIn]:
    """A data set of one graph."""

    def made(*args: Any, transform: Callable[[Any], Any] | None = None, **kwargs: Any) -> StandIn:
        return StandIn([graph(name, *shape)], transform)

    return made


def ppi(root: str, split: str = "train", **kwargs: Any) -> StandIn:
    """Graphs whose nodes have several labels."""
    graphs = []
    for number in range({"train": 4, "val": 2, "test": 2}[split]):
        data = graph(f"{split}{number}", 100, 500, 5, (0.5, 0.25))
        data.y = (data.x[:, :5] > 0).float()
        graphs.append(Data(x=data.x, edge_index=data.edge_index, y=data.y))
    return StandIn(graphs)


def mag(root: str, preprocess: str | None = None, transform: Any = None, **kwargs: Any) -> StandIn:
    """Papers, authors, institutions and fields of study."""
    sizes = {"paper": 600, "author": 500, "institution": 40, "field_of_study": 100}
    data = HeteroData()
    for name, nodes in sizes.items():
        data[name].x, y = _labelled(name, nodes, 7)
        if name == "paper":
            data[name].y, data[name].year = y, torch.arange(nodes) % 10 + 2010
            for number, kind in enumerate(("train", "val", "test")):
                data[name][f"{kind}_mask"] = torch.arange(nodes) % 3 == number
    relations = {
        ("author", "affiliated_with", "institution"): 1200,
        ("author", "writes", "paper"): 4000,
        ("paper", "cites", "paper"): 4000,
        ("paper", "has_topic", "field_of_study"): 5000,
    }
    for relation, edges in relations.items():
        source, name, target = relation
        data[relation].edge_index = _edges(name, sizes[source], sizes[target], edges)
    return StandIn([data], transform)


class NodePropPred(StandIn):
    """In place of ``PygNodePropPredDataset``: all nodes have a part."""

    def __init__(self, name: str, root: str = "", transform: Any = None, **kwargs: Any) -> None:
        data = graph(name, 1000, 5000, 7, (0.5, 0.25))
        masks = [data[f"{kind}_mask"] for kind in ("train", "val", "test")]
        self._parts = [mask.nonzero().view(-1) for mask in masks]
        super().__init__([Data(x=data.x, edge_index=data.edge_index, y=data.y[:, None])], transform)

    def get_idx_split(self) -> dict[str, Tensor]:
        """The nodes of each part."""
        return dict(zip(("train", "valid", "test"), self._parts, strict=True))


class Evaluator:
    """In place of that of ``ogb``: the accuracy."""

    def __init__(self, name: str) -> None:
        self.name = name

    def eval(self, given: dict[str, Tensor]) -> dict[str, float]:
        """The share of right labels."""
        return {"acc": (given["y_true"] == given["y_pred"]).double().mean().item()}


_MADE = {
    "Reddit": single("Reddit", 1000, 8000, 7, (0.6, 0.2)),
    "Flickr": single("Flickr", 400, 2000, 7, (0.5, 0.25)),
    "Planetoid": single("Cora", 500, 2000, 7, (0.2, 0.3)),
    "PPI": ppi,
    "OGB_MAG": mag,
}


def install() -> None:
    """Put them in place of PyG's data sets and of the package ``ogb``."""

    def replace(datasets: ModuleType) -> None:
        for name, made in _MADE.items():
            setattr(datasets, name, made)

    register_post_import_hook(replace, "torch_geometric.datasets")
    package, module = ModuleType("ogb"), ModuleType("ogb.nodeproppred")
    module.PygNodePropPredDataset, module.Evaluator = NodePropPred, Evaluator  # type: ignore[attr-defined]
    sys.modules |= {"ogb": package, "ogb.nodeproppred": module}
