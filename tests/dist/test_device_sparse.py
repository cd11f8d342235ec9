"""Sparse matrices of sharded edges with values and features on a device, beside one process."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import Tensor

import fastgraph
import fastgraph.dist as fgd
from fastgraph.dist.ranks.world import WORLD
from fastgraph.registry import registry
from tests import forks, late_collectives, standin
from tests.dist.comparing import deviation
from tests.dist.graphs import NUM_FEATURES, PARTITIONS, graph
from tests.dist.on_device import MadeOnDevice
from tests.dist.test_fused import TOLERANCE, shards
from tests.dist.test_sparse import (
    FUNCTIONS,
    FUSED,
    GATHERING,
    IN_ALL_LAYOUTS,
    LAYERS,
    results,
)


def on_this_rank(mode: str) -> dict[str, str]:
    """By function or layer, how far it is off, or what was raised."""
    torch.set_default_dtype(torch.float64)
    late_collectives.install()
    registry.DEVICE_TYPES = (*registry.DEVICE_TYPES, standin.DEVICE)  # type: ignore[assignment]
    fastgraph.disable()
    fastgraph.enable(backend="reference")
    one = graph()
    many = shards(PARTITIONS["uneven"](WORLD.size), mode=mode)(graph()).to(standin.DEVICE)
    found: dict[str, str] = {}

    def compare(name: str, call: Any, layer: torch.nn.Module | None = None) -> None:
        def parameters() -> list[Tensor]:
            return [] if layer is None else list(layer.parameters())

        expected = results(one, call, *parameters())
        if layer is not None:
            layer.to(standin.DEVICE)
        fgd.COUNTS.reset()
        try:
            with MadeOnDevice(lambda _: False):
                there = results(many, call, *parameters())
        except Exception:
            found[name] = traceback.format_exc()
            return
        devices = {x.device.type for x in there}
        pairs = zip(expected, map(standin.on_host, there), strict=True)
        wrong = [text for pair in pairs if (text := deviation(*pair, TOLERANCE))]
        if devices != {standin.DEVICE}:
            wrong.append(f"on {devices}")
        if fgd.COUNTS.gathers and name not in GATHERING:
            wrong.append(f"gathers {dict(fgd.COUNTS.gathers)}")
        found[name] = "; ".join(wrong)

    for name, call in FUNCTIONS.items():
        if name not in FUSED or name in IN_ALL_LAYOUTS:
            compare(name, call)
    for name, make in LAYERS.items():
        torch.manual_seed(0)
        layer = make(NUM_FEATURES, 3)
        compare(name, layer, layer)
    return found


def test_functions_and_layers_are_those_of_one_process(world_size: int) -> None:
    for mode in ("halo", "grid"):
        for of_rank in forks.on_ranks(on_this_rank, world_size, mode):
            assert len(of_rank) > len(LAYERS)
            assert not {name: wrong for name, wrong in of_rank.items() if wrong}
