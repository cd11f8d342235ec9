"""Ranks whose tensors are on a device, with collectives as NCCL has them, beside one on the CPU.

The device is the stand-in of :mod:`tests.standin`, the collectives are those of
:mod:`tests.late_collectives`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor, nn

import fastgraph
import fastgraph.dist as fgd
from fastgraph.dist.ranks.world import WORLD
from fastgraph.graphs.witness import StaleGraphError
from fastgraph.registry import registry
from tests import forks, late_collectives, standin
from tests.dist import probes
from tests.dist.graphs import NUM_CLASSES, NUM_FEATURES, graph, uneven
from tests.dist.on_device import MadeOnDevice
from tests.dist.test_operations import difference, outcome

OF_UPSTREAM = {
    "numpy, item": "torch has no array of a tensor on a device",
    "dtype of another": "the probe adds a tensor on the CPU",
    "copies": "the probe adds a tensor on the CPU",
    "files": "torch reads tensors into host memory that it has no device for",
    "repr": "names the device",
    "autocast": "is that of the CPU alone",
}
"""Probes that one process cannot run on a device, either."""

OF_STAND_IN = {
    **dict.fromkeys(
        (
            *("lstm of sorted edges", "gru of sorted edges", "recurrent layers", "recurrent cells"),
            *("recurrent layers, time first, in both directions", "GatedGraphConv"),
        ),
        "torch has fused cells for devices, and none for the CPU",
    ),
    **dict.fromkeys(
        ("sparse product", "a matrix that is used again, and edited"),
        "torch has no sparse tensors for its spare device",
    ),
    "reversible layer": "storages of the stand-in have a fixed size",
}
"""Probes that the stand-in cannot run."""


def probed_on_this_rank() -> dict[str, str]:
    """The error of each operation on the device, or nothing."""
    standin.install()
    torch.set_default_dtype(torch.float64)
    probes.m.make()
    names = [n for n in probes.PROBES if n not in OF_UPSTREAM and n not in OF_STAND_IN]
    plain = graph()
    expected = {name: outcome(probes.PROBES[name], plain) for name in names}
    late_collectives.install()
    _move(probes.m)
    data = fgd.shard(graph(), parts=uneven(WORLD.size)).to(standin.DEVICE)
    found = {}
    for name in names:
        fgd.COUNTS.reset()
        try:
            with MadeOnDevice(lambda name: name.startswith(probes.__name__)):
                values = outcome(probes.PROBES[name], data)
            found[name] = difference(
                expected[name], [None if x is None else standin.on_host(x) for x in values]
            )
            assert values[0] is not None
            if values[0].device.type != standin.DEVICE:
                found[name] += f" on {values[0].device}"
            if not probes.PROBES[name].gathers >= set(fgd.COUNTS.gathers):
                found[name] += f" gathers {dict(fgd.COUNTS.gathers)}"
        except Exception:
            found[name] = traceback.format_exc()
    return found


def _move(modules: Any) -> None:
    for key, value in vars(modules).items():
        if isinstance(value, Tensor):
            moved = value.detach().to(standin.DEVICE).requires_grad_(value.requires_grad)
            setattr(modules, key, moved)
        held = value.values() if isinstance(value, dict) else value
        for one in held if isinstance(value, (dict, list)) else [value]:
            if isinstance(one, nn.Module):
                one.to(standin.DEVICE)


def test_operations_give_on_a_device_what_they_give_on_one_process(
    world_size: int, once_on_ranks: Any
) -> None:
    for of_rank in once_on_ranks(probed_on_this_rank, world_size):
        assert not {name: error for name, error in of_rank.items() if error}


def _by_replicated_indices() -> tuple[list[float], list[str], str, float]:
    """How far losses by an index and a mask are off, waits, and what an edit leads to."""
    torch.set_default_dtype(torch.float64)
    late_collectives.install()
    plain = graph()
    index, mask = torch.arange(0, len(plain.x), 3), plain.train_mask
    expected = float(plain.x[index].square().mean() + plain.x[mask].square().mean())
    data = fgd.shard(graph(), parts=uneven(WORLD.size)).to(standin.DEVICE)
    index, mask = index.to(standin.DEVICE), mask.to(standin.DEVICE)
    weight = nn.Parameter(torch.ones(NUM_FEATURES).to(standin.DEVICE))
    optimizer = torch.optim.SGD([weight], lr=0.0)

    def step() -> Tensor:
        optimizer.zero_grad()
        x = data.x * weight
        loss = x[index].square().mean() + x[mask].square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = [step() for _ in range(WARM)]
    with standin.waits() as waits:
        losses += [step() for _ in range(STEPS - WARM)]
    index.data.add_(1)
    error = ""
    for _ in range(STEPS):
        try:
            step()
        except StaleGraphError as found:
            error = str(found)
            break
    again = float(step())
    moved = plain.x[index.cpu()].square().mean() + plain.x[plain.train_mask].square().mean()
    return [float(x) - expected for x in losses], waits, error, again - float(moved)


def test_replicated_indices_have_the_host_wait_for_nothing(world_size: int) -> None:
    for losses, waits, error, again in forks.on_ranks(_by_replicated_indices, world_size):
        assert losses == pytest.approx([0.0] * STEPS, abs=TOLERANCE)
        assert not waits
        assert "changed where torch does not count it" in error
        assert again == pytest.approx(0.0, abs=TOLERANCE)  # by what the index holds now


LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "GCN": gnn.GCNConv,
    "SAGE": gnn.SAGEConv,
    "SAGE max": lambda i, o: gnn.SAGEConv(i, o, "max"),
    "GAT": lambda i, o: gnn.GATConv(i, o, heads=2, concat=False, dropout=0.3),
    "GATv2": lambda i, o: gnn.GATv2Conv(i, o, heads=2, concat=False),
    "Transformer": lambda i, o: gnn.TransformerConv(i, o, heads=2, concat=False),
    "GIN": lambda i, o: gnn.GINConv(gnn.MLP([i, o, o], norm="batch_norm"), train_eps=True),
    "EdgeConv": lambda i, o: gnn.EdgeConv(gnn.MLP([2 * i, o], norm=None)),
}
STEPS, WARM = 5, 2

TOLERANCE = 1e-12
"""Of losses and of the norm of all gradients: sums are taken in another order."""


class Model(nn.Module):
    def __init__(self, layer: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.first, self.norm = layer(NUM_FEATURES, 6), nn.BatchNorm1d(6)
        self.second = layer(6, NUM_CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.norm(self.first(F.dropout(x, 0.4, self.training), edge_index)).relu()
        return self.second(F.dropout(x, 0.4, self.training), edge_index)  # type: ignore[no-any-return]


class Trained(NamedTuple):
    """A training on this rank: in steps after the first ones, what the host did with others."""

    losses: list[float]
    gradients: list[Tensor]
    waits: list[str]
    through_host: list[late_collectives.Issued]
    gathers: dict[str, int]


def trained(name: str, mode: str, device: str) -> Trained:
    torch.manual_seed(4)
    data = fgd.shard(graph(), parts=uneven(WORLD.size), mode=mode).to(device)
    model = Model(LAYERS[name]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, waits, through_host = [], [], []
    fgd.COUNTS.reset()
    for step in range(STEPS):
        late_collectives.ISSUED.clear()
        with standin.waits() as waited, MadeOnDevice(lambda _: False):
            optimizer.zero_grad()
            out = model(data.x, data.edge_index)
            loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
            loss.backward()
            optimizer.step()
        losses.append(loss.detach())
        if step >= WARM:
            waits += waited
            through_host += [one for one in late_collectives.ISSUED if one.device != standin.DEVICE]
    gradients = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    gathers = dict(fgd.COUNTS.gathers)
    return Trained([float(x) for x in losses], gradients, waits, through_host, gathers)


def trained_on_this_rank(mode: str, is_routed: bool, device: str) -> dict[str, Trained]:
    torch.set_default_dtype(torch.float64)
    if device == standin.DEVICE:
        late_collectives.install()
    registry.DEVICE_TYPES = (*registry.DEVICE_TYPES, standin.DEVICE)  # type: ignore[assignment]
    fastgraph.disable()
    if is_routed:
        fastgraph.enable(backend="reference")
    return {name: trained(name, mode, device) for name in LAYERS}


@pytest.mark.parametrize(
    ("mode", "is_routed"), [("halo", False), ("halo", True), ("heads", True), ("grid", True)]
)
def test_models_train_on_a_device_as_on_one_process_and_the_host_waits_for_nothing(
    world_size: int, mode: str, is_routed: bool
) -> None:
    (expected,) = forks.on_ranks(trained_on_this_rank, 1, mode, is_routed, "cpu")
    for of_rank in forks.on_ranks(
        trained_on_this_rank, world_size, mode, is_routed, standin.DEVICE
    ):
        for name, found in of_rank.items():
            one = expected[name]
            assert found.losses == pytest.approx(one.losses, rel=TOLERANCE), name
            norm = sum(float(g.square().sum()) for g in one.gradients) ** 0.5
            for a, b in zip(one.gradients, found.gradients, strict=True):
                assert float((a - b).abs().max()) <= TOLERANCE * norm, name
            assert not found.gathers, name
            if is_routed:  # upstream's own layers look for self-loops in each step
                assert not found.waits, name
                # Hosts may tell each other once that all have taken two steps.
                assert [one.shape for one in found.through_host] in ([], [[2 * world_size]]), name
