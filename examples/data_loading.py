"""The `--dataset` and `--root` arguments of the examples.

Run as a script it loads a dataset, building or downloading it where needed, and describes it::

    python data_loading.py --dataset Planetoid:Cora --root data
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import os
from pathlib import Path
from typing import Any

import torch
import torch_geometric.datasets
import torch_geometric.transforms as T
from torch_geometric.data import Data, Dataset

from python_code import PythonCode, check_writable


def default_root(class_name: str) -> Path:
    """The user's cache directory for a dataset class."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "fastgraph" / "datasets" / class_name


def dataset_class(text: str) -> tuple[type[Dataset], str | None]:
    """Reads ``Class`` or ``Class:name``.

    Raises:
        argparse.ArgumentTypeError: no such dataset class, or it does not go with the name.
    """
    class_name, _, name = text.partition(":")
    known: dict[str, type[Dataset]] = {"PythonCode": PythonCode}
    for key, value in vars(torch_geometric.datasets).items():
        if inspect.isclass(value) and issubclass(value, Dataset):
            known[key] = value
    if class_name not in known:
        close = difflib.get_close_matches(class_name, known, n=3)
        hint = f" (did you mean {', '.join(close)}?)" if close else ""
        raise argparse.ArgumentTypeError(
            f"expected PythonCode or a class of torch_geometric.datasets, got {class_name!r}{hint}"
        )
    parameter = inspect.signature(known[class_name].__init__).parameters.get("name")
    if name and parameter is None:
        raise argparse.ArgumentTypeError(f"{class_name} takes no name, got {text!r}")
    if not name and parameter is not None and parameter.default is inspect.Parameter.empty:
        raise argparse.ArgumentTypeError(f"{class_name} needs a name: {class_name}:name")
    return known[class_name], name or None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds ``--dataset`` and ``--root``."""
    parser.add_argument(
        "--dataset",
        type=dataset_class,
        default="PythonCode",
        metavar="CLASS[:NAME]",
        help="PythonCode (default) or a dataset class of PyG, such as Planetoid:Cora",
    )
    parser.add_argument("--root", type=Path, help="dataset directory (default: the user's cache)")


def load(dataset: tuple[type[Dataset], str | None], root: Path | None) -> tuple[Data, int]:
    """Loads the first graph of a dataset, undirected, with one split, and its number of classes.

    Raises:
        PermissionError: the root directory cannot be written.
        ValueError: the dataset is not one graph with features and one label per node.
    """
    cls, name = dataset
    root = root or default_root(cls.__name__)
    check_writable(root)
    options: dict[str, Any] = {} if name is None else {"name": name}
    loaded = cls(str(root), **options, transform=T.ToUndirected())
    data = loaded[0]
    if not isinstance(data, Data) or data.x is None or data.y is None or data.y.dim() != 1:
        raise ValueError(
            f"--dataset: expected node features and one label per node, got {cls.__name__}: {data}"
        )
    if data.y.is_floating_point() or data.y.numel() != data.num_nodes:
        raise ValueError(
            f"--dataset: expected one integer label per node, got {cls.__name__} with y of "
            f"shape {tuple(data.y.shape)} and dtype {data.y.dtype}"
        )
    if "train_mask" not in data:
        data = T.RandomNodeSplit(num_val=0.2, num_test=0.2)(data)
    for mask in ("train_mask", "val_mask", "test_mask"):
        if data[mask].dim() == 2:
            data[mask] = data[mask][:, 0]
    return data, loaded.num_classes


def main() -> None:
    parser = argparse.ArgumentParser(description="Load and describe a dataset.")
    add_arguments(parser)
    arguments = parser.parse_args()
    try:
        data, num_classes = load(arguments.dataset, arguments.root)
    except (PermissionError, ValueError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    degree = torch.bincount(data.edge_index[1], minlength=data.num_nodes)
    print(
        f"{arguments.dataset[0].__name__}: {data.num_nodes:,} nodes, {data.num_edges:,} edges, "
        f"{data.num_features} features, {num_classes} classes, largest degree {int(degree.max()):,}"
    )


if __name__ == "__main__":
    main()
