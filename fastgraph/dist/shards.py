"""Graphs in files by ranks: each memory-maps its own rows, and none holds the whole.

A folder has a file for each rank, with its rows of the tensors of nodes and edges and which rows
these are; one with the tensors that all ranks have; and a manifest.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastgraph import manifest
from fastgraph.dist import allocator, hooks
from fastgraph.dist.agreement import on_all_ranks, on_first_rank
from fastgraph.dist.graphs import by_row, check_on_cpu, joint_edges, num_nodes
from fastgraph.dist.grid_volume import Mesh
from fastgraph.dist.layout import Layout, know, known
from fastgraph.dist.modes import check_mode
from fastgraph.dist.nesting import (
    Kept,
    Spec,
    check_can_be_kept,
    decoded,
    described,
    encoded,
)
from fastgraph.dist.partition import partition
from fastgraph.dist.sharded import ShardedTensor
from fastgraph.dist.world import WORLD
from fastgraph.manifest import FileFormatError, Format, Manifest, check_safetensors

if TYPE_CHECKING:
    from torch_geometric.data import Data, HeteroData

FORMAT = Format("shards of fastgraph.dist", 1)

_REPLICATED = "replicated.safetensors"


@dataclass(frozen=True)
class Part:
    """What a rank gets of a graph.

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
    """What :func:`write_shards` has written.

    Attributes:
        folder: where.
        parts: by rank.
        cut: how many edges come from another rank.
        edges: how many there are.
    """

    folder: Path
    parts: tuple[Part, ...]
    cut: int
    edges: int


def write_shards(
    data: Data | HeteroData,
    folder: str | os.PathLike[str],
    num_parts: int,
    *,
    weights: Sequence[float] | None = None,
    method: str = "metis",
) -> Shards:
    """Partition a graph and write a file for each rank, for :func:`load_shards`.

    One process calls it, which holds the whole graph and, one after the other, copies of its parts.
    The folder appears when it is complete.

    Args:
        data: ``Data`` or ``HeteroData`` of PyG, on the CPU.
        folder: that is made; an empty one may be there.
        num_parts: the number of ranks.
        weights: the share of the work of each rank, see :func:`fastgraph.dist.partition`.
        method: see :func:`fastgraph.dist.partition`.

    Returns:
        Sizes, cut and halos.

    Raises:
        TypeError: ``data`` is no graph of PyG, or has what cannot be kept in a file of data.
        ValueError: an argument that cannot be used.
        ModuleNotFoundError: ``safetensors`` or ``pymetis`` is not installed.
        FileExistsError: there is something in the folder.
        OSError: a file could not be written.
    """
    from torch_geometric.data import Data, HeteroData

    if not isinstance(data, (Data, HeteroData)):
        raise TypeError(f"data must be a Data or HeteroData of PyG, got {type(data).__name__}")
    if num_parts < 1:
        raise ValueError(f"num_parts must be an integer above 0, got {num_parts}")
    check_safetensors("shards")
    check_on_cpu(data)
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"folder must be a new or empty one, got {folder}")
    sizes = num_nodes(data)
    edges = joint_edges(data, sizes)
    owner = partition(edges, sum(sizes), num_parts, weights=weights, method=method)
    graph = _Graph(data, list(owner.split(sizes)), num_parts)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        files = {
            _file(part): manifest.write_tensors(unfinished / _file(part), graph.rows_of(part))
            for part in range(num_parts)
        }
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
) -> Data | HeteroData:
    """The graph that :func:`write_shards` was given, as :func:`fastgraph.dist.shard` gives it.

    All ranks must call it. Each maps its own file into memory, of which the system reads what is
    used, and forgets what has not been changed when it needs the memory. Changes stay with the
    process. From then on, memory of large tensors goes back to the system when it is freed, see
    :func:`fastgraph.dist.allocator.return_freed_memory`.

    Args:
        folder: of as many parts as there are ranks.
        checksums: whether each rank reads its file once, to compare its SHA-256; sizes are compared
            anyway.
        mode: how fused operators are computed, see :func:`fastgraph.dist.shard`. By ``"heads"``
            each rank gets all edges when an attention layer first needs them, by ``"2d"`` those of
            its block; features of edges are sent to them at each call.
        mesh: see :func:`fastgraph.dist.shard`.

    Returns:
        ``Data`` or ``HeteroData``, sharded.

    Raises:
        RuntimeError: :func:`fastgraph.dist.init` was not called.
        ModuleNotFoundError: ``safetensors`` is not installed.
        FileFormatError: a file is missing, cut off, corrupt, foreign or of a newer version.
        ValueError: there are more or fewer ranks than parts, or an unknown ``mode`` or ``mesh``.
    """
    check_mode(mode, mesh)
    if not WORLD.is_ready:
        raise RuntimeError("call fastgraph.dist.init() before fastgraph.dist.load_shards()")
    check_safetensors("shards")
    hooks.install()
    allocator.return_freed_memory()
    found = on_first_rank(lambda: manifest.read(Path(folder), FORMAT))
    parts = found.content.get("parts")
    if parts != WORLD.size:
        raise ValueError(
            f"{folder}: expected {parts} ranks, as there are {parts} parts, got {WORLD.size}; "
            "partition the graph again, or start as many ranks"
        )
    names = [_file(WORLD.rank), *([_REPLICATED] if WORLD.rank == 0 else [])]
    on_all_ranks(lambda: manifest.verify(found, names, checksums=checksums))
    opened: list[Any] = []
    on_all_ranks(lambda: opened.append(_assembled(found, mode, mesh)))
    return opened[0]


