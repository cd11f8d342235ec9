"""Graphs in files by ranks: each memory-maps its own rows, and none holds the whole.

A folder has a file for each rank, with its rows of the tensors of nodes and edges and which rows
these are; one with the tensors that all ranks have; and a manifest.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastgraph import manifest
from fastgraph.dist.files import allocator, stores
from fastgraph.dist.files.nesting import (
    NamedTensors,
    Spec,
    check_can_be_kept,
    decoded,
    described,
    encoded,
)
from fastgraph.dist.files.stores import Contents, Store
from fastgraph.dist.graphs import dgl, pyg, pyg_functions
from fastgraph.dist.graphs.partition import check_weights, partition
from fastgraph.dist.graphs.protocols import AnyGraph
from fastgraph.dist.graphs.pyg import Graph
from fastgraph.dist.operators.modes import checked_mode
from fastgraph.dist.ranks.agreement import on_all_ranks, on_first_rank
from fastgraph.dist.ranks.mesh import Mesh
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor import hooks
from fastgraph.dist.tensor.layout import Layout, know, known
from fastgraph.dist.tensor.sharded import ShardedTensor
from fastgraph.layers.arguments import check_functions, check_integers, checked_path
from fastgraph.manifest import FileFormatError, Format, Json, Manifest, check_safetensors

if TYPE_CHECKING:
    from dgl import DGLGraph
    from torch_geometric.data import Data, HeteroData

FORMAT = Format("shards of fastgraph.dist", 2)

_REPLICATED = "replicated.safetensors"


@dataclass(frozen=True)
class Shard:
    """The numbers of nodes and edges in the part of a graph that a rank gets.

    Attributes:
        nodes: how many nodes, of all types.
        edges: how many edges, which live with their destination.
        halo: how many nodes of other ranks its edges come from.
        bytes: the size of its file.
    """

    nodes: int
    edges: int
    halo: int
    bytes: int


@dataclass(frozen=True)
class Shards:
    """The result of :func:`write_shards`.

    Attributes:
        folder: where.
        parts: by rank.
        between: how many edges lead to the nodes of each rank from those of each; row ``i`` has
            those to rank ``i``.
    """

    folder: Path
    parts: tuple[Shard, ...]
    between: tuple[tuple[int, ...], ...]

    @property
    def edges(self) -> int:
        """The number of edges."""
        return sum(part.edges for part in self.parts)

    @property
    def cut(self) -> int:
        """The number of edges that come from another rank."""
        return self.edges - sum(row[rank] for rank, row in enumerate(self.between))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw nodes, halo and edges of each rank, and the edges between ranks, into a file.

        Args:
            path: whose suffix says the format, such as ``.svg`` or ``.png``.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            OSError: the file cannot be written.
        """
        from fastgraph.dist.files.plots import draw_shards

        draw_shards(self, path)


