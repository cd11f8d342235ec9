"""The operator gat_with_scores against the two that it joins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastgraph import ops
from tests.graphs import Case, all_cases, hub_edges, random_edges
from tests.ops.test_heads import both, error_ratios, upstream, with_gradients

SQUARE = [case for case in all_cases() if case.num_src == case.num_dst]


def inputs_of(case: Case, heads: int = 2, channels: int = 5) -> list[Tensor]:
    """x, att, the scores of the edges and an addend."""
    shapes = ((case.num_src, heads, channels), (2, heads, channels), (case.num_edges, heads))
    return [torch.randn(shape, dtype=torch.float64) for shape in (*shapes, (1, heads, channels))]


def joined(inputs: list[Tensor], case: Case, **options: Any) -> Tensor:
    x, att, score_edge, addend = inputs
    options |= {"score_edge": score_edge, "addend": addend, "need_weights": True}
    out, alpha, _ = ops.gat_with_scores(x, att, case.edge_index, **options)
    assert alpha is not None
    return both((out, alpha))


def apart(inputs: list[Tensor], case: Case, **options: Any) -> Tensor:
    x, att, score_edge, addend = inputs
    options |= {"score_edge": score_edge, "addend": addend, "need_weights": True}
    score_src, score_dst = ops.head_scores(x, att).unbind(0)
    out, alpha, _ = ops.gat(x, score_src, score_dst, case.edge_index, **options)
    assert alpha is not None
    return both((out, alpha))


def plain_upstream(inputs: list[Tensor], case: Case) -> Tensor:
    x, att = inputs
    return upstream("gat", [x, (x * att[0]).sum(-1), (x * att[1]).sum(-1)], case)


@pytest.mark.parametrize("is_transposed", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("case", SQUARE, ids=str)
def test_it_is_what_the_two_are(
    case: Case, dropout: float, is_transposed: bool, backend: str
) -> None:
    options = {"dropout": dropout, "seed": torch.tensor([3]), "transpose": is_transposed}
    inputs = inputs_of(case)
    ours = with_gradients(lambda t: joined(t, case, **options), inputs)
    theirs = with_gradients(lambda t: apart(t, case, **options), inputs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_no_larger_than_upstreams(dtype: torch.dtype, backend: str) -> None:
    case = Case("hub", hub_edges(40, 5_000), 40, 40)
    ratios = []
    for _ in range(5):
        inputs = [t.to(dtype) for t in inputs_of(case)[:2]]
        results = (
            with_gradients(lambda t: ops.gat_with_scores(*t, case.edge_index)[0], inputs),
            with_gradients(lambda t: plain_upstream(t, case), inputs),
            with_gradients(lambda t: plain_upstream(t, case), [t.double() for t in inputs]),
        )
        ratios.append(error_ratios(*results))
    medians = torch.tensor(ratios, dtype=torch.float64).median(0).values
    assert bool((medians <= 2).all()), f"median ratios {medians.tolist()}"


def test_derivatives_and_opcheck(backend: str) -> None:
    case = Case("random", random_edges(4, 4, 8), 4, 4)
    inputs = [t.requires_grad_() for t in inputs_of(case, 2, 2)]
    seed = torch.tensor([5])

    def function(*inputs: Tensor) -> Tensor:
        return joined(list(inputs), case, dropout=0.4, seed=seed)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)
    arguments = (*inputs, case.edge_index, None, seed, 0, False, 0.2, 0.4, True)
    torch.library.opcheck(torch.ops.fastgraph.gat_with_scores.default, arguments)


def test_only_the_weights_are_used(backend: str) -> None:
    case = Case("random", random_edges(5, 5, 12), 5, 5)
    x, att = (t.requires_grad_() for t in inputs_of(case)[:2])
    score_src, score_dst = ops.head_scores(x, att).unbind(0)
    _, ours, _ = ops.gat_with_scores(x, att, case.edge_index, need_weights=True)
    _, theirs, _ = ops.gat(x, score_src, score_dst, case.edge_index, need_weights=True)
    assert ours is not None and theirs is not None
    grad = torch.randn_like(ours)
    found = [torch.autograd.grad(alpha, (x, att), grad) for alpha in (ours, theirs)]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_only_the_first_nodes_aggregate(backend: str) -> None:
    """As those of one rank do: others are there to be gathered."""
    case = Case("random", random_edges(7, 4, 15), 7, 4)
    x, att = (t.requires_grad_() for t in inputs_of(case)[:2])
    src, dst = case.edge_index[:, case.edge_index[1].argsort(stable=True)]
    ptr = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(dst, minlength=4).cumsum(0)])

    def ours(x: Tensor, att: Tensor) -> Tensor:
        return ops.gat_with_scores(x, att, src, ptr=ptr)[0]

    def theirs(x: Tensor, att: Tensor) -> Tensor:
        score_src, score_dst = ops.head_scores(x, att).unbind(0)
        return ops.gat(x, score_src, score_dst[:4], src, ptr=ptr)[0]

    found = [with_gradients(lambda t, f=f: f(*t), [x, att]) for f in (ours, theirs)]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert found[0][0].shape == (4, 2, 5)
    assert torch.autograd.gradgradcheck(ours, (x, att))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiles_into_one_graph_of_any_size() -> None:
    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def compiled(x: Tensor, att: Tensor, edge_index: Tensor) -> Tensor:
        return ops.gat_with_scores(x, att, edge_index)[0] * 2

    for nodes, edges in ((9, 40), (17, 60)):
        case = Case("random", random_edges(nodes, nodes, edges), nodes, nodes)
        inputs = inputs_of(case)[:2]
        ours = with_gradients(lambda t, case=case: compiled(*t, case.edge_index), inputs)
        theirs = with_gradients(lambda t, case=case: 2 * plain_upstream(t, case), inputs)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": torch.randn(4, 6)}, r"x must have shape \[nodes, heads, channels\]"),
        ({"att": torch.randn(1, 2, 3)}, r"att must have shape \[2, 2, 3\], got \[1, 2, 3\]"),
        ({"att": torch.randn(2, 2, 3).double()}, "att must have the dtype"),
        ({"addend": torch.randn(3, 2, 3)}, r"addend must have shape \[4, 2, 3\]"),
        ({"self_loops": 4, "need_weights": True}, "self_loops .* with need_weights"),
    ],
)
def test_bad_input(wrong: dict[str, Any], message: str) -> None:
    good = {"x": torch.randn(4, 2, 3), "att": torch.randn(2, 2, 3)}
    arguments: dict[str, Any] = {**good, "index": torch.tensor([[0, 1], [1, 2]])}
    ops.gat_with_scores(**arguments)
    with pytest.raises(ValueError, match=message):
        ops.gat_with_scores(**{**arguments, **wrong})