def _file(part: int) -> str:
    return f"rank-{part:05}.safetensors"


class _Graph:
    """A graph as JSON, and as tensors by rank.

    Attributes:
        replicated: the tensors that all ranks get.
    """

    def __init__(self, data: Any, parts: list[Tensor], num_parts: int) -> None:
        self.replicated = Kept()
        self._num_parts = num_parts
        self._is_hetero = not hasattr(data, "_store")
        self._owners: dict[str, Tensor] = {}
        self._tensors: dict[str, tuple[Tensor, int, str]] = {}
        owners = {}
        rows_of: dict[int, list[tuple[Any, str]]] = {}
        for store, owner in zip(data.node_stores, parts, strict=True):
            owners[store._key] = owner
            name = f"nodes of {_label(store)}"
            self._owners[name] = owner
            rows_of.setdefault(id(store), []).append((store.is_node_attr, name))
        for store in data.edge_stores:
            index = store.get("edge_index")
            if type(index) is Tensor:
                name = f"edges of {_label(store)}"
                self._owners[name] = owners[store._key[2] if store._key else None][index[1]]
                rows_of.setdefault(id(store), []).append((store.is_edge_attr, name))
        self._stores = [
            [store._key, self._encoded(store, rows_of.get(id(store), []))] for store in data.stores
        ]

    def _encoded(self, store: Any, rows: list[tuple[Any, str]]) -> Any:
        label = _label(store)
        laid_out: dict[str, tuple[int, str]] = {}
        for belongs, name in rows:
            for key, axis in by_row(store, belongs, len(self._owners[name])).items():
                laid_out.setdefault(key, (axis, name))
        values: dict[str, Any] = {}
        for key, value in store.items():
            full = f"{label}.{key}"
            if key in laid_out:
                check_can_be_kept(value, full)
                axis, name = laid_out[key]
                self._tensors[full] = value.detach(), axis, name
                values[key] = described(value, full, axis)
            else:
                values[key] = encoded(value, full, self.replicated)
        return values

    def content(self) -> dict[str, Any]:
        """What the manifest says of it."""
        rows = {
            name: torch.bincount(owner, minlength=self._num_parts).tolist()
            for name, owner in self._owners.items()
        }
        return {
            "parts": self._num_parts,
            "hetero": self._is_hetero,
            "stores": self._stores,
            "rows": rows,
            "laid out": {full: name for full, (_, _, name) in self._tensors.items()},
        }

    def rows_of(self, part: int) -> dict[str, Tensor]:
        """The rows of a part, and which these are."""
        positions = {
            name: (owner == part).nonzero().view(-1) for name, owner in self._owners.items()
        }
        tensors = {
            full: x.index_select(axis, positions[name])
            for full, (x, axis, name) in self._tensors.items()
        }
        return {**tensors, **{f"rows of {name}": x for name, x in positions.items()}}


def _label(store: Any) -> str:
    key = store._key
    if key is None:
        return "graph"
    return f"type {key}" if isinstance(key, str) else f"type {' '.join(key)}"


def _assembled(found: Manifest, mode: str, mesh: Mesh | None) -> Any:
    from safetensors import SafetensorError

    try:
        return _graph(found.content, found.folder, mode, mesh)
    except (AttributeError, KeyError, TypeError, SafetensorError) as error:
        raise FileFormatError(
            f"{found.folder}: expected the tensors that its {manifest.NAME} names, got {error!r}"
        ) from error


def _graph(content: dict[str, Any], folder: Path, mode: str, mesh: Mesh | None) -> Any:
    from safetensors import safe_open
    from torch_geometric.data import Data, HeteroData

    data = HeteroData() if content["hetero"] else Data()
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

    for key, values in content["stores"]:
        store = data if key is None else data[key if isinstance(key, str) else tuple(key)]
        for name, value in values.items():
            store[name] = decoded(value, tensor)
    return data


def _described(folder: Path, edges: Tensor, owner: Tensor, sizes: list[int]) -> Shards:
    source, target = owner[edges[0]], owner[edges[1]]
    far = source != target
    # Each node once for each part that its edges go to.
    halo = torch.unique(target[far] * len(owner) + edges[0][far]) // max(len(owner), 1)
    counts = [torch.bincount(x, minlength=len(sizes)).tolist() for x in (owner, target, halo)]
    parts = tuple(Part(*numbers) for numbers in zip(*counts, sizes, strict=True))
    return Shards(folder, parts, int(far.sum()), edges.shape[1])
