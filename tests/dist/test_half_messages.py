"""Messages of half types, of several dtypes and under autocast on ranks, judged in float64."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor

import fastgraph
import fastgraph.dist as fgd
from fastgraph.dist.ranks.world import WORLD
from tests.dist.graphs import NUM_FEATURES, PARTITIONS, graph
from tests.dist.test_any_message import OfEdges, OfTypes, gated, kinds_of, of_types, own

D, C = NUM_FEATURES, 3
BFLOAT, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32

Call = Callable[[Any, Any], Tensor]


def mixed(self: Any, x_j: Tensor, edge_attr: Tensor, scale: Tensor) -> Tensor:
    return x_j * edge_attr[:, :1] * scale.float()


def plain(layer: Any, d: Any) -> Tensor:
    return layer(d.x, d.edge_index)


def with_wide_edges(layer: Any, d: Any) -> Tensor:
    """The features of edges have a wider dtype, which the result has, too."""
    return layer(d.x, d.edge_index, d.edge_attr.to(torch.promote_types(d.x.dtype, FLOAT)))


def featured(layer: Any, d: Any) -> Tensor:
    return layer(d.x, d.edge_index, d.edge_attr)


def with_kinds(layer: Any, d: Any) -> Tensor:
    return layer(d.x, d.edge_index, kinds_of(d))


LAYERS: dict[str, tuple[Callable[[], Any], Call]] = {
    "ResGated": (lambda: gnn.ResGatedGraphConv(D, C), plain),
    "ResGated, features": (lambda: gnn.ResGatedGraphConv(D, C, edge_dim=3), featured),
    "GEN, softmax": (lambda: gnn.GENConv(D, C, learn_t=True), plain),
    "CG, max": (lambda: gnn.CGConv(D, aggr="max"), plain),
    "own, gated": (own(gated, ["mean", "sum"]), plain),
    "own, mixed": (own(mixed, base=OfEdges), with_wide_edges),
    "own, of types": (own(of_types, base=OfTypes), with_kinds),
}


class Found(NamedTuple):
    """Of one layer in one precision.

    Attributes:
        errors: ours and upstream's largest, for the result and each gradient.
        dtypes: ours and upstream's.
        routed: how many calls took their route.
        reasons: why others did not.
        gathers: what was gathered.
    """

    errors: list[tuple[float, float]]
    dtypes: tuple[list[torch.dtype], list[torch.dtype]]
    routed: int
    reasons: list[str]
    gathers: dict[str, int]


def results(layer: Any, call: Call, data: Any, autocast: bool) -> list[Tensor]:
    """The result, and the gradients of the features and of parameters that have one."""
    data.x.requires_grad_()
    under = torch.autocast("cpu", BFLOAT) if autocast else contextlib.nullcontext()
    with under:
        out = call(layer, data)
    g = torch.Generator().manual_seed(7)
    weights = torch.randn(out.shape, generator=g, dtype=torch.float64)
    (out * weights.to(out.dtype)).sum().backward()
    grads = [data.x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]
    return [fgd.whole(t).detach() for t in (out, *grads) if t is not None]


def found_for(make: Callable[[], Any], call: Call, dtype: torch.dtype, autocast: bool) -> Found:
    torch.manual_seed(0)
    layer = make().to(dtype)

    def data(of: torch.dtype) -> Any:
        made = graph()
        made.x, made.edge_attr = (t.to(dtype).to(of) for t in (made.x, made.edge_attr))
        return made

    fastgraph.disable()
    exact = results(copy.deepcopy(layer).double(), call, data(torch.float64), False)
    upstream = results(copy.deepcopy(layer), call, data(dtype), autocast)
    sharded = fgd.shard(data(dtype), parts=PARTITIONS["uneven"](WORLD.size), mode="halo")
    fastgraph.enable()
    fastgraph.status().reset()
    fgd.COUNTS.reset()
    with fastgraph.enabled(min_edges=0):
        ours = results(copy.deepcopy(layer), call, sharded, autocast)
    gathers = dict(fgd.COUNTS.gathers)
    row = fastgraph.status().row(type(layer).__name__)
    fastgraph.disable()
    errors = [
        tuple(float((t.double() - e).abs().max() / (1 + e.abs().max())) for t in (a, b))
        for a, b, e in zip(ours, upstream, exact, strict=True)
    ]
    dtypes = [t.dtype for t in ours], [t.dtype for t in upstream]
    return Found(errors, dtypes, row.routed, list(row.reasons), gathers)  # type: ignore[arg-type]


NOTHING_TO_CONVERT = ("own, mixed", "autocast")
KINDS = {"bfloat16": (BFLOAT, False), "float16": (HALF, False), "autocast": (FLOAT, True)}
CASES = [(name, kind) for name in LAYERS for kind in KINDS if (name, kind) != NOTHING_TO_CONVERT]


def on_this_rank() -> dict[tuple[str, str], Found]:
    return {(name, kind): found_for(*LAYERS[name], *KINDS[kind]) for name, kind in CASES}


@pytest.fixture(scope="module")
def found(world_size: int, once_on_ranks: Any) -> list[dict[tuple[str, str], Found]]:
    on_ranks: list[dict[tuple[str, str], Found]] = once_on_ranks(on_this_rank, world_size)
    return on_ranks


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_errors_are_upstreams(
    found: list[dict[tuple[str, str], Found]], name: str, kind: str
) -> None:
    eps = torch.finfo(HALF if kind == "float16" else BFLOAT).eps
    for of_rank in found:
        case = of_rank[name, kind]
        assert (case.routed, case.reasons, case.gathers) == (1, [], {})
        assert case.dtypes[0] == case.dtypes[1]
        for error, own_error in case.errors:
            # Of half types either may happen to round a value to its neighbour.
            assert error <= 2 * own_error + eps
