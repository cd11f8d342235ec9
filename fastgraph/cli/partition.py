"""``python -m fastgraph partition``: writes a graph as one file for each rank."""

from __future__ import annotations

import importlib.util
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from fastgraph.dist.files.shards import Shards

_DGL = 0xDD2E4FF046B4A13F.to_bytes(8, "little")
"""How files of ``dgl.save_graphs`` begin."""


def partition_graph(
    graph: Path,
    out: Path,
    num_parts: int,
    weights: Sequence[float] | None,
    method: str,
    plot: Path | None,
) -> int:
    """Write the shards of a graph and print what is in them.

    Args:
        graph: see :func:`read_graph`.
        out: the folder that is made.
        num_parts: the number of ranks.
        weights: the share of the work of each rank.
        method: how nodes are partitioned.
        plot: a file for a picture of the parts.

    Returns:
        The exit code, 0.

    Raises:
        click.ClickException: the graph cannot be read, or a file cannot be written.
    """
    from fastgraph.dist.files.shards import write_shards
    from fastgraph.dist.graphs.partition import PartitionError

    try:
        if plot is not None:
            from fastgraph.dist.files.plots import draw_shards  # needs matplotlib
        with _progress() as progress:
            steps = progress.add_task(f"reading {graph}", total=num_parts + 2)

            def begins(step: str) -> None:
                progress.update(steps, description=step, advance=1)

            data = read_graph(graph)
            found = write_shards(
                data, out, num_parts, weights=weights, method=method, begins=begins
            )
        if plot is not None:
            draw_shards(found, plot)
    except (OSError, ValueError, TypeError, ModuleNotFoundError, PartitionError) as error:
        raise click.ClickException(str(error)) from None
    console = Console()
    console.print(table(found))
    share = found.cut / max(found.edges, 1)
    console.print(
        f"{found.cut:,} of {found.edges:,} edges ({share:.1%}) come from another rank. Halo: the "
        "nodes of other ranks that these come from.",
        soft_wrap=True,
        highlight=False,
    )
    for written in filter(None, (found.folder, plot)):
        console.print(f"Wrote {written}", soft_wrap=True, highlight=False)
    return 0


def _progress() -> Progress:
    """Steps and seconds on standard error, which are gone when it ends."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def read_graph(file: Path) -> Any:
    """A graph from a file, of which nothing is executed.

    Args:
        file: ``.npz`` with arrays that have the names of attributes (``x``, ``edge_index``, ...);
            what ``torch.save`` wrote: a ``Data`` or ``HeteroData``, or a dictionary of tensors by
            the names of attributes, other classes are refused; or what ``dgl.save_graphs`` wrote
            of a single graph.

    Raises:
        ValueError: it is no such file, or the graph has no edges.
        ModuleNotFoundError: it is a graph of DGL, which is not installed.
    """
    with file.open("rb") as stream:
        if stream.read(len(_DGL)) == _DGL:
            return _of_dgl(file)
    from torch_geometric.data import Data, HeteroData

    found = _of_arrays(file) if file.suffix == ".npz" else _of_torch(file)
    if isinstance(found, dict):
        found = Data.from_dict(found)
    if not isinstance(found, (Data, HeteroData)):
        raise ValueError(
            f"{file}: expected a Data, a HeteroData or a dictionary of tensors, got "
            f"{type(found).__name__}"
        )
    if not found.edge_types if isinstance(found, HeteroData) else found.edge_index is None:
        raise ValueError(f"{file}: expected a graph with an edge_index, got {list(found.keys())}")
    return found


def _of_dgl(file: Path) -> Any:
    """The graph in a file of DGL, which reads zeros, and names that are empty, beyond its end."""
    from fastgraph.dgl import fix_import

    if importlib.util.find_spec("dgl") is None:
        raise ModuleNotFoundError(f"{file} is a graph of DGL, which is not installed", name="dgl")
    fix_import()
    import dgl

    from fastgraph.dist.graphs.dgl.graphs import features

    try:
        graphs, labels = dgl.load_graphs(str(file))
    except dgl.DGLError as error:
        reason = next(iter(str(error).splitlines()), "")
        raise ValueError(f"{file}: expected what dgl.save_graphs writes: {reason}") from error
    if len(graphs) != 1 or labels:
        raise ValueError(
            f"{file}: expected a single graph without labels, got {len(graphs)} with {len(labels)}"
        )
    (graph,) = graphs
    least = graph.num_edges() * graph.idtype.itemsize + sum(x.nbytes for x in features(graph))
    size = file.stat().st_size
    if size < least or not all([*graph.ntypes, *graph.etypes]):
        raise ValueError(f"{file}: expected a whole graph, got {size} bytes: the file is cut off")
    if not graph.num_edges():
        raise ValueError(f"{file}: expected a graph with edges, got one of none")
    return graph


def _of_arrays(file: Path) -> dict[str, Any]:
    import numpy as np
    import torch

    try:
        with np.load(file, allow_pickle=False) as arrays:
            loaded = {name: arrays[name] for name in arrays.files}
            return {name: torch.from_numpy(x) if x.ndim else x.item() for name, x in loaded.items()}
    except (ValueError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file}: expected arrays of numbers as .npz: {error}") from error


def _of_torch(file: Path) -> Any:
    import torch
    from torch_geometric.data import Data, HeteroData
    from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
    from torch_geometric.data.storage import (
        BaseStorage,
        EdgeStorage,
        GlobalStorage,
        NodeStorage,
    )

    known = [Data, HeteroData, DataEdgeAttr, DataTensorAttr]
    known += [BaseStorage, EdgeStorage, GlobalStorage, NodeStorage]
    try:
        with torch.serialization.safe_globals(known):
            return torch.load(file, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise ValueError(
            f"{file}: expected .npz, what dgl.save_graphs writes, or a graph of PyG and nothing "
            f"else, as torch.save writes it: {reason}"
        ) from error


def table(shards: Shards) -> Table:
    """The table of each rank's nodes, edges, halo and bytes."""
    found = Table("rank")
    for heading in ("nodes", "edges", "halo", "MiB"):
        found.add_column(heading, justify="right")
    for rank, part in enumerate(shards.parts):
        numbers = (part.nodes, part.edges, part.halo)
        found.add_row(str(rank), *(f"{n:,}" for n in numbers), f"{part.bytes / 2**20:.1f}")
    return found
