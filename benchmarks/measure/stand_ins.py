"""Datasets for PyG's examples where the real ones are not: small graphs of the same form.

Citation graphs are the real ones, copied from the folder that ``FASTGRAPH_DATA`` names. All others
are drawn at random: who trains on them learns nothing, but calls the same operations on tensors of
the same names, types and dimensions.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch_geometric import datasets
from torch_geometric.data import Data, Dataset, HeteroData

CITATIONS = "EXAMPLES_CITATIONS"
"""The variable that names the folder of citation graphs, which must be one to write to."""

_UpstreamPlanetoid = datasets.Planetoid
_SPLITS = ("train_mask", "val_mask", "test_mask")


def _graph(**values: Any) -> Data:
    """A graph that PyG makes, as those of its datasets."""
    data: Data = Data.from_dict(values)
    return data


class Citations(_UpstreamPlanetoid):
    """``Planetoid`` wherever a script expects its files."""

    def __init__(self, root: Any, name: str, *args: Any, **options: Any) -> None:
        super().__init__(os.environ[CITATIONS], name, *args, **options)


class ManyMasks(Citations):
    """``WikipediaNetwork``: ten splits in the columns of the masks."""

    def __init__(self, root: Any, name: str, transform: Any = None, **options: Any) -> None:
        super().__init__(root, "Cora", transform=transform)

    def get(self, index: int) -> Data:
        data = super().get(index)
        for key in _SPLITS:
            data[key] = torch.stack([data[key].roll(7 * k) for k in range(10)], 1)
        return data


class Drawn(Dataset):  # type: ignore[misc]
    """A dataset that is drawn at random, and is the same each time."""

    num_graphs = 1

    def __init__(self, root: Any = None, *args: Any, transform: Any = None, **options: Any) -> None:
        super().__init__(None, transform)
        self.generator = torch.Generator().manual_seed(0)
        self.graphs = [self.graph() for _ in range(self.num_graphs)]

    def graph(self) -> Any:
        raise NotImplementedError

    def len(self) -> int:
        return len(self.graphs)

    def get(self, index: int) -> Any:
        return self.graphs[index].clone()

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator)

    def features(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator)

    def edges(self, sources: int, destinations: int, count: int) -> Tensor:
        """No edge twice: for those, MKL's products of sparse matrices end by faults in memory."""
        pairs = torch.randperm(sources * destinations, generator=self.generator)[:count]
        return torch.stack([pairs // destinations, pairs % destinations])

    def masks(self, n: int) -> dict[str, Tensor]:
        split = self.integers(4, n)
        return {key: split == i for i, key in enumerate(_SPLITS)}


class Penn94(Drawn):
    """``LINKXDataset``: five splits in the columns of the masks."""

    def graph(self) -> Data:
        n = 2000
        splits = [self.masks(n) for _ in range(5)]
        masks = {key: torch.stack([split[key] for split in splits], 1) for key in _SPLITS}
        edges = self.edges(n, n, 16_000)
        return _graph(
            x=self.features(n, 60),
            y=self.integers(2, n),
            edge_index=torch.cat([edges, edges.flip(0)], 1),
            **masks,
        )


class Relations(Drawn):
    """``Entities``: no features, but types of edges, and labels of a few nodes."""

    num_relations = 20
    num_classes = 4

    def graph(self) -> Data:
        n, m, labelled = 3000, 6000, 170
        edges, kinds = self.edges(n, n, m), self.integers(self.num_relations // 2, m)
        chosen = torch.randperm(n, generator=self.generator)[:labelled]
        return _graph(
            edge_index=torch.cat([edges, edges.flip(0)], 1),
            edge_type=torch.cat([2 * kinds, 2 * kinds + 1]),
            train_idx=chosen[:140],
            train_y=self.integers(4, 140),
            test_idx=chosen[140:],
            test_y=self.integers(4, labelled - 140),
            num_nodes=n,
        )


class Trust(Drawn):
    """``BitcoinOTC``: graphs of several times, whose edges are good or bad."""

    num_graphs = 12

    def graph(self) -> Data:
        n, m = 1200, 400
        rating = self.integers(20, m) - 9
        return _graph(edge_index=self.edges(n, n, m), edge_attr=rating, num_nodes=n)


class Papers(Drawn):
    """``DBLP``: conferences have no features."""

    def graph(self) -> HeteroData:
        sizes = {"author": 1500, "paper": 2000, "term": 900, "conference": 20}
        data = HeteroData()
        data["author"].update(
            x=self.features(1500, 30), y=self.integers(4, 1500), **self.masks(1500)
        )
        data["paper"].x = self.features(2000, 40)
        data["term"].x = self.features(900, 20)
        data["conference"].num_nodes = 20
        for other, count in (("author", 4000), ("term", 8000), ("conference", 2000)):
            index = self.edges(sizes["paper"], sizes[other], count)
            data["paper", "to", other].edge_index = index
            data[other, "to", "paper"].edge_index = index.flip(0)
        return data


class Movies(Drawn):
    """``IMDB``."""

    def graph(self) -> HeteroData:
        sizes = {"movie": 1500, "director": 700, "actor": 1800}
        data = HeteroData()
        for key, n in sizes.items():
            data[key].x = self.features(n, 50)
        data["movie"].update(y=self.integers(3, 1500), **self.masks(1500))
        for other, count in (("director", 1500), ("actor", 4500)):
            index = self.edges(sizes["movie"], sizes[other], count)
            data["movie", "to", other].edge_index = index
            data[other, "to", "movie"].edge_index = index.flip(0)
        return data


class Ratings(Drawn):
    """``MovieLens``: users have no features, edges have labels."""

    def graph(self) -> HeteroData:
        data = HeteroData()
        data["movie"].x = self.features(1300, 40)
        data["user"].num_nodes = 300
        kind = ("user", "rates", "movie")
        data[kind].edge_index = self.edges(300, 1300, 9000)
        data[kind].edge_label = self.integers(6, 9000)
        return data


class Purchases(Drawn):
    """``AmazonBook``: who bought what, and has bought later."""

    def graph(self) -> HeteroData:
        data = HeteroData()
        data["user"].num_nodes, data["book"].num_nodes = 700, 1100
        kind = ("user", "rates", "book")
        data[kind].edge_index = edges = self.edges(700, 1100, 12_000)
        data[kind].edge_label_index = self.edges(700, 1100, 2000)
        data["book", "rated_by", "user"].edge_index = edges.flip(0)
        return data


class OneColumnOfLabels(Citations):
    """Graphs of OGB: labels are a column, splits are indices."""

    def __init__(self, name: str, root: Any = None, transform: Any = None, **options: Any) -> None:
        super().__init__(root, "Cora", transform=transform)

    def get(self, index: int) -> Data:
        data = super().get(index)
        for key in _SPLITS:
            del data[key]
        data.y = data.y.view(-1, 1)
        return data

    def get_idx_split(self) -> dict[str, Tensor]:
        data = super().get(0)
        names = zip(("train", "valid", "test"), _SPLITS, strict=True)
        return {name: data[key].nonzero().view(-1) for name, key in names}


class Accuracy:
    """The evaluator of OGB's graphs of one label for each node."""

    def __init__(self, name: str) -> None:
        pass

    def eval(self, given: dict[str, Tensor]) -> dict[str, float]:
        return {"acc": float((given["y_true"] == given["y_pred"]).double().mean())}


def install() -> None:
    """Have scripts import these."""
    replaced = {
        "Planetoid": Citations,
        "WikipediaNetwork": ManyMasks,
        "LINKXDataset": Penn94,
        "Entities": Relations,
        "BitcoinOTC": Trust,
        "DBLP": Papers,
        "IMDB": Movies,
        "MovieLens": Ratings,
        "AmazonBook": Purchases,
    }
    for name, dataset in replaced.items():
        setattr(datasets, name, dataset)
    package, module = ModuleType("ogb"), ModuleType("ogb.nodeproppred")
    module.PygNodePropPredDataset = OneColumnOfLabels  # type: ignore[attr-defined]
    module.Evaluator = Accuracy  # type: ignore[attr-defined]
    sys.modules.update({"ogb": package, "ogb.nodeproppred": module})
