"""The graphs of the examples of LargeGT: real ones in a folder, and one that is generated."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

BINARY = ("tolokers", "minesweeper")
NAMES = ("generated", *BINARY, "wordnet", "debian")


class LabelledGraph(NamedTuple):
    """A graph for node classification.

    Attributes:
        edge_index: int64 ``[2, E]``, both directions of each edge, once.
        x: float32 ``[nodes, channels]``.
        y: int64 ``[nodes]``.
        split: int8 ``[nodes]``: 0 for training, 1 for validation, 2 for the test.
    """

    edge_index: Tensor
    x: Tensor
    y: Tensor
    split: Tensor


def load(name: str, seed: int = 0) -> LabelledGraph:
    """The graph of a name.

    Graphs but the generated one are in the folder that ``FASTGRAPH_DATA`` names. The two of
    ``HeterophilousGraphDataset`` have splits of their own, of which ``seed`` chooses one of ten;
    nodes of others are split at random, 50/25/25.
    """
    if name == "generated":
        return generated(seed=seed)
    if "FASTGRAPH_DATA" not in os.environ:
        raise SystemExit(f"{name}: expected FASTGRAPH_DATA to name the folder of graphs")
    root = Path(os.environ["FASTGRAPH_DATA"])
    if name in BINARY:
        file = root / "HeterophilousGraphDataset" / name / "raw" / f"{name}.npz"
        with np.load(file) as arrays:
            index, x, y = arrays["edges"].T, arrays["node_features"], arrays["node_labels"]
            split = 2 - 2 * arrays["train_masks"][seed % 10] - arrays["val_masks"][seed % 10]
    else:
        with np.load(root / f"{name}.npz") as arrays:
            index, x, y = arrays["edge_index"], arrays["x"], arrays["y"]
        split = random_split(len(y), seed).numpy()
    return LabelledGraph(
        both_directions(torch.from_numpy(index.astype(np.int64))),
        torch.from_numpy(x.astype(np.float32)),
        torch.from_numpy(y.astype(np.int64)),
        torch.from_numpy(split.astype(np.int8)),
    )


def generated(num_nodes: int = 2000, num_classes: int = 4, seed: int = 0) -> LabelledGraph:
    """Classes of which most edges keep to themselves, and features that say little."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(num_classes, (num_nodes,), generator=draw)
    source = torch.randint(num_nodes, (5 * num_nodes,), generator=draw)
    # Every second edge leads to a node of the same class, the others anywhere.
    others = torch.randint(num_nodes, (8, len(source)), generator=draw)
    same = y[others] == y[source]
    place = torch.where(torch.rand(len(source), generator=draw) < 0.5, same.int().argmax(0), 0)
    target = others.gather(0, place.unsqueeze(0)).squeeze(0)
    noise = torch.randn(num_nodes, 16, generator=draw)
    x = noise + torch.randn(num_classes, 16, generator=draw)[y] * 0.5
    index = both_directions(torch.stack([source, target]))
    return LabelledGraph(index, x, y, random_split(num_nodes, seed))


def random_split(num_nodes: int, seed: int) -> Tensor:
    order = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(seed))
    split = torch.empty(num_nodes, dtype=torch.int8)
    split[order] = (torch.arange(num_nodes) * 4 // num_nodes - 1).clamp(min=0).to(torch.int8)
    return split


def both_directions(index: Tensor) -> Tensor:
    return torch.cat([index, index.flip(0)], dim=1).unique(dim=1)
