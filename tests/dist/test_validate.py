"""A model on ranks beside one process: what is right is found right, what is wrong is named."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import BatchNorm, GATConv, GCNConv, Linear

import fastgraph.dist as fgd
from tests.dist.graphs import NUM_CLASSES, NUM_FEATURES, graph


class Right(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = GATConv(NUM_FEATURES, 3, heads=2, dropout=0.2)
        self.norm = BatchNorm(6)
        self.second = GCNConv(6, NUM_CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x, edge_index)).relu(), edge_index)


def wrong() -> nn.Module:
    """A model that takes means of what each rank holds, and sorts, for which there is no rule."""

    class Wrong(nn.Module):
        """Is sent by value, as what a script defines."""

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.unused = nn.Linear(NUM_FEATURES, NUM_CLASSES), nn.Linear(1, 1)

        def forward(self, x: Tensor, edge_index: Tensor) -> dict[str, Tensor]:
            own = x.local if fgd.is_sharded(x) else x
            if fgd.is_sharded(x):
                x = x + 0 * self.unused.weight
            x = x.sort(0).values
            return {"out": self.linear(x) + own[: len(own) // 2].mean(0)[:NUM_CLASSES]}

    return Wrong()


def line_of(text: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(i for i, line in enumerate(lines, 1) if text in line)}"


@pytest.mark.usefixtures("forking_interpreter")
def test_what_is_right() -> None:
    model, data = Right(), graph()
    before = [parameter.clone() for parameter in model.parameters()]
    found = fgd.validate(model, data, steps=2, mode="heads")
    assert found.ok, found
    assert found.raise_if_different() is found
    kinds = {(x.kind, x.name) for x in found.tensors}
    assert {("loss", "loss"), ("output", "output")} <= kinds
    for name, _ in model.named_parameters():
        assert {("gradient", name), ("state", name)} <= kinds
    assert ("state", "norm.module.num_batches_tracked") in kinds
    assert 0 < found.worst.difference < 1e-12  # sums are in another order
    assert found.gathers == () and found.sent > 0
    assert "Right on 2 ranks, 2 steps in float64: as on one process" in str(found)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert data.x.dtype == torch.float32


@pytest.mark.usefixtures("forking_interpreter")
def test_what_is_wrong() -> None:
    loss = lambda out, data: out["out"].square().mean()  # noqa: E731
    found = fgd.validate(wrong(), graph(), loss=loss, steps=1)
    assert not found.ok
    assert {x.name for x in found.different} >= {"loss", "output['out']", "linear.weight"}
    (extra,) = [x for x in found.different if x.name == "unused.weight"]
    assert (extra.kind, extra.difference) == ("gradient", float("inf"))
    assert "loss loss, on rank 1" in found.disagreeing
    sorted_at = line_of("x = x.sort(0).values")
    (gather,) = [gather for gather in found.gathers if gather.operation == "sort"]
    assert (gather.line, gather.times) == (sorted_at, 1)
    text = str(found)
    assert "DIFFERS FROM ONE PROCESS" in text and sorted_at.rpartition("/")[2] in text
    with pytest.raises(fgd.DifferenceError, match="DIFFERS FROM ONE PROCESS"):
        found.raise_if_different()


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"model": 1}, TypeError, "model must be a torch.nn.Module, got int"),
        ({"data": 1}, TypeError, "data must be a Data or HeteroData of PyG, or a DGLGraph"),
        ({"data": HeteroData()}, ValueError, "loss must be given"),
        ({"model": Linear(-1, 2)}, ValueError, "model must have been called once"),
        ({"steps": 0}, ValueError, "steps: expected an integer of at least 1, got 0"),
        ({"world_size": 0}, ValueError, "world_size: expected an integer of at least 1, got 0"),
        ({"steps": 2.0}, ValueError, "steps: expected an integer of at least 1, got 2.0"),
        ({"world_size": "2"}, ValueError, "world_size: expected an integer of at least 1, got '2'"),
        ({"tolerance": 0.0}, ValueError, "tolerance: expected a number above 0, got 0.0"),
        ({"timeout": None}, ValueError, "timeout: expected a number above 0, got None"),
        ({"learning_rate": "x"}, ValueError, "learning_rate: expected a number of at least 0"),
        ({"loss": 1}, TypeError, "loss: expected a function or None, got 1"),
        ({"forward": "x"}, TypeError, "forward: expected a function or None, got 'x'"),
        ({"weights": 2}, TypeError, "weights must be 2 numbers above 0, got 2"),
    ],
)
def test_bad_arguments(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"model": Right(), "data": graph(), **changed}
    with pytest.raises(error, match=re.escape(message)):
        fgd.validate(**arguments)


def test_what_cannot_be_sent() -> None:
    model = Right()
    model.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"model must be something that can be pickled.*lock"):
        fgd.validate(model, graph())
