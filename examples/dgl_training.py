"""The graph of the DGL examples, which is the demo's, and the loop that trains on it."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import dgl
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import data_loading


def arguments(description: str, epochs: int) -> argparse.Namespace:
    """The command line of an example."""
    parser = argparse.ArgumentParser(description=description)
    data_loading.add_arguments(parser)
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--hidden-channels", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error(f"--epochs: expected at least 1, got {args.epochs}")
    torch.manual_seed(args.seed)
    dgl.seed(args.seed)
    np.random.seed(args.seed)  # by which DGL's loader shuffles
    return args


def load(args: argparse.Namespace) -> tuple[Any, int]:
    """A dataset as a DGL graph with a self-loop at every node, and its number of classes.

    Nodes have ``x``, ``y`` and the masks of the split; edges have ``kind``, a number.
    """
    data, num_classes = data_loading.load(args.dataset, args.root)
    graph = dgl.graph(tuple(data.edge_index), num_nodes=data.num_nodes)
    kinds = data.edge_type if "edge_type" in data else torch.zeros(data.num_edges).long()
    graph.edata["kind"] = 1 + kinds  # that of self-loops is 0
    graph = dgl.add_self_loop(dgl.remove_self_loop(graph), fill_data=0.0)
    for key in ("x", "y", "train_mask", "val_mask", "test_mask"):
        graph.ndata[key] = data[key]
    graph.create_formats_()
    return graph, num_classes


def accuracies(graph: Any, out: Tensor) -> list[float]:
    """Of the training, validation and test nodes."""
    correct = out.argmax(dim=-1) == graph.ndata["y"]
    masks = (graph.ndata[f"{part}_mask"] for part in ("train", "val", "test"))
    return [float(correct[mask].float().mean()) for mask in masks]


def full_batch(
    graph: Any, model: torch.nn.Module, forward: Callable[[], Tensor], args: argparse.Namespace
) -> None:
    """Train on all nodes at once."""
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    mask, y = graph.ndata["train_mask"], graph.ndata["y"]

    def epoch() -> float:
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(forward()[mask], y[mask])
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    run(graph, model, epoch, forward, args.epochs)


def run(
    graph: Any,
    model: torch.nn.Module,
    epoch: Callable[[], float],
    forward: Callable[[], Tensor],
    epochs: int,
) -> None:
    """Train for some epochs, and print how that goes.

    Args:
        graph: with labels and masks.
        model: what is trained.
        epoch: trains once and returns the loss.
        forward: scores of all nodes.
        epochs: how many.
    """
    times = []
    for number in range(1, epochs + 1):
        start = time.perf_counter()
        loss = epoch()
        model.eval()
        with torch.no_grad():
            train_acc, val_acc, test_acc = accuracies(graph, forward())
        times.append(time.perf_counter() - start)
        print(
            f"Epoch: {number:03d}, Loss: {loss:.6f}, Train: {train_acc:.4f}, Val: {val_acc:.4f}, "
            f"Test: {test_acc:.4f}, Time: {times[-1]:.4f}s",
            flush=True,
        )
    print(
        f"Median epoch time: {statistics.median(times):.4f}s, Final loss: {loss:.6f}, "
        f"Test accuracy: {test_acc:.4f}"
    )
