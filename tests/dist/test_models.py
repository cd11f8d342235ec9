"""Losses, gradients and parameters of training steps, beside those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor
from torch_geometric.data import Data, HeteroData

import fastgraph
import fastgraph.dist as fgd
from fastgraph.dist.ranks.world import WORLD
from tests import forks
from tests.dist.graphs import NUM_CLASSES, NUM_FEATURES, PARTITIONS, graph

STEPS = 3  # where nothing else is said
HIDDEN = 6
# Of the norm of all gradients, which differ by the order of sums alone.
TOLERANCE = 1e-12
# Of parameters and statistics after all steps of plain gradient descent. Adam would make full steps
# of the rounding errors of gradients that are zero (those of a bias before a batch norm).
STATE_TOLERANCE = 1e-12


def perceptron(inputs: int, outputs: int) -> torch.nn.Module:
    return gnn.MLP([inputs, HIDDEN, outputs], norm="batch_norm")


LAYERS: dict[str, Callable[[int, int], torch.nn.Module]] = {
    "GCN": gnn.GCNConv,
    "SAGE": gnn.SAGEConv,
    "GAT": lambda i, o: gnn.GATConv(i, o, heads=2, concat=False, dropout=0.3),
    "GATv2": lambda i, o: gnn.GATv2Conv(i, o, heads=2, concat=False),
    "Transformer": lambda i, o: gnn.TransformerConv(i, o, heads=2, concat=False),
    "GIN": lambda i, o: gnn.GINConv(perceptron(i, o), train_eps=True),
    "APPNP": lambda i, o: Propagated(i, o),
}


class Propagated(torch.nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(inputs, outputs)
        self.propagation = gnn.APPNP(3, 0.1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagation(self.linear(x), edge_index)


class Model(torch.nn.Module):
    def __init__(self, layer: Callable[[int, int], torch.nn.Module]) -> None:
        super().__init__()
        self.first = layer(NUM_FEATURES, HIDDEN)
        self.norm = torch.nn.BatchNorm1d(HIDDEN)
        self.second = layer(HIDDEN, NUM_CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.dropout(x, 0.4, self.training)
        x = self.norm(self.first(x, edge_index)).relu()
        x = F.dropout(x, 0.4, self.training)
        return self.second(x, edge_index)


class Run(NamedTuple):
    losses: list[float]
    gradients: list[Tensor]
    state: list[Tensor]
    accuracy: float
    gathers: dict[str, int]


def train(name: str, data: Data, steps: int = STEPS) -> Run:
    torch.manual_seed(4)
    model = Model(LAYERS[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    gradients: list[Tensor] = []
    fgd.COUNTS.reset()
    for _ in range(steps):
        model.train()
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        if not gradients:
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        losses.append(float(loss.detach()))
    model.eval()
    with torch.no_grad():
        correct = model(data.x, data.edge_index).argmax(-1) == data.y
        accuracy = float(correct.double().mean())
    state = [value.detach().clone() for value in model.state_dict().values()]
    return Run(losses, gradients, state, accuracy, dict(fgd.COUNTS.gathers))


def difference(expected: Run, found: Run) -> str:
    norm = sum(float(grad.square().sum()) for grad in expected.gradients) ** 0.5
    off = {
        "losses": max(abs(a - b) for a, b in zip(expected.losses, found.losses, strict=True)),
        "gradients": max(
            float((a - b).abs().max()) / norm
            for a, b in zip(expected.gradients, found.gradients, strict=True)
        ),
    }
    last = max(
        float((a.double() - b.double()).abs().max())
        for a, b in zip(expected.state, found.state, strict=True)
    )
    wrong = [f"{key} are off by {value:.1e}" for key, value in off.items() if value > TOLERANCE]
    if last > STATE_TOLERANCE:
        wrong.append(f"the state after the last step is off by {last:.1e}")
    if expected.accuracy != found.accuracy:
        wrong.append(f"accuracy {found.accuracy}, expected {expected.accuracy}")
    if found.gathers:
        wrong.append(f"gathered for {found.gathers}")
    return "; ".join(wrong)


# One of sums, of weights that are normalised, and of several steps.
IN_ALL_LAYOUTS = {"SAGE", "GAT", "APPNP"}


def layouts(name: str, enabled: bool, exhaustive: bool) -> dict[str, Callable[[int], Tensor]]:
    """Fused layers meet all partitions elsewhere, so one is enough here when they are enabled."""
    several = not enabled and (exhaustive or name in IN_ALL_LAYOUTS)
    return PARTITIONS if several else {"uneven": PARTITIONS["uneven"]}


def compare_on_this_rank(steps: int, exhaustive: bool) -> dict[str, str]:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    WORLD.random = "exact"
    found = {}
    for enabled in (False, True):
        for name in LAYERS:
            expected = train(name, graph(), steps)
            for layout, parts in layouts(name, enabled, exhaustive).items():
                data = fgd.shard(graph(), parts=parts(WORLD.size))
                (fastgraph.enable if enabled else fastgraph.disable)()
                found[f"{name}, {layout}, {'' if enabled else 'not '}enabled"] = difference(
                    expected, train(name, data, steps)
                )
                fastgraph.disable()
    found["heterogeneous"] = heterogeneous()
    return found


def random_by_rows() -> tuple[list[list[float]], dict[str, Tensor]]:
    """Losses of upstream's training and of ours, and samples, with random numbers by global row."""
    torch.set_default_dtype(torch.float64)
    data = fgd.shard(graph(), parts=PARTITIONS["uneven"](WORLD.size))
    losses = [train("GAT", data).losses]
    with fastgraph.enabled():
        losses.append(train("GAT", data).losses)
    torch.manual_seed(0)
    drawn = {
        "rand_like": torch.rand_like(data.x),
        "randn_like": torch.randn_like(data.x),
        "uniform_": torch.empty_like(data.x).uniform_(),
        "normal_": torch.empty_like(data.x).normal_(),
    }
    return losses, {name: fgd.whole(x) for name, x in drawn.items()}


