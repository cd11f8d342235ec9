"""Training steps on ranks in all modes, beside what the planner needs to predict them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

import fastgraph
import fastgraph.dist as fgd
from fastgraph.dist.forecast.forecast import partition_distribution
from fastgraph.dist.graphs.partition import partition
from fastgraph.dist.operators import cost, links
from fastgraph.dist.operators.cost import Distribution, Layer
from fastgraph.dist.operators.modes import BY_NAME
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.world import WORLD
from fastgraph.registry import operators
from measure.dist_transformer_steps import HEADS, Training, features, widths_of
from measure.timing import Contestant, no_garbage_collection

KINDS = ("attention", "sums")
MODES = list(BY_NAME)
"""Those that ranks can compute in."""

_TOLERANCE = 1e-5  # of float32 losses, which are sums in another order


def modes_of(kind: str, ranks: int) -> list[str]:
    """Those that differ for a kind of model and a number of ranks."""
    return [mode for mode in MODES if _differs(mode, kind, ranks)]


def _differs(mode: str, kind: str, ranks: int) -> bool:
    return mode == "halo" or (ranks > 1 and (mode != "heads" or kind == "attention"))


def layers(kind: str, channels: int) -> list[Layer]:
    """The operators that a step of the model calls."""
    widths = widths_of(channels)
    if kind == "sums":
        return [cost.sum_layer(_row(width)) for width in widths]
    shapes = [operand.shape for operand in operators.ATTENTION.operands[:3]]
    return [
        cost.attention_layer(shapes, [_row(HEADS, width // HEADS) for _ in shapes], HEADS)
        for width in widths
    ]


def _row(*shape: int) -> Tensor:
    return torch.empty(1, *shape, requires_grad=True)


def measure(graphs: Sequence[str], channels: int, rounds: int) -> dict[str, Any]:
    """Steps of both kinds of models on some graphs, in turns by mode.

    Returns:
        What ranks and links can do; by graph how it is shared out; by graph and kind of model the
        seconds of steps of the slowest rank and the first loss, by mode.
    """
    fastgraph.enable()
    found: dict[str, Any] = {"machine": links.measure(), "rows": {}, "cells": {}}
    for name in graphs:
        data = features(name, channels)
        owner = parts_of(data)
        found["rows"][name] = on_usual_mesh(
            partition_distribution(data.edge_index, owner, owner, WORLD.size)
        )
        sharded = {mode: fgd.shard(data, parts=owner, mode=mode) for mode in MODES}
        for kind in KINDS:
            trainings = {
                mode: Training(sharded[mode], channels, kind) for mode in modes_of(kind, WORLD.size)
            }
            found["cells"][name, kind] = _times(trainings, rounds)
    return found


def parts_of(data: Data) -> Tensor:
    """The rank of each node, for :func:`fastgraph.dist.shard`, the same on all ranks."""
    owner = None
    if WORLD.rank == 0:
        owner = partition(data.edge_index, data.num_nodes, WORLD.size)
    found: Tensor = transport.broadcast(owner)
    return found


def on_usual_mesh(rows: Distribution) -> Distribution:
    """With the blocks of the most square grid alone, which ranks take if they are not told."""
    mesh = min(rows.blocks, key=lambda mesh: (abs(mesh[0] - mesh[1]), -mesh[0]))
    return rows._replace(blocks={mesh: rows.blocks[mesh]})


def check_losses(losses: dict[str, float]) -> None:
    """The first losses of all modes are those of one model on one graph.

    Raises:
        RuntimeError: they are not.
    """
    first = next(iter(losses.values()))
    if not all(math.isclose(loss, first, rel_tol=_TOLERANCE) for loss in losses.values()):
        raise RuntimeError(f"the first losses differ by mode: {losses}")


def _times(trainings: dict[str, Training], rounds: int) -> dict[str, Any]:
    losses = {mode: training.step() for mode, training in trainings.items()}
    contestants = {mode: Contestant(mode, t.step) for mode, t in trainings.items()}
    with no_garbage_collection():
        for _ in range(rounds):
            for contestant in contestants.values():
                transport.barrier()
                seconds = contestant.turn()[0]
                contestant.seconds.append(max(transport.gather_objects(seconds)))
    return {
        mode: {"loss": losses[mode], "spread": contestant.spread.to_json()}
        for mode, contestant in contestants.items()
    }
