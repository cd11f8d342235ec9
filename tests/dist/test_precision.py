"""Message passing in bfloat16 on some of the ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn

import fastgraph
import fastgraph.dist as fgd
from fastgraph import ops
from fastgraph.dist.balance import first_epochs
from fastgraph.dist.balance.automatic import reduce_as_measured
from fastgraph.dist.balance.first_epochs import FirstEpochs
from fastgraph.dist.operators import precision
from fastgraph.dist.ranks.phases import Phases, overloaded
from fastgraph.dist.ranks.world import WORLD
from tests.dist.comparing import deviation
from tests.dist.graphs import NUM_FEATURES, NUM_NODES, graph
from tests.dist.test_fused import HALVES, by_halves
from tests.dist.test_rebalance import clock, error_of

D, C, H = NUM_FEATURES, 4, 2

# Operands and results are rounded by 2^-9 of their size, scores before their exponential, too.
TOLERANCE = 2**-6

LAYERS = {
    "GCN": lambda: gnn.GCNConv(D, C),
    "SAGE": lambda: gnn.SAGEConv(D, C),
    "SAGE, max": lambda: gnn.SAGEConv(D, C, "max"),
    "GAT": lambda: gnn.GATConv(D, C, H),
    "GAT, dropout": lambda: gnn.GATConv(D, C, H, dropout=0.3),
    "GATv2": lambda: gnn.GATv2Conv(D, C, H, edge_dim=3),
    "Transformer": lambda: gnn.TransformerConv(D, C, H),
}

OPERATORS = {
    "sddmm": lambda d: ops.sddmm(d.x.view(-1, 2, 4), d.x.view(-1, 2, 4) + 1, d.edge_index),
    "edge_program": lambda d: ops.edge_program(
        "x = gathered 8\nw = edge 3\nt0 = fold w 1\nt1 = mul x t0\nsum t1",
        {"x": d.x, "w": d.edge_attr},
        d.edge_index,
    )[0],
    "edge_softmax": lambda d: ops.edge_softmax(d.edge_attr, d.edge_index, num_out=NUM_NODES),
}


def results(data: Any, name: str) -> dict[str, Tensor]:
    """The rows of this rank, then gradients of parameters and of features."""
    if name in OPERATORS:
        return {"rows": OPERATORS[name](data).local}
    torch.manual_seed(0)
    layer, x = LAYERS[name](), data.x.detach().clone().requires_grad_()
    edge_attr = [data.edge_attr] if name == "GATv2" else []
    out = layer(x, data.edge_index, *edge_attr)
    out.square().sum().backward()
    grads = {key: p.grad for key, p in layer.named_parameters() if p.grad is not None}
    return {"rows": out.detach().local, "x": x.grad.local, **grads}


def all_results(data: Any) -> dict[str, dict[str, Tensor]]:
    return {name: results(data, name) for name in (*LAYERS, *OPERATORS)}


def work_on_ranks() -> dict[str, Any]:
    fastgraph.enable()
    data = fgd.shard(graph(), method="even")
    found: dict[str, Any] = {"never": all_results(data)}
    found["decided"] = fgd.reduce_precision(ranks=[1])
    fgd.COUNTS.reset()
    found["reduced"] = all_results(data)
    found["counted"] = dict(fgd.COUNTS.precision)
    found["table"] = str(fastgraph.status())
    fgd.COUNTS.reset()
    found["double"] = ops.spmm(data.x.double(), data.edge_index).dtype
    found["counted double"] = dict(fgd.COUNTS.precision)
    fgd.reduce_precision(ranks=[])
    found["no more"] = all_results(data)
    fgd.reduce_precision(ranks=[1])
    by_halves(HALVES["one is empty"])
    fgd.COUNTS.reset()
    found["by halves"] = results(data, "GAT")["rows"]
    found["halo"] = dict(fgd.COUNTS.halo)
    found["measured"] = measured(data)
    found["script"] = script()
    found["errors"] = errors(data)
    return found


def measured(data: Any) -> Any:
    with clock() as ours, fgd.measured(data) as balance:
        ours.compute(0.6, 0.2)
    lacking = "no such instructions" if WORLD.rank == 0 else None
    with mock.patch.object(precision, "why_not_here", return_value=lacking):
        refused = fgd.reduce_precision(balance), precision.PRECISION.is_reduced
    return fgd.reduce_precision(balance), fgd.reduce_precision(balance, threshold=1.6), refused


def script() -> list[bool]:
    """True if the precision of this rank is reduced, before and after the first epochs."""
    first_epochs._SECONDS = 0.0
    data = fgd.shard(graph(), method="even")
    seen: list[Any] = []
    watching = FirstEpochs([lambda _, balance: seen.append(balance), reduce_as_measured])
    watching.watch(data)
    weight = nn.Parameter(torch.ones(D))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    found = []
    with clock() as ours:
        for _ in range(21):
            found.append(precision.PRECISION.is_reduced)
            ours.compute(0.3, 0.1)
            optimizer.zero_grad()
            (data.x * weight).mean().backward()
            optimizer.step()
    assert len(seen) == 1
    fgd.reduce_precision(ranks=[])
    return found


def errors(data: Any) -> list[str]:
    with fgd.measured(data) as balance:
        during = error_of(lambda: fgd.reduce_precision(balance))
    return [
        during,
        error_of(lambda: fgd.reduce_precision()),
        error_of(lambda: fgd.reduce_precision(balance, ranks=[0])),
        error_of(lambda: fgd.reduce_precision(balance, threshold=0.5)),
        error_of(lambda: fgd.reduce_precision(ranks=[2])),
        error_of(lambda: fgd.reduce_precision(ranks=[WORLD.rank])),
    ]


@pytest.fixture(scope="module")
def found(once_on_ranks: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = once_on_ranks(work_on_ranks, 2)
    return found


def phases(*compute: float) -> list[Phases]:
    return [Phases(seconds, 0.1, 0.2) for seconds in compute]


def test_ranks_are_overloaded_beyond_the_mean() -> None:
    assert overloaded(phases(1, 1, 1)) == []
    assert overloaded(phases(3, 1, 2.5, 1)) == [0, 2]
    assert overloaded(phases(3, 1, 2.5, 1), threshold=1.5) == [0]
    assert overloaded(phases(1.1, 0.9)) == []  # not beyond the threshold
    assert overloaded(phases(0, 0)) == []


@pytest.mark.parametrize("name", [*LAYERS, *OPERATORS])
def test_rows_of_other_ranks_stay_as_they_are(found: list[dict[str, Any]], name: str) -> None:
    for rank, of_rank in enumerate(found):
        before, after = of_rank["never"][name], of_rank["reduced"][name]
        assert before.keys() == after.keys()
        assert torch.equal(before["rows"], after["rows"]) == (rank == 0)
        # Gradients that are left when larger ones cancel have the errors of these.
        largest = max(float(x.abs().max()) for x in before.values())
        for key, x in before.items():
            scale = float(x.abs().max()) if key == "rows" else largest
            wrong = deviation(x, after[key], TOLERANCE, scale)
            assert wrong == "", f"{key} {wrong}"
        assert all(torch.equal(x, of_rank["no more"][name][key]) for key, x in before.items())


def test_calls_are_counted_where_they_are_in_bfloat16(found: list[dict[str, Any]]) -> None:
    calls = len(LAYERS) + len(OPERATORS)
    assert [of_rank["counted"] for of_rank in found] == [{}, {"torch.bfloat16": calls}]
    assert "overloaded rank" in found[1]["table"] and "overloaded rank" not in found[0]["table"]
    doubles = [{}, {"torch.float64, as the operands are": 1}]
    assert [of_rank["counted double"] for of_rank in found] == doubles
    assert found[1]["double"] == torch.float64


def test_parts_that_are_computed_meanwhile_have_the_same_bits(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert list(of_rank["halo"]) == ["rows without the halo"]
        assert torch.equal(of_rank["by halves"], of_rank["reduced"]["GAT"]["rows"])


def test_all_ranks_decide_alike(found: list[dict[str, Any]]) -> None:
    for rank, of_rank in enumerate(found):
        assert of_rank["decided"] == fgd.ReducedPrecision((1,), {})
        done, none, (refused, is_reduced) = of_rank["measured"]
        assert done == fgd.ReducedPrecision((0,), {})
        assert none == fgd.ReducedPrecision((), {})
        assert refused == fgd.ReducedPrecision((), {0: "no such instructions"})
        assert not is_reduced
        # Five steps to warm up and five that are measured, twice.
        assert of_rank["script"] == [False] * 20 + [rank == 0]


def test_bad_arguments(found: list[dict[str, Any]]) -> None:
    messages = [
        "ValueError: balance must be complete",
        "ValueError: either balance or ranks must be given",
        "ValueError: either balance or ranks must be given",
        "ValueError: threshold must be at least 1, got 0.5",
        "ValueError: ranks must be numbers from 0 to 1, got [2]",
        "ValueError: ranks must be the same on all ranks, got [[0], [1]]",
    ]
    for of_rank in found:
        for error, message in zip(of_rank["errors"], messages, strict=True):
            assert error.startswith(message)


def test_old_processors_gain_nothing() -> None:
    with mock.patch.object(precision.native, "cpu_level", return_value="baseline"):
        assert "AVX2" in (precision.why_not_here() or "")
    with mock.patch.object(precision.native, "cpu_level", return_value="avx2"):
        assert precision.why_not_here() is None
