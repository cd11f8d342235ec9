"""The arguments, the graph and the training that the examples share, as TorchGT trains."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.transforms import RandomNodeSplit, ToUndirected
from torch_geometric.utils import stochastic_blockmodel_graph

import fastgraph.dist as fgd
from fastgraph.nn import Graphormer, Schedule, polynomial_decay


def add_arguments(parser: argparse.ArgumentParser, *, epochs: int, warm_up: int) -> None:
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--warm-up", type=int, default=warm_up, help="epochs in which rates rise")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--period", type=int, default=4, help="of layers, one dense; 0 for none")
    parser.add_argument("--hops", type=int, default=2, help="distances that attention knows")
    parser.add_argument("--attention-dropout", type=float, default=0.1)
    parser.add_argument("--amp", action="store_true", help="compute in bfloat16 where that is safe")
    parser.add_argument("--checkpoint", action="store_true", help="keep no activations of layers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", help="folder of checkpoints, from the last of which it goes on")


def generated(num_nodes: int, num_classes: int = 4) -> tuple[Data, int]:
    """Classes that have more edges within than between, and features that say little."""
    if num_nodes < num_classes:
        raise SystemExit(
            f"--nodes: expected at least {num_classes}, one of each class, got {num_nodes}"
        )
    sizes = [num_nodes // num_classes] * num_classes
    chances = torch.full((num_classes, num_classes), 0.002).fill_diagonal_(0.02)
    y = torch.arange(num_classes).repeat_interleave(torch.tensor(sizes))
    x = torch.randn(len(y), 16) + 0.5 * torch.randn(num_classes, 16)[y]
    data = Data(x=x, y=y, edge_index=stochastic_blockmodel_graph(sizes, chances))
    return RandomNodeSplit(num_val=0.2, num_test=0.2)(ToUndirected()(data)), num_classes


def with_all_parts(data: Data) -> Data:
    """A graph that has nodes to train, validate and test on; it is an error to have none."""
    for part in ("train", "val", "test"):
        mask = data.get(f"{part}_mask")
        if mask is None or not bool(mask.any()):
            raise SystemExit(f"{part}_mask: expected some of {data.num_nodes} nodes, got none")
    return data


def schedule_of(period: int) -> Schedule:
    """The first of so many layers attends to all pairs."""
    return Schedule("layer", period or None)


def node_classifier(data: Data, num_classes: int, arguments: argparse.Namespace) -> Graphormer:
    """Graphormer for nodes, with TorchGT's rates of dropout."""
    model = Graphormer.slim(
        data.num_features,
        num_classes,
        hops=arguments.hops,
        schedule=schedule_of(arguments.period),
        input_dropout=0.3,
        attention_dropout=arguments.attention_dropout,
        dropout=0.5,
    )
    if arguments.checkpoint:
        keep_no_activations(model)
    return model


def of_nodes(model: nn.Module, data: Data, *, amp: bool) -> torch.Tensor:
    """The outputs of a model for the nodes of a graph with a pattern of attention and degrees."""
    with torch.autocast(data.x.device.type, torch.bfloat16, enabled=amp):
        out: torch.Tensor = model(
            data.x,
            data.attn_index,
            types=data.attn_type,
            degrees=(data.in_degree, data.out_degree),
        )
    return out


def keep_no_activations(model: nn.Module) -> None:
    """Compute each layer once more in backward, with the same dropout."""
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def optimizer_of(
    model: nn.Module, arguments: argparse.Namespace, steps_of_epoch: int
) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """AdamW, and rates that rise and then fall to 1e-9 in the last step."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=arguments.lr, weight_decay=arguments.weight_decay
    )
    warm_up, steps = (n * steps_of_epoch for n in (arguments.warm_up, arguments.epochs))
    return optimizer, polynomial_decay(optimizer, min(warm_up, steps - 1), steps)


class Checkpoints:
    """The state of a training after each epoch, on one process or on ranks, if a folder is named.

    Args:
        folder: of the checkpoints of one training; ``None`` for none.
        model: that is trained.
        optimizer: that trains it.
        scheduler: of its rates.
    """

    def __init__(
        self,
        folder: str | None,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: LambdaLR,
    ) -> None:
        self.folder, self.trained, self.scheduler = folder, (model, optimizer), scheduler

    def load(self) -> dict[str, Any]:
        """Go on from the last one; gives what was kept besides, nothing where there is none."""
        found = self.folder and fgd.load(self.folder, *self.trained, missing_ok=True)
        if not found:
            return {}
        self.scheduler.load_state_dict(found["scheduler"])
        return found

    def save(self, **besides: Any) -> None:
        """Keep the state, the random states among it, and more."""
        if self.folder:
            state = {"scheduler": self.scheduler.state_dict(), **besides}
            fgd.save(self.folder, *self.trained, extra=state)
