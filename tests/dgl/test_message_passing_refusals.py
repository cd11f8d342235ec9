"""Message passing that runs DGL's own code, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastgraph
from tests.dgl.graphs import ORDINARY, dgl, of_case
from tests.dgl.test_message_passing import GSDDMM, GSPMM, SOFTMAX

from dgl.nn.functional import edge_softmax  # isort: skip

REFUSALS: list[tuple[str, Callable[[Any], Any], str, str]] = [
    (
        GSPMM,
        lambda g: dgl.ops.u_mul_e_sum(g, torch.rand(30, 3, 2), torch.rand(150, 3, 2)),
        "have no operator",
        "per channel",
    ),
    (
        GSPMM,
        lambda g: dgl.ops.u_mul_e_sum(g, torch.rand(30, 1, 4), torch.rand(150, 3, 1)),
        "have no operator",
        "heads of edges alone",
    ),
    (
        GSPMM,
        lambda g: dgl.ops.u_mul_e_sum(g, torch.rand(30, 3, 7), torch.rand(150, 3, 1)),
        "products of features of shapes [3, 7] and [3, 1] have no operator",
        "few channels",
    ),
    (
        GSPMM,
        lambda g: dgl.ops.copy_e_sum(g, torch.rand(150, 15).requires_grad_()),
        "sum of 15 channels of edges has no operator",
        "few channels of edges",
    ),
    (
        GSPMM,
        lambda g: dgl.ops.copy_e_sum(g, torch.rand(150, 127)),
        "sum of 127 channels of edges has no operator",
        "channels of edges without gradients",
    ),
    (
        GSPMM,
        lambda g: dgl.ops.u_mul_e_sum(g, torch.rand(30, 3), torch.rand(150, 1).requires_grad_()),
        "sum of 3 channels by learned weights has no operator",
        "learned weights of few channels",
    ),
    (GSPMM, lambda g: dgl.ops.u_add_e_sum(g, *features(30, 150)), "sum of add", "u_add_e sum"),
    (GSPMM, lambda g: dgl.ops.u_add_e_max(g, *features(30, 150)), "max of add", "u_add_e"),
    (GSPMM, lambda g: dgl.ops.u_mul_e_max(g, *features(30, 150)), "max of mul", "u_mul_e max"),
    (GSDDMM, lambda g: dgl.ops.u_add_v(g, *features(30, 30)), "add of u and v", "u_add_v"),
    (GSDDMM, lambda g: dgl.ops.u_mul_v(g, *features(30, 30)), "mul of u and v", "u_mul_v"),
    (GSDDMM, lambda g: dgl.ops.e_dot_v(g, *features(150, 30)), "dot of e and v", "e_dot_v"),
    (
        GSDDMM,
        lambda g: dgl.ops.u_dot_v(g, torch.rand(30, 1, 3), torch.rand(30, 2, 3)),
        "features of shapes [1, 3] and [2, 3] have no operator",
        "heads of one end",
    ),
    (
        GSDDMM,
        lambda g: dgl.ops.u_dot_v(g, torch.rand(30), torch.rand(30)),
        "features of shapes [] and [] have no operator",
        "numbers of nodes",
    ),
    (
        GSDDMM,
        lambda g: dgl.ops.u_dot_v(g, torch.rand(30, 2, 7).requires_grad_(), torch.rand(30, 2, 7)),
        "dot products of features [2, 7] have no operator",
        "dot products of few channels",
    ),
    (
        GSDDMM,
        lambda g: dgl.ops.u_dot_v(g, torch.rand(30, 31), torch.rand(30, 31)),
        "dot products of features [31] have no operator",
        "dot products without gradients",
    ),
    (
        SOFTMAX,
        lambda g: edge_softmax(g, torch.rand(150, 1)),
        "softmax of single scores over few edges",
        "single scores",
    ),
    (
        SOFTMAX,
        lambda g: edge_softmax(g, torch.rand(2, 1), eids=torch.tensor([3, 5])),
        "softmax of some of the edges",
        "some edges",
    ),
]


def features(*rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(count, 3, generator=generator) for count in rows]


@pytest.mark.parametrize(
    ("name", "call", "reason"), [r[:3] for r in REFUSALS], ids=[r[3] for r in REFUSALS]
)
def test_other_functions_run_dgls_code(name: str, call: Any, reason: str) -> None:
    g = of_case(ORDINARY)
    torch.manual_seed(5)
    expected = call(g)
    torch.manual_seed(5)
    with fastgraph.enabled(strict=True):  # which is not for what has no route
        out = call(g)
    assert torch.equal(out, expected)
    row = fastgraph.status().row(name)
    assert row.routed == 0 and row.fell_back == 1
    assert reason in next(iter(row.reasons))


def test_what_dgl_refuses_is_refused_by_dgl() -> None:
    g, x, wide = of_case(ORDINARY), torch.rand(30, 4), torch.rand(30, 32)
    with fastgraph.enabled():
        with pytest.raises(dgl.DGLError, match="doesn't match"):
            dgl.ops.u_mul_e_sum(g, x, torch.rand(150, 1).double())
        with pytest.raises(dgl.DGLError):
            dgl.ops.copy_u_sum(g, torch.ones(30, 3, dtype=torch.int64))
        with pytest.raises(dgl.DGLError):
            dgl.ops.copy_u_sum(g, torch.rand(29, 3))
        with pytest.raises(dgl.DGLError, match="don't match"):
            dgl.ops.u_dot_v(g, wide, wide.double())
        with pytest.raises(dgl.DGLError):
            dgl.ops.u_dot_v(g, wide, torch.rand(29, 32))
        with pytest.raises(dgl.DGLError):
            dgl.ops.u_dot_v(g, x, torch.rand(30, 5))
    row = fastgraph.status().row(GSPMM)
    assert (row.routed, row.fell_back, len(row.reasons)) == (0, 3, 3)
    row = fastgraph.status().row(GSDDMM)
    assert (row.routed, row.fell_back, len(row.reasons)) == (0, 3, 3)


def test_formats_without_csc_run_dgls_code() -> None:
    g, x = of_case(ORDINARY), torch.randn(30, 4)
    expected = dgl.ops.copy_u_sum(g, x)
    with fastgraph.enabled():
        torch.testing.assert_close(dgl.ops.copy_u_sum(g.formats("coo"), x), expected)
    (reason,) = fastgraph.status().row(GSPMM).reasons
    assert reason == "a graph that is restricted to formats without CSC"


def test_strict_raises_for_what_has_a_route() -> None:
    g = of_case(ORDINARY)
    with (
        fastgraph.enabled(strict=True, min_edges=151),
        pytest.raises(fastgraph.RouteRefusedError, match=r"dgl\.gspmm .* min_edges=151"),
    ):
        dgl.ops.copy_u_sum(g, torch.rand(30, 3))


def test_autocast_runs_dgls_code() -> None:
    call = of_case(ORDINARY), torch.rand(30, 3)
    with fastgraph.enabled(), torch.autocast("cpu", torch.bfloat16):
        assert dgl.ops.copy_u_sum(*call).dtype == torch.float32
    (reason,) = fastgraph.status().row(GSPMM).reasons
    assert reason.startswith("under autocast")


class Changing(TorchDispatchMode):
    """Changes what is gathered, where torch computes on graphs in place of DGL's C++."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 1.5 if func._schema.name in ("aten::mul", "aten::tanh") else found


@pytest.mark.parametrize("is_builtin", [True, False])
def test_modes_of_torch_meet_dgls_operations(is_builtin: bool) -> None:
    g = of_case(ORDINARY)
    x, w = features(g.num_nodes(), g.num_edges())
    w = w[:, :1]

    def tanh(edges: Any) -> dict[str, Tensor]:
        return {"m": torch.tanh(edges.src["h"] * edges.data["w"])}

    message = dgl.function.u_mul_e("h", "w", "m") if is_builtin else tanh

    def call() -> Tensor:
        with g.local_scope():
            g.ndata["h"], g.edata["w"] = x, w
            g.update_all(message, dgl.function.sum("m", "o"))
            out: Tensor = g.ndata["o"]
            return out

    with Changing():
        expected = call()
    with fastgraph.enabled(min_edges=0):
        fastgraph.status().reset()
        with Changing():
            found = call()
        rows = fastgraph.status().rows
    assert sum(row.routed for row in rows) == 0
    reasons = {reason for row in rows for reason in row.reasons}
    assert "a mode of torch looks at all operations" in reasons
    torch.testing.assert_close(found, expected)
