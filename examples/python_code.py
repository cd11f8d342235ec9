"""The `PythonCode` dataset: the graph of the Python installation that runs it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch_geometric.data import Data, InMemoryDataset

import python_graph
import python_source


def check_writable(root: str | os.PathLike[str]) -> None:
    """Creates `root` and checks that files can be written there.

    Raises:
        PermissionError: it cannot be created or written; the message names the directory.
    """
    try:
        os.makedirs(root, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise PermissionError(
            f"root: expected a writable directory, got {os.fspath(root)!r} ({reason})"
        ) from error


class PythonCode(InMemoryDataset):
    """Modules, classes and functions of the Python installation, and how they use each other.

    The graph is built at the first use, from source text alone, and cached below `root` until
    packages are installed or removed. The task is to tell the top-level package of a node. The
    words of the package's own name are left out of the features.

    The one graph has ``x`` float32 ``[N, 256]``, ``edge_index`` int64 ``[2, E]`` (from the user to
    what it uses), ``edge_type`` int64 ``[E]`` (`python_source.EDGE_TYPES`), ``node_type`` int64
    ``[N]`` (`python_source.NODE_TYPES`), ``y`` int64 ``[N]`` (-1: not one of the most frequent
    packages), and ``train_mask``, ``val_mask`` and ``test_mask`` bool ``[N]`` over the labelled
    nodes (60, 20 and 20 per cent, the same at every build).

    Args:
        root: directory of the cache.
        transform, pre_transform, force_reload: as for every PyG dataset.

    Raises:
        PermissionError: `root` cannot be written.
        RuntimeError: the graph could not be built.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        transform: Callable | None = None,
        pre_transform: Callable | None = None,
        force_reload: bool = False,
    ) -> None:
        check_writable(root)
        super().__init__(os.fspath(root), transform, pre_transform, force_reload=force_reload)
        self.load(self.processed_paths[0])

    @property
    def processed_file_names(self) -> str:
        # Distribution metadata directories carry versions, so that an upgrade changes the key.
        content = [sys.version]
        content += [Path(module.__file__).read_text() for module in (python_graph, python_source)]
        for directory in python_graph.installation_roots():
            content += [str(directory), *sorted(os.listdir(directory))]
        key = hashlib.sha256("\n".join(content).encode()).hexdigest()[:16]
        return f"python_{key}.pt"

    def process(self) -> None:
        with tempfile.TemporaryDirectory(dir=self.processed_dir) as directory:
            arrays = os.path.join(directory, "graph.npz")
            # A process of its own: its workers do not import torch, and its memory is given back.
            build = subprocess.run([sys.executable, python_graph.__file__, arrays], check=False)
            if build.returncode != 0:
                raise RuntimeError(
                    f"building the graph of {sys.prefix} failed with exit code {build.returncode}"
                )
            with np.load(arrays) as graph:
                data = to_data(graph)
            if self.pre_transform is not None:
                data = self.pre_transform(data)
            # Renamed into place, so that an interrupted run leaves no half-written cache.
            finished = os.path.join(directory, "data.pt")
            self.save([data], finished)
            os.replace(finished, self.processed_paths[0])


def to_data(graph: np.lib.npyio.NpzFile | dict[str, np.ndarray], seed: int = 0) -> Data:
    """Turns the arrays of a `python_graph.CodeGraph` into a `Data` with a seeded split."""
    keys = ("x", "edge_index", "edge_type", "node_type", "y")
    data = Data(**{key: torch.from_numpy(graph[key]) for key in keys})
    labelled = (data.y >= 0).nonzero().view(-1)
    order = torch.randperm(labelled.numel(), generator=torch.Generator().manual_seed(seed))
    train, val = int(0.6 * labelled.numel()), int(0.8 * labelled.numel())
    parts = labelled[order].tensor_split([train, val])
    for name, part in zip(("train_mask", "val_mask", "test_mask"), parts, strict=True):
        data[name] = torch.zeros(data.num_nodes, dtype=torch.bool)
        data[name][part] = True
    return data
