"""The graphs that are measured: real ones from ``FASTGRAPH_DATA``, generated ones without it."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

REAL = ("cora", "tolokers", "wordnet", "debian", "wing")
CLUSTERED = "-clusters"
"""Behind the name of a graph, with its nodes in the order of clusters."""
GENERATED = ("kronecker-11", "kronecker-14", "kronecker-16")

# Edges for each node, before self-loops and duplicates are dropped and the reverse is added.
_KRONECKER_EDGE_FACTOR = {11: 3, 14: 40, 16: 8}
_KRONECKER_QUADRANTS = (0.57, 0.19, 0.19, 0.05)


@dataclass(frozen=True)
class GraphData:
    """A directed multigraph in PyG's layout.

    ``edge_index`` is int64 ``[2, E]``, sources in row 0, destinations in row 1.
    """

    name: str
    edge_index: Tensor
    num_nodes: int

    @property
    def num_edges(self) -> int:
        return self.edge_index.shape[1]


def default_graphs() -> tuple[str, ...]:
    """The real graphs where ``FASTGRAPH_DATA`` names their folder, else the generated ones."""
    return REAL if os.environ.get("FASTGRAPH_DATA") else GENERATED


def load(name: str) -> GraphData:
    """Load or generate a graph.

    Raises:
        ValueError: an unknown name, or a real graph without ``FASTGRAPH_DATA``.
        FileNotFoundError: ``FASTGRAPH_DATA`` does not hold the graph.
        ModuleNotFoundError: ``pymetis`` is missing, which finds clusters.
    """
    if name.endswith(CLUSTERED):
        return clustered(load(name.removesuffix(CLUSTERED)))
    if name in GENERATED:
        return kronecker(int(name.removeprefix("kronecker-")))
    if name not in REAL:
        raise ValueError(f"graph must be one of {[*REAL, *GENERATED]}, got {name!r}")
    folder = os.environ.get("FASTGRAPH_DATA")
    if not folder:
        raise ValueError(f"graph {name!r} needs FASTGRAPH_DATA to name the folder of the data")
    root = Path(folder)
    if name in ("cora", "tolokers"):
        return _from_pyg(name, root)
    with np.load(root / f"{name}.npz") as arrays:
        edge_index = torch.from_numpy(arrays["edge_index"].astype(np.int64))
        num_nodes = int(arrays["num_nodes"] if "num_nodes" in arrays else arrays["x"].shape[0])
    if name != "wing":  # a mesh is stored in both directions already
        edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
    return GraphData(name, edge_index.contiguous(), num_nodes)


def clustered(graph: GraphData) -> GraphData:
    """The same graph, nodes of a cluster one after the other (:func:`fastgraph.reorder`)."""
    from torch_geometric.data import Data

    from fastgraph import reorder

    given = Data(edge_index=graph.edge_index, num_nodes=graph.num_nodes)
    name = graph.name + CLUSTERED
    return GraphData(name, reorder(given).data.edge_index, graph.num_nodes)


def communities(num_nodes: int, edges_of_node: int, size: int) -> GraphData:
    """Communities of ``size`` nodes, numbered at random; one edge in five leads anywhere.

    Each edge is there in both directions.
    """
    generator = torch.Generator().manual_seed(0)
    first = torch.arange(num_nodes).repeat(edges_of_node)
    near = first // size * size + torch.randint(size, first.shape, generator=generator)
    far = torch.randint(num_nodes, first.shape, generator=generator)
    is_near = torch.rand(first.shape, generator=generator) < 0.8
    second = torch.where(is_near, near.clamp(max=num_nodes - 1), far)
    ends = torch.randperm(num_nodes, generator=generator)[torch.stack([first, second])]
    return GraphData(f"communities of {size}", torch.cat([ends, ends.flip(0)], 1), num_nodes)


def mesh(side: int) -> GraphData:
    """A square of ``side`` times ``side`` nodes, each joined to the four beside it, in both
    directions, and numbered at random."""
    number = torch.randperm(side * side, generator=torch.Generator().manual_seed(0))
    square = number.view(side, side)
    ends = torch.cat(
        [
            torch.stack([square[:-1].flatten(), square[1:].flatten()]),
            torch.stack([square[:, :-1].flatten(), square[:, 1:].flatten()]),
        ],
        dim=1,
    )
    return GraphData(f"mesh of {side}", torch.cat([ends, ends.flip(0)], 1), side * side)


# Nodes and edges (both directions counted) of graphs whose size and skew are imitated.
SHAPES = {
    "like-ogbn-arxiv": (169_343, 2_332_486),
    "like-web-traffic": (2_890_331, 12_895_369),
    "like-ogbn-products": (2_449_029, 123_718_280),
}


def imitate(name: str, device: torch.device) -> GraphData:
    """A random graph with the size of a well-known one and R-MAT's skew, made on the device."""
    num_nodes, num_edges = SHAPES[name]
    generator = torch.Generator(device).manual_seed(0)
    ends = torch.zeros(2, num_edges // 2, dtype=torch.int64, device=device)
    thresholds = torch.tensor(_KRONECKER_QUADRANTS, device=device).cumsum(0)[:-1]
    for _ in range((num_nodes - 1).bit_length()):
        draw = torch.rand(num_edges // 2, generator=generator, device=device)
        quadrant = torch.bucketize(draw, thresholds)
        ends = 2 * ends + torch.stack([quadrant // 2, quadrant % 2])
    order = torch.randperm(num_nodes, generator=generator, device=device)
    ends = order[ends % num_nodes]
    return GraphData(name, torch.cat([ends, ends.flip(0)], dim=1), num_nodes)


def _from_pyg(name: str, root: Path) -> GraphData:
    from torch_geometric.datasets import HeterophilousGraphDataset, Planetoid

    # PyG writes what it derives beside the raw files, which may be shared and read-only.
    # It also announces its progress on stderr.
    with (
        tempfile.TemporaryDirectory(prefix="fastgraph-benchmark-") as copy,
        contextlib.redirect_stderr(io.StringIO()),
    ):
        if name == "cora":
            shutil.copytree(root / "Planetoid" / "Cora" / "raw", Path(copy) / "Cora" / "raw")
            data = Planetoid(copy, "Cora")[0]
        else:
            source = root / "HeterophilousGraphDataset" / "tolokers" / "raw"
            shutil.copytree(source, Path(copy) / "tolokers" / "raw")
            data = HeterophilousGraphDataset(copy, "Tolokers")[0]
        return GraphData(name, data.edge_index.clone(), int(data.num_nodes))


def kronecker(scale: int, seed: int = 0) -> GraphData:
    """A symmetric R-MAT graph of ``2 ** scale`` nodes: skewed degrees, shuffled node numbers."""
    generator = np.random.default_rng(seed)
    ends = _rmat(scale, 2**scale * _KRONECKER_EDGE_FACTOR.get(scale, 16), generator)
    ends = generator.permutation(2**scale)[ends]
    return _symmetric(f"kronecker-{scale}", ends, 2**scale)


def kronecker_of_density(scale: int, density: float, seed: int = 0) -> GraphData:
    """The same with edges between this share of all pairs of nodes."""
    generator = np.random.default_rng(seed)
    num_nodes = 2**scale
    wanted = round(density * num_nodes**2 / 2)
    keys = np.zeros(0, dtype=np.int64)
    while len(keys) < wanted:  # as the same pairs are drawn again and again
        low, high = np.sort(_rmat(scale, wanted, generator), axis=0)
        keys = np.unique(np.concatenate([keys, (low * num_nodes + high)[low < high]]))
    keys = generator.permutation(keys)[:wanted]
    ends = generator.permutation(num_nodes)[np.stack([keys // num_nodes, keys % num_nodes])]
    return _symmetric(f"kronecker-{scale} of density {density:g}", ends, num_nodes)


def _rmat(scale: int, num_edges: int, generator: np.random.Generator) -> np.ndarray:
    """The ends of edges ``[2, num_edges]``, with nodes in the order of R-MAT's quadrants."""
    ends = np.zeros((2, num_edges), dtype=np.int64)
    for _ in range(scale):
        quadrant = generator.choice(4, size=num_edges, p=_KRONECKER_QUADRANTS)
        ends = 2 * ends + np.stack([quadrant // 2, quadrant % 2])
    return ends


def _symmetric(name: str, ends: np.ndarray, num_nodes: int) -> GraphData:
    """The graph of these edges in both directions, without self-loops and duplicates."""
    ends = ends[:, ends[0] != ends[1]]
    keys = np.unique(np.concatenate([ends[0] * num_nodes + ends[1], ends[1] * num_nodes + ends[0]]))
    edge_index = np.stack([keys // num_nodes, keys % num_nodes])
    return GraphData(name, torch.from_numpy(edge_index), num_nodes)
