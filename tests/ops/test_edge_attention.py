"""Attention with projected features of edges against PyG's formulas, edge by edge."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.utils import softmax

from fastgraph import ops
from fastgraph.backends.dropout import philox
from fastgraph.plugins.backend import FLOATING
from fastgraph.registry.registry import REGISTRY
from tests.conftest import selected
from tests.graphs import Case, all_cases, hub_edges, random_edges
from tests.ops.test_heads import both, error_ratios, transposed, with_gradients

Inputs = list[Tensor]


@pytest.fixture(params=("cpu", "reference"))
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Those that have the operator."""
    yield from selected(request.param)


def inputs_of(case: Case, heads: int = 2, channels: int = 5, edge_dim: int = 3) -> Inputs:
    """Query, key, value, edge and weight_edge."""
    src, dst = ((n, heads, channels) for n in (case.num_src, case.num_dst))
    shapes = (dst, src, src, (case.num_edges, edge_dim), (heads, edge_dim, channels))
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def call(inputs: Inputs, index: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    edges = dict(zip(("edge", "weight_edge"), inputs[3:], strict=True))
    out, alpha, _ = ops.edge_attention(*inputs[:3], index, **edges, need_weights=True, **options)
    assert alpha is not None
    return out, alpha


def upstream(
    inputs: Inputs, case: Case, transpose: bool = False, keep: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output and weights by the steps of PyG's layer."""
    query, key, value, edge, weight = inputs
    src, dst = case.edge_index.long()
    if transpose:
        src, dst = dst, src
    of_edges = torch.einsum("ed,hdc->ehc", edge, weight)
    score = (query[dst] * (key[src] + of_edges)).sum(-1) / math.sqrt(max(query.shape[-1], 1))
    alpha = softmax(score, dst, num_nodes=len(query))
    if keep is not None:
        alpha = alpha * keep
    message = (value[src] + of_edges) * alpha.unsqueeze(-1)
    return message.new_zeros(query.shape).index_add(0, dst, message), alpha


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("is_transposed", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_float64_equals_upstream(
    case: Case, is_transposed: bool, dropout: float, backend: str
) -> None:
    inputs = inputs_of(transposed(case) if is_transposed else case)
    seed, words = torch.tensor([11]), philox(11, case.num_edges, 2, torch.device("cpu"))
    keep = (words >= dropout * 2**32).double() / (1 - dropout)
    options = {"transpose": is_transposed, "dropout": dropout, "seed": seed}
    ours = with_gradients(lambda t: both(call(t, case.edge_index, **options)), inputs)
    theirs = with_gradients(lambda t: both(upstream(t, case, is_transposed, keep)), inputs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("heads", [1, 3, 33])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 16), (7, 5), (8, 4), (16, 33), (33, 40), (70, 2)])
def test_every_number_of_heads_and_channels(sizes: tuple[int, int], heads: int) -> None:
    """More heads than rows are batched for, and channels of no, one and several vectors."""
    case = Case("random", random_edges(60, 90, 300), 60, 90)
    inputs = inputs_of(case, heads, *sizes)
    ours = with_gradients(lambda t: both(call(t, case.edge_index)), inputs)
    theirs = with_gradients(lambda t: both(upstream(t, case)), inputs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("sizes", [(16, 4), (8, 7), (16, 33)])
def test_rows_of_all_lengths(sizes: tuple[int, int], heads: int) -> None:
    """Some without edges, short ones beside each other, a long one, and one that is cut."""
    few = torch.stack([torch.randint(90, (160,)), torch.randint(2, 60, (160,))])
    many = torch.stack([torch.randint(90, (4_240,)), (torch.arange(4_240) >= 140).long()])
    mixed = torch.cat([few, many], 1)
    edges = torch.cat([mixed[:, torch.randperm(mixed.shape[1])], torch.tensor([[1], [1]])], 1)
    case = Case("mixed", edges, 90, 70)
    inputs = inputs_of(case, heads, *sizes)
    ours = with_gradients(lambda t: both(call(t, case.edge_index)), inputs)
    theirs = with_gradients(lambda t: both(upstream(t, case)), inputs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("edge_dim", [1, 5, 16, 40])
def test_errors_are_no_larger_than_upstreams(edge_dim: int, dtype: torch.dtype) -> None:
    case = Case("hub", hub_edges(40, 5_000), 40, 40)
    ratios = []
    for _ in range(5):
        inputs = [t.to(dtype) for t in inputs_of(case, edge_dim=edge_dim)]
        wide = [t.double() for t in inputs]
        results = (
            with_gradients(lambda t: both(call(t, case.edge_index)), inputs),
            with_gradients(lambda t: both(upstream(t, case)), inputs),
            with_gradients(lambda t: both(upstream(t, case)), wide),
        )
        ratios.append(error_ratios(*results))
    medians = torch.tensor(ratios, dtype=torch.float64).median(0).values
    assert bool((medians <= 2).all()), f"median ratios {medians.tolist()}"


@pytest.mark.parametrize("shared", [False, True], ids=["each", "shared"])
def test_an_addend_of_each_node_or_of_all(shared: bool, backend: str) -> None:
    case = Case("isolated", random_edges(6, 6, 20), 9, 9)
    inputs = inputs_of(case)
    addend = torch.randn(1 if shared else 9, 2, 5, dtype=torch.float64)

    def ours(inputs: Inputs) -> Tensor:
        *others, addend = inputs
        return call(others, case.edge_index, addend=addend)[0]

    def theirs(inputs: Inputs) -> Tensor:
        *others, addend = inputs
        return upstream(others, case)[0] + addend

    results = (with_gradients(function, [*inputs, addend]) for function in (ours, theirs))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (9, 0, 3, 4), (9, 2, 0, 4), (9, 2, 3, 0)])
def test_zero_sizes(shape: tuple[int, ...], backend: str) -> None:
    num_edges, heads, channels, edge_dim = shape
    case = Case("random", random_edges(5, 4, num_edges), 5, 4)
    inputs = inputs_of(case, heads, channels, edge_dim)
    ours = with_gradients(lambda t: both(call(t, case.edge_index)), inputs)
    theirs = with_gradients(lambda t: both(upstream(t, case)), inputs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_without_features_of_edges_it_is_attention(backend: str) -> None:
    case = Case("random", random_edges(12, 9, 80), 12, 9)
    inputs = inputs_of(case)[:3]
    results = (
        with_gradients(lambda t, f=function: f(*t, case.edge_index)[0], inputs)  # type: ignore[misc]
        for function in (ops.edge_attention, ops.attention)
    )
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0 if backend == "cpu" else 1e-12)


def test_derivatives(backend: str) -> None:
    case = Case("random", random_edges(4, 3, 8), 4, 3)
    inputs = [t.requires_grad_() for t in inputs_of(case, edge_dim=2)]

    def function(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return call(list(inputs), case.edge_index, dropout=0.4, seed=torch.tensor([5]))

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("heads", [2, 33])
def test_threads_do_not_change_a_bit(heads: int, restore_threads: None) -> None:
    case = Case("hub", hub_edges(700, 20_000), 700, 700)
    inputs = [t.float() for t in inputs_of(case, heads, edge_dim=9)]
    results = []
    for threads in (1, 2, 4, 2):
        torch.set_num_threads(threads)
        results.append(with_gradients(lambda t: both(call(t, case.edge_index)), inputs))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("position", [0, 1, 2, 4])
def test_nan_and_infinity_reach_what_they_reach_upstream(
    position: int, bad: float, backend: str
) -> None:
    """In gradients as well, and nodes without edges get none, whatever the weight is."""
    case = Case("random", random_edges(10, 10, 40), 12, 12)
    inputs = inputs_of(case)
    inputs[position].view(-1)[0] = bad
    ours = with_gradients(lambda t: call(t, case.edge_index)[0], inputs)
    theirs = with_gradients(lambda t: upstream(t, case)[0], inputs)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.isfinite(), b.isfinite())


def test_parts_are_merged() -> None:
    case = Case("random", random_edges(12, 9, 80), 12, 9)
    *nodes, edge, weight = inputs_of(case)
    parts = []
    for part in (slice(0, 30), slice(30, 80)):
        given = {"edge": edge[part], "weight_edge": weight}
        out, _, stats = ops.edge_attention(*nodes, case.edge_index[:, part], **given)
        parts.append((out, stats))
    merged, _ = ops.merge(*parts[0], *parts[1])
    expected, _ = upstream([*nodes, edge, weight], case)
    torch.testing.assert_close(merged, expected, rtol=1e-10, atol=1e-12)


def test_opcheck() -> None:
    case = Case("random", random_edges(5, 4, 12), 5, 4)
    inputs = [t.requires_grad_() for t in inputs_of(case)]
    addend = torch.randn(1, 2, 5, dtype=torch.float64, requires_grad=True)
    given = [*inputs, addend, case.edge_index, None, torch.tensor([7])]
    operator = torch.ops.fastgraph.edge_attention.default
    torch.library.opcheck(operator, (*given, 0, False, 0.3, 0.5, True))


@pytest.mark.parametrize(
    ("edge_shape", "weight_shape", "text"),
    [
        ((12, 3), None, "edge and weight_edge must be given together"),
        ((12, 3), (2, 4, 5), r"weight_edge must have shape \[2, 3, 5\], got \[2, 4, 5\]"),
        ((11, 3), (2, 3, 5), r"edge must have shape \[12, edge_dim\], got \[11, 3\]"),
    ],
)
def test_features_that_do_not_fit_are_refused(
    edge_shape: tuple[int, ...], weight_shape: tuple[int, ...] | None, text: str
) -> None:
    query = torch.randn(4, 2, 5)
    weight = None if weight_shape is None else torch.randn(weight_shape)
    with pytest.raises(ValueError, match=text):
        ops.edge_attention(
            *(query, query, query, random_edges(4, 4, 12)),
            edge=torch.randn(edge_shape),
            weight_edge=weight,
        )


def test_who_has_the_operator() -> None:
    REGISTRY.select(None)
    for dtype in FLOATING:  # half types would score by products that are rounded to them
        refusal = REGISTRY.refusal("edge_attention", "cpu", dtype)
        assert (refusal is None) == (dtype.itemsize >= 4)
    refusal = REGISTRY.refusal("edge_attention", "mps", torch.float32)
    assert refusal is not None and "no backend computes edge_attention" in str(refusal)
