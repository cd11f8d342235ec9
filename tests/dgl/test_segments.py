"""The route of ``dgl.ops.segment_reduce``, and of the readouts that are made of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fastgraph
from tests.ab import arguments, assert_same
from tests.dgl.graphs import dgl

from fastgraph.dgl import segment_reduce  # isort: skip

NAME = "dgl.segment_reduce"


class Segments(nn.Module):
    def __init__(self, reduce: str) -> None:
        super().__init__()
        self.reduce = reduce

    def forward(self, lengths: Tensor, value: Tensor) -> Tensor:
        out: Tensor = dgl.ops.segment_reduce(lengths, value, self.reduce)
        return out


@pytest.fixture
def lift_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_reduce, "_LEAST_OF_SUMS", 1)
    monkeypatch.setattr(segment_reduce, "_LEAST_OF_EXTREMA", 1)


LENGTHS = [[5], [3, 0, 9, 1, 0], [0, 0, 40], [1] * 30, [0, 7, 0]]


@pytest.mark.usefixtures("lift_limits")
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3)], ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_segments(reduce: str, shape: tuple[int, ...], lengths: list[int]) -> None:
    x = torch.randn(sum(lengths), *shape)
    assert_same(Segments(reduce), arguments(torch.tensor(lengths), x), layer=NAME)


@pytest.mark.usefixtures("lift_limits")
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_the_first_of_several_extrema_gets_the_gradient(reduce: str) -> None:
    x = torch.randint(3, (60, 8)).float().requires_grad_()
    lengths, cotangent = torch.tensor([20, 0, 40]), torch.randn(3, 8)

    def gradient() -> Tensor:
        out = dgl.ops.segment_reduce(lengths, x, reduce)
        return torch.autograd.grad((out * cotangent).sum(), x)[0]

    expected = gradient()
    with fastgraph.enabled(strict=True):
        assert torch.equal(gradient(), expected)
    assert fastgraph.status().row(NAME).routed == 1


def test_readouts_of_many_nodes() -> None:
    batch = dgl.batch([dgl.rand_graph(nodes, 5) for nodes in (700, 5, 343)] * 4)
    x = torch.randn(batch.num_nodes(), 256)
    expected = dgl.nn.AvgPooling()(batch, x)
    with fastgraph.enabled(strict=True):
        torch.testing.assert_close(dgl.nn.AvgPooling()(batch, x), expected)
        for rows in (5, 6):  # one reason, and one warning, for batches of all sizes
            dgl.ops.segment_reduce(torch.tensor([2, rows - 2]), torch.randn(rows, 4))
    row = fastgraph.status().row(NAME)
    assert row.routed == 1
    assert row.reasons == {"sum of segments of fewer than 1048576 numbers has no operator": 2}


def test_wrong_lengths() -> None:
    with (
        fastgraph.enabled(),
        pytest.raises(ValueError, match=r"seglen must add up to 5, .* got 12"),
    ):
        dgl.ops.segment_reduce(torch.tensor([3, 9]), torch.randn(5, 4))
    with fastgraph.enabled(), pytest.raises(dgl.DGLError, match="not recognized"):
        dgl.ops.segment_reduce(torch.tensor([3, 2]), torch.randn(5, 4), "foo")
