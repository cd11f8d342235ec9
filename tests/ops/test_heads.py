"""The attention operators gatv2, gat and attention against PyG's formulas, edge by edge."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import leaky_relu
from torch_geometric.utils import add_self_loops, remove_self_loops, softmax

from fastgraph import ops
from fastgraph.backends.dropout import philox
from tests.graphs import Case, all_cases, hub_edges, random_edges

OPERATORS = ("gatv2", "gat", "attention")
Inputs = list[Tensor]


def inputs_of(
    name: str, case: Case, heads: int = 2, channels: int = 5, scale: float = 1.0
) -> Inputs:
    """Three random float64 tensors for an operator; ``scale`` multiplies the scores."""
    src, dst = ((n, heads, channels) for n in (case.num_src, case.num_dst))
    shapes = {
        "gatv2": (src, dst, (1, heads, channels)),
        "gat": (src, src[:2], dst[:2]),
        "attention": (dst, src, src),
    }[name]
    factors = {"gatv2": (1, 1, scale), "gat": (1, scale, scale), "attention": (scale, 1, 1)}[name]
    return [
        factor * torch.randn(shape, dtype=torch.float64)
        for factor, shape in zip(factors, shapes, strict=True)
    ]


def upstream(
    name: str, inputs: Inputs, case: Case, transpose: bool = False, keep: Tensor | None = None
) -> Tensor:
    """The result by the steps of PyG's layers: messages of all edges, softmax, sum."""
    a, b, c = inputs
    src, dst = case.edge_index.long()
    num_out = case.num_dst
    if transpose:
        src, dst, num_out = dst, src, case.num_src
    if name == "gatv2":
        score, value = (leaky_relu(a[src] + b[dst], 0.2) * c).sum(-1), a
    elif name == "gat":
        score, value = leaky_relu(b[src] + c[dst], 0.2), a
    else:
        score, value = (a[dst] * b[src]).sum(-1) / math.sqrt(a.shape[-1]), c
    alpha = softmax(score, dst, num_nodes=num_out)
    if keep is not None:
        alpha = alpha * keep
    message = value[src] * alpha.unsqueeze(-1)
    return message.new_zeros(num_out, *value.shape[1:]).index_add(0, dst, message)