def heterogeneous() -> str:
    g = torch.Generator().manual_seed(0)
    data = HeteroData()
    data["paper"].x = torch.randn(20, 5, generator=g)
    data["author"].x = torch.randn(9, 4, generator=g)
    edges = torch.stack([torch.randint(0, 9, (50,), generator=g), torch.arange(50) % 20])
    data["author", "writes", "paper"].edge_index = edges
    data["paper", "by", "author"].edge_index = edges.flip(0)
    sharded = fgd.shard(data, parts=torch.arange(29) % 5 % WORLD.size)
    torch.manual_seed(0)
    layer = gnn.HeteroConv(
        {
            ("author", "writes", "paper"): gnn.SAGEConv((4, 5), 3),
            ("paper", "by", "author"): gnn.GATv2Conv((5, 4), 3, add_self_loops=False),
        }
    )
    runs = []
    for graph_ in (data, sharded):
        layer.zero_grad()
        out = layer(graph_.x_dict, graph_.edge_index_dict)
        loss = sum((x * x).mean() for x in out.values())
        loss.backward()
        gradients = [p.grad.clone() for p in layer.parameters()]
        runs.append(Run([float(loss.detach())], gradients, gradients, 0.0, {}))
    return difference(*runs)


@pytest.fixture(scope="module")
def found(world_size: int, once_on_ranks: Any, pytestconfig: pytest.Config) -> list[dict[str, str]]:
    given = pytestconfig.getoption("--steps"), pytestconfig.getoption("--exhaustive")
    found: list[dict[str, str]] = once_on_ranks(compare_on_this_rank, world_size, *given)
    return found


CASES = [
    pytest.param(
        f"{name}, {layout}, {'' if enabled else 'not '}enabled",
        marks=() if layout in layouts(name, enabled, False) else pytest.mark.exhaustive,
    )
    for name in LAYERS
    for enabled in (False, True)
    for layout in layouts(name, enabled, True)
]


@pytest.mark.parametrize("case", [*CASES, "heterogeneous"])
def test_training_is_that_of_one_process(found: list[dict[str, str]], case: str) -> None:
    for rank, of_rank in enumerate(found):
        assert not of_rank[case], f"rank {rank}: {of_rank[case]}"


def test_random_numbers_do_not_depend_on_the_number_of_ranks() -> None:
    (of_one, drawn), (of_ranks, drawn_by_ranks) = (
        forks.on_ranks(random_by_rows, size)[0] for size in (1, 3)
    )
    # Of weights ours drops others than upstream's with one seed, as without ranks.
    for expected, losses in zip(of_one, of_ranks, strict=True):
        assert len(set(expected)) == STEPS
        assert losses == pytest.approx(expected, rel=TOLERANCE)
    for name, x in drawn.items():
        assert torch.equal(x, drawn_by_ranks[name]), name
        mean, deviation = (0.5, 12**-0.5) if name in ("rand_like", "uniform_") else (0.0, 1.0)
        # Five standard errors of so many numbers.
        assert abs(float(x.mean()) - mean) < 5 * deviation / x.numel() ** 0.5, name
        assert abs(float(x.std()) - deviation) < 5 * deviation / x.numel() ** 0.5, name
