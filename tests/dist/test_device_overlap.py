"""Ranks whose devices compute while halo rows travel between them, beside ranks on CPUs.

A collective of the stand-in is on a stream of its own: until the device was told to wait for it,
what is received is no number, and what is sent may not be changed.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import fastgraph
import fastgraph.dist as fgd
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.world import WORLD
from fastgraph.registry import registry
from tests import late_collectives, standin
from tests.dist.comparing import deviation
from tests.dist.test_fused import HALVES, by_halves
from tests.dist.test_overlap import (
    BACKWARD,
    FORWARD,
    LAYERS,
    TOLERANCE,
    N,
    events_of,
    ring,
    second_derivatives,
)

LAYOUTS = [layout for layout, shares in HALVES.items() if shares]


def sharded() -> Any:
    return fgd.shard(ring(), parts=torch.arange(N) * WORLD.size // N, mode="halo")


def on_this_rank() -> dict[str, Any]:
    standin.install()
    torch.set_default_dtype(torch.float64)
    data = sharded()
    with fastgraph.enabled():
        expected = {name: second_derivatives(make, data) for name, make in LAYERS.items()}
    late_collectives.install()
    registry.DEVICE_TYPES = (*registry.DEVICE_TYPES, standin.DEVICE)  # type: ignore[assignment]
    data, found = sharded().to(standin.DEVICE), {}
    with fastgraph.enabled(backend="reference"):
        for layout in LAYOUTS:
            by_halves(HALVES[layout])
            for name in LAYERS:
                found[f"{name}, {layout}"] = compared(data, name, expected[name])
            found[f"events, {layout}"] = events_of(data)
        found["never waited"] = without_waiting(data)
    return found


def compared(data: Any, name: str, expected: list[Any]) -> tuple[set[str], dict[str, int], int]:
    """Deviations, how the halo travelled, and what the host of a warm device waits for."""
    make = lambda: LAYERS[name]().to(standin.DEVICE)  # noqa: E731
    fgd.COUNTS.reset()
    results = second_derivatives(make, data)
    pairs = zip(expected, map(standin.on_host, results), strict=True)
    wrong = {deviation(*pair, TOLERANCE) for pair in pairs}
    halo = dict(fgd.COUNTS.halo)
    layer = make()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):  # in the first two ranks compare parameters
        with standin.waits() as waits:
            layer(data.x, data.edge_index).square().sum().backward()
            optimizer.step()
    return wrong, halo, len(waits)


def without_waiting(data: Any) -> bool:
    """True if a rank whose program forgets to wait has results that are no numbers."""
    layer = LAYERS["SAGE"]().to(standin.DEVICE)
    with (
        mock.patch.object(transport.Exchange, "wait", lambda self: self._received),
        mock.patch.object(late_collectives, "OFTEN", 0.0),  # it is not there by good luck
    ):
        out = layer(data.x, data.edge_index)
    transport.barrier()
    late_collectives.GOING_ON.clear()
    return bool(standin.on_host(out.local).isnan().any())


@pytest.fixture(scope="module")
def found(world_size: int, once_on_ranks: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = once_on_ranks(on_this_rank, world_size)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LAYERS)
def test_halves_give_on_a_device_what_they_give_on_cpus_and_no_host_waits(
    found: list[dict[str, Any]], name: str, layout: str
) -> None:
    for of_rank in found:
        wrong, halo, waits = of_rank[f"{name}, {layout}"]
        assert wrong == {""}
        assert all(kind.endswith("without the halo") for kind in halo) and halo
        assert not waits


@pytest.mark.parametrize("layout", LAYOUTS)
def test_exchanges_begin_before_and_end_after_a_kernel(
    found: list[dict[str, Any]], layout: str
) -> None:
    for of_rank in found:
        assert of_rank[f"events, {layout}"] == (FORWARD, BACKWARD)


def test_a_wait_that_is_missing_is_noticed(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert of_rank["never waited"]