def operator(name: str) -> Callable[..., Tensor]:
    """An operator's output without the weights."""

    def function(*args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = getattr(ops, name)(*args, **kwargs)[0]
        return out

    return function


def transposed(case: Case) -> Case:
    return Case(case.name, case.edge_index, case.num_dst, case.num_src)


def with_gradients(function: Callable[[Inputs], Tensor], inputs: Inputs) -> list[Tensor]:
    """The output and the gradients of all inputs, for a fixed random gradient of the output."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    out = function(inputs)
    generator = torch.Generator().manual_seed(9)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def error_ratios(ours: list[Tensor], theirs: list[Tensor], truth: list[Tensor]) -> list[float]:
    """Our error over upstream's, for each result; one rounding of the result counts as none."""
    ratios = []
    for a, b, exact in zip(ours, theirs, truth, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        rounding = torch.finfo(a.dtype).eps * exact.norm() + 1e-30
        errors = ((t.double() - exact).norm() + rounding for t in (a, b))
        ratios.append(float(next(errors) / next(errors)))
    return ratios


@pytest.mark.parametrize("is_transposed", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize("case", all_cases(), ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_float64_equals_upstream(name: str, case: Case, is_transposed: bool, backend: str) -> None:
    inputs = inputs_of(name, transposed(case) if is_transposed else case)
    ours = with_gradients(
        lambda t: operator(name)(*t, case.edge_index, transpose=is_transposed), inputs
    )
    theirs = with_gradients(lambda t: upstream(name, t, case, is_transposed), inputs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shared", [False, True], ids=["each", "shared"])
@pytest.mark.parametrize("case", all_cases(), ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_an_addend_of_each_node_or_of_all(
    name: str, case: Case, shared: bool, backend: str
) -> None:
    inputs = inputs_of(name, case)
    addend = torch.randn(1 if shared else case.num_dst, 2, 5, dtype=torch.float64)

    def ours(inputs: Inputs) -> Tensor:
        *others, addend = inputs
        return operator(name)(*others, case.edge_index, addend=addend)

    def theirs(inputs: Inputs) -> Tensor:
        *others, addend = inputs
        return upstream(name, others, case) + addend

    inputs.append(addend)
    results = (with_gradients(function, inputs) for function in (ours, theirs))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("is_transposed", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize("case", all_cases(), ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_self_loops(name: str, case: Case, is_transposed: bool, backend: str) -> None:
    """They are those of PyG's two functions, with each backend's own gradients."""
    count = min(case.num_src, case.num_dst)
    edges, _ = add_self_loops(remove_self_loops(case.edge_index)[0], num_nodes=count)
    inputs = inputs_of(name, transposed(case) if is_transposed else case)

    def call(index: Tensor, **options: Any) -> list[Tensor]:
        return with_gradients(
            lambda t: operator(name)(*t, index, transpose=is_transposed, **options), inputs
        )

    for a, b in zip(call(case.edge_index, self_loops=count), call(edges), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"self_loops": -1}, "self_loops must be an integer >= 0, got -1"),
        ({"self_loops": 4, "score_edge": torch.rand(12, 2)}, "self_loops .* with score_edge"),
        ({"self_loops": 4, "need_weights": True}, "self_loops .* with need_weights"),
    ],
)
def test_what_self_loops_cannot_be_combined_with(options: dict[str, Any], text: str) -> None:
    x, score, edges = torch.rand(4, 2, 3), torch.rand(4, 2), random_edges(4, 4, 12)
    with pytest.raises(ValueError, match=text):
        ops.gat(x, score, score, edges, **options)


def edge_inputs_of(name: str, case: Case, edge_dim: int = 3) -> Inputs:
    """The inputs of :func:`inputs_of`, followed by those that the edges add."""
    inputs = inputs_of(name, case)
    heads, channels = inputs[0].shape[1:]
    edge = torch.randn(case.edge_index.shape[1], edge_dim, dtype=torch.float64)
    if name == "gatv2":
        return [*inputs, edge, torch.randn(heads, edge_dim, channels, dtype=torch.float64)]
    if name == "gat":
        return [*inputs, torch.randn(len(edge), heads, dtype=torch.float64)]
    query = torch.randn(case.num_dst, heads, channels + edge_dim, dtype=torch.float64)
    return [query, *inputs[1:], edge]


def call_with_edges(name: str, inputs: Inputs, case: Case, **options: Any) -> tuple[Tensor, Tensor]:
    names = {"gatv2": ("edge", "weight_edge"), "gat": ("score_edge",), "attention": ("edge",)}
    edges = dict(zip(names[name], inputs[3:], strict=True))
    out, alpha, _ = getattr(ops, name)(
        *inputs[:3], case.edge_index, **edges, need_weights=True, **options
    )
    return out, alpha


def upstream_with_edges(
    name: str, inputs: Inputs, case: Case, keep: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output and weights by PyG's formulas."""
    a, b, c, *edges = inputs
    src, dst = case.edge_index.long()
    if name == "gatv2":
        z = a[src] + b[dst] + torch.einsum("ed,hdc->ehc", *edges)
        score, value = (leaky_relu(z, 0.2) * c).sum(-1), a[src]
    elif name == "gat":
        score, value = leaky_relu(b[src] + c[dst] + edges[0], 0.2), a[src]
    else:
        edge = edges[0].unsqueeze(1).expand(-1, b.shape[1], -1)
        key, value = (torch.cat([t[src], edge], dim=-1) for t in (b, c))
        score = (a[dst] * key).sum(-1) / math.sqrt(b.shape[-1])
    alpha = softmax(score, dst, num_nodes=case.num_dst)
    if keep is not None:
        alpha = alpha * keep
    message = value * alpha.unsqueeze(-1)
    return message.new_zeros(case.num_dst, *value.shape[1:]).index_add(0, dst, message), alpha


def both(results: tuple[Tensor, Tensor]) -> Tensor:
    """Output and weights as one vector, so that gradients go through both."""
    return torch.cat([t.flatten() for t in results])


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("case", all_cases(), ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_edge_features_and_weights_equal_upstream(
    name: str, case: Case, dropout: float, backend: str
) -> None:
    inputs, seed = edge_inputs_of(name, case), torch.tensor([11])
    words = philox(11, case.edge_index.shape[1], 2, torch.device("cpu"))
    keep = (words >= dropout * 2**32).double() / (1 - dropout)
    ours = with_gradients(
        lambda t: both(call_with_edges(name, t, case, dropout=dropout, seed=seed)), inputs
    )
    theirs = with_gradients(lambda t: both(upstream_with_edges(name, t, case, keep)), inputs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("edge_dim", [0, 1, 5, 16, 40])
@pytest.mark.parametrize("name", OPERATORS)
def test_errors_with_edge_features_are_no_larger_than_upstreams(
    name: str, edge_dim: int, dtype: torch.dtype
) -> None:
    case = Case("hub", hub_edges(40, 5_000), 40, 40)
    ratios = []
    for _ in range(5):
        inputs = [t.to(dtype) for t in edge_inputs_of(name, case, edge_dim)]
        results = (
            with_gradients(lambda t: both(call_with_edges(name, t, case)), inputs),
            with_gradients(lambda t: both(upstream_with_edges(name, t, case)), inputs),
            with_gradients(
                lambda t: both(upstream_with_edges(name, t, case)), [t.double() for t in inputs]
            ),
        )
        ratios.append(error_ratios(*results))
    medians = torch.tensor(ratios, dtype=torch.float64).median(0).values
    assert bool((medians <= 2).all()), f"median ratios {medians.tolist()}"


@pytest.mark.parametrize("name", OPERATORS)
def test_derivatives_with_edge_features_and_weights(name: str, backend: str) -> None:
    case = Case("random", random_edges(4, 3, 8), 4, 3)
    inputs = [t.requires_grad_() for t in edge_inputs_of(name, case, 2)]

    def function(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return call_with_edges(name, list(inputs), case, dropout=0.4, seed=torch.tensor([5]))

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("name", OPERATORS)
def test_threads_do_not_change_a_bit_with_edge_features(name: str, restore_threads: None) -> None:
    case = Case("hub", hub_edges(300, 20_000), 300, 300)
    inputs = [t.float() for t in edge_inputs_of(name, case, 9)]
    results = []
    for threads in (1, 2, 4, 2):
        torch.set_num_threads(threads)
        results.append(with_gradients(lambda t: both(call_with_edges(name, t, case)), inputs))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("scale", [1.0, 1e2, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("graph", ["random", "hub", "single"])
@pytest.mark.parametrize("name", OPERATORS)
def test_errors_are_no_larger_than_upstreams(
    name: str, graph: str, dtype: torch.dtype, scale: float
) -> None:
    """Large scores leave most weight to one edge, where gradients are differences of equals."""
    if scale * torch.finfo(dtype).eps > 1:
        pytest.skip("the scores themselves have no correct digit in this dtype")
    edges = {
        "random": random_edges(30, 30, 400),
        "hub": hub_edges(40, 9_000),
        "single": torch.stack([torch.arange(20), torch.arange(20).flip(0)]),
    }[graph]
    case = Case(graph, edges, 40, 40)
    ratios = []
    for _ in range(9):
        inputs = [t.to(dtype) for t in inputs_of(name, case, 2, 24, scale)]
        results = (
            with_gradients(lambda t: operator(name)(*t, edges), inputs),
            with_gradients(lambda t: upstream(name, t, case), inputs),
            with_gradients(lambda t: upstream(name, t, case), [t.double() for t in inputs]),
        )
        ratios.append(error_ratios(*results))
    # A single draw says little: the errors are those of the few largest of many exponentials.
    medians = torch.tensor(ratios, dtype=torch.float64).median(0).values
    assert bool((medians <= 2).all()), f"median ratios {medians.tolist()}"


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("channels", [1, 2, 7, 8, 16, 33, 64, 130])
@pytest.mark.parametrize("name", OPERATORS)
def test_every_number_of_heads_and_channels(
    name: str, channels: int, heads: int, backend: str
) -> None:
    case = Case("random", random_edges(12, 9, 80), 12, 9)
    ratios = []
    for _ in range(5):
        inputs = [t.float() for t in inputs_of(name, case, heads, channels)]
        ours = with_gradients(lambda t: operator(name)(*t, case.edge_index), inputs)
        theirs = with_gradients(lambda t: upstream(name, t, case), inputs)
        truth = with_gradients(lambda t: upstream(name, t, case), [t.double() for t in inputs])
        ratios.append(error_ratios(ours, theirs, truth))
    # Of one head and nine rows, the rounding of a single score can be most of a draw's error.
    medians = torch.tensor(ratios, dtype=torch.float64).median(0).values
    assert bool((medians <= 1.5).all()), f"median ratios {medians.tolist()}"


@pytest.mark.parametrize("channels", [0, 4])
@pytest.mark.parametrize("heads", [0, 2])
@pytest.mark.parametrize("name", OPERATORS)
def test_zero_sizes(name: str, heads: int, channels: int, backend: str) -> None:
    case = Case("random", random_edges(5, 4, 9), 5, 4)
    inputs = inputs_of(name, case, heads, channels)
    out, *gradients = with_gradients(lambda t: operator(name)(*t, case.edge_index), inputs)
    assert out.shape == (4, heads, channels)
    assert [g.shape for g in gradients] == [t.shape for t in inputs]


@pytest.mark.parametrize("name", OPERATORS)
def test_compressed_and_strided_inputs(name: str, backend: str) -> None:
    case = Case("sorted", random_edges(8, 6, 30), 8, 6)
    order = case.edge_index[1].argsort(stable=True)
    ptr = torch.zeros(7, dtype=torch.long)
    ptr[1:] = torch.bincount(case.edge_index[1], minlength=6).cumsum(0)
    inputs = inputs_of(name, case)
    strided = [torch.stack([t, t], dim=-1)[..., 0] for t in inputs]
    assert not strided[0].is_contiguous()
    expected = with_gradients(lambda t: upstream(name, t, case), inputs)
    src = case.edge_index[0][order]
    for ours in (
        with_gradients(lambda t: operator(name)(*t, src, ptr=ptr), inputs),
        with_gradients(lambda t: operator(name)(*t, case.edge_index), strided),
    ):
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("name", OPERATORS)
def test_first_and_second_derivatives(name: str, dropout: float, backend: str) -> None:
    case = Case("random", random_edges(4, 3, 8), 4, 3)
    addend = torch.randn(1, 2, 2, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in (*inputs_of(name, case, 2, 2), addend)]
    seed = torch.tensor([5])

    def function(*inputs: Tensor) -> Tensor:
        *inputs, addend = inputs
        options = {"addend": addend, "dropout": dropout, "seed": seed}
        return operator(name)(*inputs, case.edge_index, **options)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("name", OPERATORS)
def test_nan_and_infinity_reach_what_they_reach_upstream(name: str, backend: str) -> None:
    """In gradients as well, and nodes without edges get none, whatever att is."""
    case = Case("random", random_edges(10, 10, 40), 12, 12)
    for bad in (float("nan"), float("inf"), -float("inf")):
        for position in range(3):
            inputs = inputs_of(name, case)
            inputs[position].view(-1)[0] = bad
            ours = with_gradients(lambda t: operator(name)(*t, case.edge_index), inputs)
            theirs = with_gradients(lambda t: upstream(name, t, case), inputs)
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("name", OPERATORS)
def test_threads_do_not_change_a_bit(name: str, dropout: float, restore_threads: None) -> None:
    case = Case("hub", hub_edges(300, 20_000), 300, 300)
    inputs = [t.float() for t in inputs_of(name, case, 2, 17)]
    results = []
    for threads in (1, 2, 4, 2):
        torch.set_num_threads(threads)
        results.append(
            with_gradients(
                lambda t: operator(name)(
                    *t, case.edge_index, dropout=dropout, seed=torch.tensor([3])
                ),
                inputs,
            )
        )
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name: str, dropout: float) -> None:
    case = Case("random", random_edges(5, 4, 12), 5, 4)
    inputs = [t.requires_grad_() for t in inputs_of(name, case)]
    option, edge = 0.3, torch.randn(12, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 2, 5, dtype=torch.float64, requires_grad=True)
    if name == "attention":
        inputs[0] = torch.randn(4, 2, 7, dtype=torch.float64, requires_grad=True)
    extras = {"gatv2": [edge, weight], "gat": [edge], "attention": [edge]}
    addend = torch.randn(1, *inputs[0].shape[1:], dtype=torch.float64, requires_grad=True)
    given = [*inputs, *extras[name], addend, case.edge_index, None, torch.tensor([7])]
    arguments = (*given, 0, False, option, dropout, True)
    torch.library.opcheck(getattr(torch.ops.fastgraph, name).default, arguments)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", OPERATORS)
def test_compiles_into_one_graph_of_any_size(name: str) -> None:
    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def compiled(a: Tensor, b: Tensor, c: Tensor, edge_index: Tensor) -> Tensor:
        return operator(name)(a, b, c, edge_index) * 2

    for nodes, edges in ((9, 40), (17, 60)):
        case = Case("random", random_edges(nodes, nodes, edges), nodes, nodes)
        inputs = inputs_of(name, case)
        ours = with_gradients(
            lambda t, case=case: compiled(*t, case.edge_index),  # type: ignore[misc]
            inputs,
        )
        theirs = with_gradients(lambda t, case=case: 2 * upstream(name, t, case), inputs)  # type: ignore[misc]
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)


def _bad_calls() -> list[tuple[str, dict[str, Any], type[Exception], str]]:
    nodes, integers = torch.randn(4, 2, 3), torch.ones(4, 2, 3, dtype=torch.int64)
    return [
        ("gatv2", {"att": torch.randn(2, 3)}, ValueError, r"att must have shape \[1, 2, 3\]"),
        ("gatv2", {"x_dst": torch.randn(4, 2, 5)}, ValueError, "x_dst must have shape"),
        ("gatv2", {"x_dst": nodes.double()}, ValueError, "x_dst must have the dtype"),
        ("gatv2", {"x_src": integers}, ValueError, "x_src must be one of"),
        ("gatv2", {"dropout": 1.5}, ValueError, r"dropout must be in \[0, 1\], got 1.5"),
        ("gatv2", {"dropout": 0.5, "seed": torch.ones(1)}, ValueError, "seed must be a tensor"),
        ("gatv2", {"dropout": 0.5, "seed": 3}, TypeError, "seed must be a tensor .*, got 3"),
        ("gat", {"x": torch.randn(4, 6)}, ValueError, r"x must have shape \[sources, heads, chann"),
        (
            "gat",
            {"score_dst": torch.randn(4, 3)},
            ValueError,
            r"score_dst must have shape \[4, 2\], got \[4, 3\]",
        ),
        ("attention", {"key": torch.randn(4, 6)}, ValueError, r"key must have shape \[sources, he"),
        ("gatv2", {"index": torch.tensor([[0], [4]])}, IndexError, "holds index 4 in row 1"),
        ("gatv2", {"index": torch.tensor([[-1], [0]])}, IndexError, "holds index -1 in row 0"),
        ("gatv2", {"index": torch.ones(2, 1)}, ValueError, "must be int64 or int32"),
        ("gatv2", {"edge": torch.randn(2, 3)}, ValueError, "must be given together"),
        (
            "gatv2",
            {"edge": torch.randn(3, 3), "weight_edge": torch.randn(2, 3, 3)},
            ValueError,
            r"edge must have shape \[2, edge_dim\], got \[3, 3\]",
        ),
        (
            "gatv2",
            {"edge": torch.randn(2, 5), "weight_edge": torch.randn(2, 3, 5)},
            ValueError,
            r"weight_edge must have shape \[2, 5, 3\]",
        ),
        (
            "gat",
            {"score_edge": torch.randn(2, 3)},
            ValueError,
            r"score_edge must have shape \[2, 2",
        ),
        ("gat", {"score_edge": torch.randn(2)}, ValueError, r"score_edge must have shape \[2, 2\]"),
        ("attention", {"edge": torch.randn(2, 3)}, ValueError, r"query must have shape .*2, 6\]"),
        ("gat", {"score_src": torch.randn(3, 2)}, ValueError, r"score_src must have shape \[4, 2"),
        ("attention", {"query": torch.randn(4, 6)}, ValueError, "query must have shape"),
        ("attention", {"value": torch.randn(3, 2, 3)}, ValueError, "value must have shape"),
        *(
            (name, {"addend": addend}, ValueError, message)
            for name in OPERATORS
            for addend, message in (
                (torch.randn(3, 2, 3), r"addend must have shape \[4, 2, 3\], got \[3, 2, 3\]"),
                (torch.randn(4, 6), r"addend must have shape \[4, 2, 3\], got \[4, 6\]"),
                (torch.randn(6), r"addend must have shape \[4, 2, 3\], got \[6\]"),
                (torch.tensor(1.0), r"addend must have shape \[4, 2, 3\], got \[\]"),
                (nodes.double(), "addend must have the dtype"),
            )
        ),
    ]


@pytest.mark.parametrize(
    ("name", "wrong", "error", "message"), _bad_calls(), ids=lambda v: v if v in OPERATORS else ""
)
def test_bad_input(name: str, wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    nodes = torch.randn(4, 2, 3)
    good: dict[str, dict[str, Any]] = {
        "gatv2": {"x_src": nodes, "x_dst": nodes, "att": nodes[:1]},
        "gat": {"x": nodes, "score_src": nodes[..., 0], "score_dst": nodes[..., 0]},
        "attention": {"query": nodes, "key": nodes, "value": nodes},
    }
    arguments = {**good[name], "index": torch.tensor([[0, 1], [1, 2]])}
    operator(name)(**arguments)
    with pytest.raises(error, match=message):
        operator(name)(**{**arguments, **wrong})


def test_exponentials_are_right_to_the_last_places(backend: str) -> None:
    """The weights of two edges whose scores are 0 and s have the ratio exp(s)."""
    score = -torch.linspace(0, 87, 5001)
    num = score.numel()
    nodes = torch.arange(num)
    index = torch.stack([nodes, nodes]).repeat(1, 2)
    index[0, num:] = num
    of_src = torch.cat([score, torch.zeros(1)]).view(-1, 1)
    _, alpha, _ = ops.gat(
        *(torch.zeros(num + 1, 1, 1), of_src, torch.zeros(num, 1), index),
        negative_slope=1.0,
        need_weights=True,
    )
    ratio = alpha[:num].double() / alpha[num:].double()
    error = (ratio.flatten() / score.double().exp() - 1).abs()
    # Two units in the last place of the exponential itself, and a rounding of each weight.
    assert float(error.max()) < 3 * torch.finfo(torch.float32).eps
