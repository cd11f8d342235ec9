"""gcn against PyG's normalisation followed by gather, multiply and scatter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm

import fastgraph
from fastgraph import ops
from fastgraph.graphs.memo import MEMO, remembered
from fastgraph.graphs.normalisation import normalised_graph
from tests.graphs import Case, hub_edges, random_edges, square_cases

EDGES = random_edges(12, 12, 40)
LOOPS = torch.tensor([[3, 3, 5], [3, 3, 5]])  # two of one node


def expected(
    x: Tensor, edges: Tensor, weight: Tensor | None, loop_weight: float, transpose: bool
) -> Tensor:
    """PyG's arithmetic; its loops weigh 1 or, where edges have weights, 2."""
    flow = "target_to_source" if transpose else "source_to_target"
    (src, dst), norm = gcn_norm(
        edges.long(), weight, len(x), loop_weight == 2, loop_weight != 0, flow, x.dtype
    )
    if transpose:
        src, dst = dst, src
    message = norm.view(-1, *[1] * (x.dim() - 1)) * x[src]
    return torch.zeros_like(x).index_add(0, dst, message)


def inputs(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    x = torch.randn(case.num_src, 5, dtype=dtype, requires_grad=True)
    return x, torch.rand(case.num_edges, dtype=dtype)


@pytest.mark.parametrize("transpose", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize(
    ("weighted", "loop_weight"), [(False, 1.0), (False, 0.0), (True, 1.0), (True, 0.0), (True, 2.0)]
)
@pytest.mark.parametrize("case", square_cases(), ids=str)
def test_values_and_gradients(
    case: Case, weighted: bool, loop_weight: float, transpose: bool, backend: str
) -> None:
    x, weight = inputs(case)
    given = weight if weighted else None
    out = ops.gcn(x, case.edge_index, given, loop_weight=loop_weight, transpose=transpose)
    reference = expected(x, case.edge_index, given, loop_weight, transpose)
    torch.testing.assert_close(out, reference)
    grad = torch.randn_like(out)
    (ours,) = torch.autograd.grad(out, x, grad)
    (theirs,) = torch.autograd.grad(reference, x, grad)
    torch.testing.assert_close(ours, theirs)


def test_the_last_weight_of_a_self_loop_is_kept() -> None:
    edges = torch.cat([EDGES[:, EDGES[0] != EDGES[1]], LOOPS], dim=1)
    x, weight = torch.randn(12, 3), torch.rand(edges.shape[1])
    torch.testing.assert_close(ops.gcn(x, edges, weight), expected(x, edges, weight, 1, False))


def test_loops_of_another_weight_where_edges_have_none() -> None:
    x = torch.randn(12, 3)
    ones = torch.ones(EDGES.shape[1])
    torch.testing.assert_close(
        ops.gcn(x, EDGES, loop_weight=0.5), ops.gcn(x, EDGES, ones, loop_weight=0.5)
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_weights_are_upstreams_to_the_last_bit(weighted: bool) -> None:
    edges = hub_edges(40, 3000)
    edges = edges[:, edges[1].argsort(stable=True)]
    edges = edges[:, edges[0] != edges[1]]
    weight = torch.rand(edges.shape[1]) if weighted else None
    graph, ours = normalised_graph(edges, weight, 40, 0.0, False, torch.float32)
    assert graph.by_destination.edge_id is None
    (_, theirs) = gcn_norm(edges, weight, 40, False, False, dtype=torch.float32)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_no_larger_than_upstreams(dtype: torch.dtype, backend: str) -> None:
    case = Case("hub", hub_edges(40, 900), 40, 40)
    x, weight = inputs(case, dtype)
    out = ops.gcn(x, case.edge_index, weight)
    truth = expected(x.double(), case.edge_index, weight.double(), 1, False)
    upstream = expected(x, case.edge_index, weight, 1, False)
    assert out.dtype == dtype
    # Both round; twice upstream's own largest error leaves room for a different order of sums.
    limit = 2 * (upstream.double() - truth).abs().max() + 1e-7
    assert (out.double() - truth).abs().max() <= limit


def test_channels_of_several_dimensions(backend: str) -> None:
    x = torch.randn(12, 2, 3, dtype=torch.float64)
    torch.testing.assert_close(ops.gcn(x, EDGES), expected(x, EDGES, None, 1, False))
    assert ops.gcn(x[:, :0], EDGES).shape == (12, 0, 3)


@pytest.mark.parametrize("transpose", [False, True])
def test_derivatives_of_every_order(transpose: bool) -> None:
    edges = random_edges(4, 4, 9)
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(9, dtype=torch.float64)

    def function(x: Tensor) -> Tensor:
        return ops.gcn(x, edges, weight, transpose=transpose)

    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)


def test_opcheck() -> None:
    x = torch.randn(12, 3, requires_grad=True)
    arguments = (x, EDGES, torch.rand(40), 1.0, False, False)
    torch.library.opcheck(torch.ops.fastgraph.gcn.default, arguments)


def test_compile_with_dynamic_shapes() -> None:
    def step(x: Tensor, edges: Tensor) -> Tensor:
        return ops.gcn(x.relu(), edges) * 2

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_nodes, num_edges in ((10, 30), (17, 61)):
        edges = random_edges(num_nodes, num_nodes, num_edges)
        x = torch.randn(num_nodes, 4, requires_grad=True)
        ours = torch.autograd.grad(compiled(x, edges).square().sum(), x)
        eager = torch.autograd.grad(step(x, edges).square().sum(), x)
        torch.testing.assert_close(ours, eager)


def test_what_was_normalised_follows_edits() -> None:
    x, edges, weight = torch.randn(12, 3), EDGES.clone(), torch.rand(40)
    for edit in (None, lambda: edges[0].copy_(edges[0].flip(0)), lambda: weight.mul_(weight)):
        if edit is not None:
            edit()
        for _ in range(2):
            torch.testing.assert_close(
                ops.gcn(x, edges, weight), expected(x, edges, weight, 1, False)
            )
    given = ("normalised", normalised_graph, edges, weight, 12, 1.0, False, torch.float32)
    known = len(MEMO)
    assert remembered(*given) is remembered(*given)
    assert len(MEMO) == known  # it is what the operator remembers
    with torch.inference_mode():
        fastgraph.clear_cache()
        ops.gcn(x, edges, weight)
    ops.gcn(x.requires_grad_(), edges, weight).sum().backward()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"x": torch.ones(4, 2).long()}, ValueError, "x must be one of"),
        ({"index": torch.tensor([[0, 4], [1, 1]])}, IndexError, "index 4 in row 0, expected 0 <="),
        ({"index": torch.tensor([[0, 4], [1, 4]])}, IndexError, "index 4 in row 0, expected 0 <="),
        ({"index": torch.ones(2, 2)}, ValueError, "edge_index must be int64 or int32"),
        ({"index": torch.ones(3, 2).long()}, ValueError, r"edge_index must be \[2, num_edges\]"),
        ({"weight": torch.ones(3)}, ValueError, "weight must have one value for each of 2 edges"),
        ({"weight": torch.ones(2).double()}, ValueError, "weight must have x's dtype and device"),
        ({"weight": torch.ones(2).requires_grad_()}, ValueError, "must not require a gradient"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], text: str) -> None:
    good = {"x": torch.ones(4, 2), "index": torch.tensor([[0, 1], [1, 2]]), "weight": torch.ones(2)}
    with pytest.raises(error, match=text):
        ops.gcn(**{**good, **change})