def write_shards(
    data: Graph,
    folder: str | os.PathLike[str],
    num_parts: int,
    *,
    weights: Sequence[float] | None = None,
    method: str = "metis",
    begins: Callable[[str], None] = lambda step: None,
) -> Shards:
    """Partition a graph and write a file for each rank, for :func:`load_shards`.

    One process calls it, which holds the whole graph and, one after the other, copies of its parts.
    The folder appears when it is complete.

    Args:
        data: ``Data`` or ``HeteroData`` of PyG, or a ``DGLGraph``, on the CPU.
        folder: that is made; an empty one may be there.
        num_parts: the number of ranks.
        weights: the share of the work of each rank, see :func:`fastgraph.dist.partition`.
        method: see :func:`fastgraph.dist.partition`.
        begins: is told each of the ``num_parts + 1`` steps that take time, when it begins.

    Returns:
        Sizes, cut and halos.

    Raises:
        TypeError: ``data`` is no graph of PyG or DGL, or has what cannot be kept in a file of data;
            or an argument of another type.
        ValueError: an argument that cannot be used.
        ModuleNotFoundError: ``safetensors`` or ``pymetis`` is not installed.
        FileExistsError: there is something in the folder.
        OSError: a file could not be written.
    """
    pyg.check_is_graph(data)
    check_integers(num_parts=num_parts)
    folder = checked_path(folder=folder).resolve()
    check_functions(begins=begins)
    check_weights(weights, num_parts)
    check_safetensors("shards")
    of_graphs, of_stores = _rooms(dgl.is_dgl_graph(data))
    of_graphs.check_can_be_sharded(data)
    if Path.cwd().is_relative_to(folder):
        raise ValueError(f"folder must not be where this process works, got {folder}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"folder must be a new or empty one, got {folder}")
    sizes = of_graphs.num_nodes(data)
    edges = of_graphs.joint_edges(data, sizes)
    begins(f"partitioning {sum(sizes):,} nodes and {edges.shape[1]:,} edges")
    owner = partition(edges, sum(sizes), num_parts, weights=weights, method=method)
    graph = _Parts(of_stores.contents(data, owner.split(sizes)), num_parts)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        files = {}
        for part in range(num_parts):
            begins(f"writing part {part + 1} of {num_parts}")
            files[_file(part)] = manifest.write_tensors(
                unfinished / _file(part), graph.of_part(part)
            )
        replicated = graph.replicated.tensors
        files[_REPLICATED] = manifest.write_tensors(unfinished / _REPLICATED, replicated)
        manifest.write(unfinished, FORMAT, graph.content(), files)
        unfinished.rename(folder)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    manifest.sync_folder(folder.absolute().parent)
    return _described(
        folder, edges, owner, [files[_file(part)]["bytes"] for part in range(num_parts)]
    )


def load_shards(
    folder: str | os.PathLike[str],
    *,
    checksums: bool = True,
    mode: str = "auto",
    mesh: Mesh | None = None,
) -> Data | HeteroData | DGLGraph:
    """The graph that :func:`write_shards` was given, as :func:`fastgraph.dist.shard` gives it.

    All ranks must call it. Each maps its own file into memory, of which the system reads what is
    used, and forgets what has not been changed when it needs the memory. Changes stay with the
    process. From then on, memory of large tensors goes back to the system when it is freed, see
    :func:`fastgraph.dist.files.allocator.return_freed_memory`.

    Args:
        folder: of as many parts as there are ranks.
        checksums: whether each rank reads its file once, to compare its SHA-256; sizes are compared
            anyway.
        mode: how fused operators are computed, see :func:`fastgraph.dist.shard`. By ``"heads"``
            each rank gets all edges when an attention layer first needs them, by ``"grid"`` those
            of its block; features of edges are sent to them at each call.
        mesh: see :func:`fastgraph.dist.shard`.

    Returns:
        ``Data``, ``HeteroData`` or ``DGLGraph``, sharded.

    Raises:
        RuntimeError: :func:`fastgraph.dist.init` was not called.
        ModuleNotFoundError: ``safetensors`` is not installed, or DGL for a graph of DGL.
        FileFormatError: a file is missing, cut off, corrupt, foreign or of a newer version.
        ValueError: there are more or fewer ranks than parts, or an unknown ``mode`` or ``mesh``.
    """
    mode = checked_mode(mode, mesh)
    if not WORLD.is_ready:
        raise RuntimeError("call fastgraph.dist.init() before fastgraph.dist.load_shards()")
    check_safetensors("shards")
    hooks.install()
    pyg_functions.install()
    dgl.install()
    allocator.return_freed_memory()
    path = checked_path(folder=folder)
    found = on_first_rank(lambda: manifest.read(path, FORMAT))
    parts = found.content.get("parts")
    if parts != WORLD.size:
        raise ValueError(
            f"{folder}: expected {parts} ranks, as there are {parts} parts, got {WORLD.size}; "
            "partition the graph again, or start as many ranks"
        )
    names = [_file(WORLD.rank), *([_REPLICATED] if WORLD.rank == 0 else [])]
    on_all_ranks(lambda: manifest.verify(found, names, checksums=checksums))
    opened: list[AnyGraph] = []
    on_all_ranks(lambda: opened.append(_assembled(found, mode, mesh)))
    return opened[0]


def _file(part: int) -> str:
    return f"rank-{part:05}.safetensors"


class _Parts:
    """A graph as JSON, and as tensors by rank.

    Attributes:
        replicated: the tensors that all ranks get.
    """

    def __init__(self, contents: Contents, num_parts: int) -> None:
        self.replicated = NamedTensors()
        self._contents, self._num_parts = contents, num_parts
        self._tensors: dict[str, tuple[Tensor, int, str]] = {}
        self._stores = [[store.key, self._encoded(store)] for store in contents.stores]

    def _encoded(self, store: Store) -> dict[str, Json]:
        values: dict[str, Json] = {}
        for key, value in store.values.items():
            full = f"{store.label}.{key}"
            if key in store.rows:
                check_can_be_kept(value, full)
                axis, name = store.rows[key]
                self._tensors[full] = value.detach(), axis, name
                values[key] = described(value, full, axis)
            else:
                values[key] = encoded(value, full, self.replicated)
        return values

    def content(self) -> dict[str, Json]:
        """The entries of the manifest that describe the shards."""
        rows = {
            name: torch.bincount(owner, minlength=self._num_parts).tolist()
            for name, owner in self._contents.owners.items()
        }
        return {
            "parts": self._num_parts,
            "kind": self._contents.kind,
            "stores": self._stores,
            "rows": rows,
            "laid out": {full: name for full, (_, _, name) in self._tensors.items()},
        }

    def of_part(self, part: int) -> dict[str, Tensor]:
        """The rows of a part, and which these are."""
        positions = {
            name: (owner == part).nonzero().view(-1)
            for name, owner in self._contents.owners.items()
        }
        tensors = {
            full: x.index_select(axis, positions[name])
            for full, (x, axis, name) in self._tensors.items()
        }
        return {**tensors, **{f"rows of {name}": x for name, x in positions.items()}}


def _assembled(found: Manifest, mode: str, mesh: Mesh | None) -> AnyGraph:
    from safetensors import SafetensorError

    try:
        return _graph(found.content, found.folder, mode, mesh)
    except (AttributeError, KeyError, TypeError, SafetensorError) as error:
        raise FileFormatError(
            f"{found.folder}: expected the tensors that its {manifest.NAME} names, got {error!r}"
        ) from error


def _graph(content: dict[str, Json], folder: Path, mode: str, mesh: Mesh | None) -> AnyGraph:
    from safetensors import safe_open

    kind = content.get("kind") or ("HeteroData" if content["hetero"] else "Data")  # of version 1
    _, of_stores = _rooms(kind == "DGLGraph")
    own = safe_open(folder / _file(WORLD.rank), framework="pt")
    replicated = safe_open(folder / _REPLICATED, framework="pt")
    layouts = {}
    for name, counts in content["rows"].items():
        layout = Layout(own.get_tensor(f"rows of {name}"), sum(counts), counts)
        layout.mode, layout.mesh = mode, mesh
        if name.startswith("nodes of") or known(layout.n) is None:
            know(layout)
        layouts[name] = layout

    def tensor(spec: Spec) -> Tensor:
        if spec.axis is None:
            whole: Tensor = replicated.get_tensor(spec.name)
            return whole
        rows = layouts[content["laid out"][spec.name]]
        return ShardedTensor(own.get_tensor(spec.name), rows, spec.axis)

    found = [
        (key, {name: decoded(value, tensor) for name, value in values.items()})
        for key, values in content["stores"]
    ]
    graph: AnyGraph = of_stores.graph_of(kind, found, layouts)
    return graph


def _rooms(is_dgl: bool) -> tuple[ModuleType, ModuleType]:
    """The modules that read a framework's graphs and that take them apart for files."""
    if not is_dgl:
        return pyg, stores
    from fastgraph.dist.files import dgl_stores as stores_of_dgl
    from fastgraph.dist.graphs.dgl import graphs as of_dgl

    return of_dgl, stores_of_dgl


def _described(folder: Path, edges: Tensor, owner: Tensor, sizes: list[int]) -> Shards:
    num_parts = len(sizes)
    source, target = owner[edges[0]], owner[edges[1]]
    between = torch.bincount(target * num_parts + source, minlength=num_parts**2)
    far = source != target
    # Each node once for each part that its edges go to.
    halo = torch.unique(target[far] * len(owner) + edges[0][far]) // max(len(owner), 1)
    counts = [torch.bincount(x, minlength=num_parts).tolist() for x in (owner, target, halo)]
    parts = tuple(Shard(*numbers) for numbers in zip(*counts, sizes, strict=True))
    return Shards(folder, parts, tuple(map(tuple, between.view(num_parts, -1).tolist())))
