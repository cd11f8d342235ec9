"""Attention with a bias of its scores against the formula in float64, edge by edge."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.utils import softmax

from fastgraph import ops
from fastgraph.backends.dropout import dropout_factors
from fastgraph.ops.score_bias import ENTRY_TYPES
from fastgraph.plugins.backend import FLOATING
from fastgraph.registry.registry import REGISTRY
from tests.conftest import selected
from tests.graphs import Case, all_cases, hub_edges, random_edges
from tests.ops.test_heads import both, error_ratios, transposed, with_gradients

Inputs = list[Tensor]

SEED = torch.tensor([11])

# Tables that fill two vectors or less, that take more, and whose types are more than bytes tell.
KINDS = {"edges": 0, "few": 5, "many": 41, "beyond bytes": 700}
EDGES = random_edges(4, 4, 12)
TABLE: dict[str, Any] = {"bias": torch.ones(3, 2), "bias_index": torch.zeros(12).byte()}


@pytest.fixture(params=("cpu", "reference"))
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Those that have the operator."""
    yield from selected(request.param)


class Bias:
    """A bias of edges, as their own numbers or by their types.

    Attributes:
        values: what is learned.
        types: which of them each edge takes, ``None`` for its own.
    """

    def __init__(self, kind: str, num_edges: int, heads: int) -> None:
        count = KINDS[kind]
        self.values = 2 * torch.randn(count or num_edges, heads, dtype=torch.float64)
        integer = torch.uint8 if count <= 256 else torch.int16
        self.types = torch.randint(count, (num_edges,)).to(integer) if count else None

    def given(self, values: Tensor) -> dict[str, Any]:
        """The arguments of the operator."""
        return {"bias": values, "bias_index": self.types}

    def of_edges(self, values: Tensor) -> Tensor:
        return values if self.types is None else values[self.types.long()]


def inputs_of(case: Case, heads: int = 2, channels: int = 5, edge_dim: int = 0) -> Inputs:
    """Query, key, value, and features of edges if they have any."""
    shapes: list[tuple[int, ...]] = [(case.num_dst, heads, channels + edge_dim)]
    shapes += [(case.num_src, heads, channels)] * 2
    shapes += [(case.num_edges, edge_dim)] if edge_dim else []
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def call(inputs: Inputs, index: Tensor, bias: Bias, **options: Any) -> tuple[Tensor, Tensor]:
    """Output and weights; the last of the inputs are the values of the bias."""
    query, key, value, *edge, values = inputs
    given = {**bias.given(values), "edge": edge[0] if edge else None}
    nodes = (query, key, value)
    out, alpha, _ = ops.attention(*nodes, index, **given, need_weights=True, **options)
    assert alpha is not None
    return out, alpha


def exact(
    inputs: Inputs, case: Case, bias: Bias, *, transpose: bool = False, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The same by the formula, of all edges."""
    query, key, value, *edge, values = inputs
    src, dst = case.edge_index.long()
    if transpose:
        src, dst = dst, src
    keys, messages = key[src], value[src]
    if edge:
        own = edge[0].unsqueeze(1).expand(-1, query.shape[1], -1)
        keys, messages = torch.cat([keys, own], -1), torch.cat([messages, own], -1)
    score = (query[dst] * keys).sum(-1) / math.sqrt(max(key.shape[-1], 1))
    alpha = softmax(score + bias.of_edges(values), dst, num_nodes=len(query))
    alpha = alpha * dropout_factors(alpha.detach(), dropout, int(SEED))
    messages = messages * alpha.unsqueeze(-1)
    return messages.new_zeros(query.shape).index_add(0, dst, messages), alpha


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("is_transposed", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_values_and_gradients(
    case: Case, kind: str, is_transposed: bool, dropout: float, backend: str
) -> None:
    torch.manual_seed(0)
    bias = Bias(kind, case.num_edges, 2)
    inputs = [*inputs_of(transposed(case) if is_transposed else case), bias.values]
    options: dict[str, Any] = {"transpose": is_transposed, "dropout": dropout}
    index = case.edge_index
    ours = with_gradients(lambda t: both(call(t, index, bias, seed=SEED, **options)), inputs)
    theirs = with_gradients(lambda t: both(exact(t, case, bias, **options)), inputs)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("edge_dim", [0, 3])
@pytest.mark.parametrize("heads", [1, 3, 8, 33])
@pytest.mark.parametrize("channels", [1, 7, 16, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_heads_and_channels(
    kind: str, channels: int, heads: int, edge_dim: int
) -> None:
    """More heads than rows are batched for, and rows of few edges and of many."""
    case = Case("hub", hub_edges(30, 300), 30, 30)
    bias = Bias(kind, case.num_edges, heads)
    inputs = [*inputs_of(case, heads, channels, edge_dim), bias.values]
    ours = with_gradients(lambda t: both(call(t, case.edge_index, bias)), inputs)
    theirs = with_gradients(lambda t: both(exact(t, case, bias)), inputs)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("kind", ["edges", "few"])
@pytest.mark.parametrize("dtype", [d for d in FLOATING if d != torch.float64])
def test_errors_are_no_larger_than_the_formulas(
    dtype: torch.dtype, kind: str, backend: str
) -> None:
    case = Case("hub", hub_edges(40, 3_000), 40, 40)
    ratios = []
    for _ in range(5):
        bias = Bias(kind, case.num_edges, 2)
        inputs = [t.to(dtype) for t in (*inputs_of(case), bias.values)]
        wide = [t.double() for t in inputs]
        results = (
            with_gradients(lambda t, b=bias: both(call(t, case.edge_index, b)), inputs),  # type: ignore[misc]
            with_gradients(lambda t, b=bias: both(exact(t, case, b)), inputs),  # type: ignore[misc]
            with_gradients(lambda t, b=bias: both(exact(t, case, b)), wide),  # type: ignore[misc]
        )
        ratios.append(error_ratios(*results))
    medians = torch.tensor(ratios, dtype=torch.float64).median(0).values
    assert bool((medians <= 2).all()), f"median ratios {medians.tolist()}"


@pytest.mark.parametrize("dtype", ENTRY_TYPES)
def test_types_of_every_integer_and_any_strides(dtype: torch.dtype, backend: str) -> None:
    case = Case("random", random_edges(9, 7, 80), 9, 7)
    bias = Bias("few", 80, 2)
    assert bias.types is not None
    bias.types = torch.stack([bias.types, bias.types], 1).to(dtype)[:, 0]
    # The transpose of what is learned, as of a linear layer.
    inputs = [*inputs_of(case), bias.values.t().contiguous().t()]
    ours = with_gradients(lambda t: both(call(t, case.edge_index, bias)), inputs)
    theirs = with_gradients(lambda t: both(exact(t, case, bias)), inputs)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("kind", ["edges", "few"])
def test_compressed_edges_have_theirs_in_the_order_of_their_numbers(
    kind: str, backend: str
) -> None:
    case = Case("random", random_edges(9, 7, 60), 9, 7)
    bias = Bias(kind, 60, 2)
    inputs = [*inputs_of(case), bias.values]
    order = case.edge_index[1].argsort(stable=True)
    counts = torch.bincount(case.edge_index[1], minlength=7)
    ptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    numbered = torch.stack([case.edge_index[0][order], order])
    ours = with_gradients(lambda t: both(call(t, numbered, bias, ptr=ptr)), inputs)
    theirs = with_gradients(lambda t: both(exact(t, case, bias)), inputs)
    assert_equal(ours, theirs)


def test_a_table_is_what_its_rows_are_for_each_edge(backend: str) -> None:
    """With the same edges dropped as without a bias."""
    case = Case("hub", hub_edges(40, 2_000), 40, 40)
    inputs, bias = inputs_of(case), Bias("many", 2_000, 2)
    options: dict[str, Any] = {"dropout": 0.5, "seed": SEED, "need_weights": True}
    index = case.edge_index
    by_table = ops.attention(*inputs, index, **bias.given(bias.values), **options)
    by_edges = ops.attention(*inputs, index, bias=bias.of_edges(bias.values), **options)
    without = ops.attention(*inputs, index, **options)
    for a, b in zip(by_table, by_edges, strict=True):
        torch.testing.assert_close(a, b)
    assert by_table[1] is not None and without[1] is not None
    assert torch.equal(by_table[1] == 0, without[1] == 0)


def test_no_bias_is_a_bias_of_zeros(backend: str) -> None:
    case = Case("random", random_edges(12, 9, 80), 12, 9)
    inputs = inputs_of(case)
    bias = torch.zeros(80, 2, dtype=torch.float64)
    out, _, stats = ops.attention(*inputs, case.edge_index, bias=bias)
    expected, _, others = ops.attention(*inputs, case.edge_index)
    assert torch.equal(out, expected) and torch.equal(stats, others)


@pytest.mark.parametrize("kind", ["edges", "few"])
def test_derivatives_of_every_order(kind: str, backend: str) -> None:
    case = Case("random", random_edges(4, 3, 8), 4, 3)
    bias = Bias(kind, 8, 2)
    inputs = [t.requires_grad_() for t in (*inputs_of(case, channels=2, edge_dim=1), bias.values)]

    def function(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return call(list(inputs), case.edge_index, bias, dropout=0.4, seed=SEED)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [2, 33])
def test_threads_do_not_change_a_bit(
    heads: int, dtype: torch.dtype, kind: str, restore_threads: None
) -> None:
    case = Case("hub", hub_edges(700, 40_000), 700, 700)
    bias = Bias(kind, 40_000, heads)
    inputs = [t.to(dtype) for t in (*inputs_of(case, heads), bias.values)]
    options: dict[str, Any] = {"dropout": 0.25, "seed": SEED}
    results, index = [], case.edge_index
    for threads in (1, 2, 4, 2):
        torch.set_num_threads(threads)
        results.append(with_gradients(lambda t: both(call(t, index, bias, **options)), inputs))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("heads", [2, 33])
def test_a_bias_may_leave_nodes_few_edges_or_none(heads: int, backend: str) -> None:
    """A node without is as one that has no edges, whatever number of them it has."""
    case = Case("hub", hub_edges(40, 6_000), 40, 40)
    inputs = inputs_of(case, heads)
    values = torch.randn(6_000, heads, dtype=torch.float64)
    dst = case.edge_index[1]
    values[torch.randperm(6_000)[:2_000]] = -torch.inf
    values[dst == 7] = -torch.inf
    values[dst == 3, 1] = -torch.inf  # of the hub
    hidden = (values == -torch.inf) & ((dst == 7) | (dst == 3)).unsqueeze(-1)
    addend = torch.randn(1, heads, 5, dtype=torch.float64)
    bias = Bias("edges", 6_000, heads)
    options: dict[str, Any] = {"addend": addend}
    ours = with_gradients(
        lambda t: both(call(t, case.edge_index, bias, **options)), [*inputs, values]
    )

    def theirs(inputs: Inputs) -> Tensor:
        # A finite bias by which the weights of all others are 0, and those of hidden rows not.
        finite = inputs[-1].masked_fill(inputs[-1].detach() == -torch.inf, -1e4)
        out, alpha = exact([*inputs[:-1], finite], case, bias)
        alpha = alpha.masked_fill(hidden & (is_lost[dst]), 0)
        messages = inputs[2][case.edge_index[0]] * alpha.unsqueeze(-1)
        return both((torch.zeros_like(out).index_add(0, dst, messages) + addend, alpha))

    is_lost = torch.zeros(40, heads, dtype=torch.bool)
    is_lost[7], is_lost[3, 1] = True, True
    assert_equal(ours, with_gradients(theirs, [*inputs, values]))
    _, _, stats = ops.attention(*inputs, case.edge_index, bias=values)
    assert torch.equal((stats == 0).all(-1), is_lost)


@pytest.mark.parametrize("heads", [2, 33])
@pytest.mark.parametrize("kind", ["edges", "few"])
def test_parts_are_merged(kind: str, heads: int, backend: str) -> None:
    """Of the first part a node has edges that the bias hides."""
    case = Case("random", random_edges(12, 9, 90), 12, 9)
    bias = Bias(kind, 90, heads)
    values = bias.values.clone()
    first = case.edge_index[:, :40]
    if kind == "edges":
        values[:40][first[1] == 2] = -torch.inf
    else:
        values[1] = -torch.inf
        assert bias.types is not None
        bias.types[:40][first[1] == 2] = 1

    def merged(inputs: Inputs) -> Tensor:
        *nodes, values = inputs
        parts = []
        for part in (slice(0, 40), slice(40, 90)):
            types = None if bias.types is None else bias.types[part]
            own = values[part] if types is None else values
            given = {"bias": own, "bias_index": types}
            out, _, stats = ops.attention(*nodes, case.edge_index[:, part], **given)
            parts.append((out, stats))
        return ops.merge(*parts[0], *parts[1])[0]

    inputs = [*inputs_of(case, heads), values]
    assert_equal(
        with_gradients(merged, inputs),
        with_gradients(lambda t: call(t, case.edge_index, bias)[0], inputs),
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_nan_and_infinity_reach_what_they_reach_by_the_formula(
    position: int, bad: float, backend: str
) -> None:
    case = Case("random", random_edges(10, 10, 40), 12, 12)
    bias = Bias("few", 40, 2)
    inputs = [*inputs_of(case), bias.values]
    inputs[position].view(-1)[0] = bad
    ours = with_gradients(lambda t: call(t, case.edge_index, bias)[0], inputs)
    theirs = with_gradients(lambda t: exact(t, case, bias)[0], inputs)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.isfinite(), b.isfinite())


def test_a_bias_that_is_not_learned_has_no_gradient(backend: str) -> None:
    """Nor do edges of a table whose types none has, nor is one computed that nobody wants."""
    case = Case("random", random_edges(9, 7, 30), 9, 7)
    bias = Bias("few", 30, 2)
    assert bias.types is not None
    bias.types.clamp_(max=2)
    inputs = [t.requires_grad_() for t in (*inputs_of(case), bias.values)]
    out = call([*inputs[:3], inputs[3].detach()], case.edge_index, bias)[0]
    alone = torch.autograd.grad(out.sin().sum(), inputs[:3])
    out = call(inputs, case.edge_index, bias)[0]
    *others, of_table = torch.autograd.grad(out.sin().sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(alone, others, strict=True))
    assert not of_table[3:].any() and of_table[:3].all()


@pytest.mark.parametrize("shape", [(0, 2, 3), (9, 0, 3), (9, 2, 0)])
@pytest.mark.parametrize("kind", ["edges", "few"])
def test_zero_sizes(kind: str, shape: tuple[int, ...], backend: str) -> None:
    num_edges, heads, channels = shape
    case = Case("random", random_edges(5, 4, num_edges), 5, 4)
    bias = Bias(kind, num_edges, heads)
    inputs = [*inputs_of(case, heads, channels), bias.values]
    ours = with_gradients(lambda t: both(call(t, case.edge_index, bias)), inputs)
    theirs = with_gradients(lambda t: both(exact(t, case, bias)), inputs)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("kind", ["edges", "few"])
def test_opcheck_and_compile(kind: str) -> None:
    case = Case("random", random_edges(5, 4, 12), 5, 4)
    bias = Bias(kind, 12, 2)
    inputs = [t.requires_grad_() for t in (*inputs_of(case, edge_dim=3), bias.values)]
    *tensors, values = inputs
    of_types = (None, values, bias.types) if bias.types is not None else (values, None, None)
    given = [*tensors, *of_types, None, case.edge_index, None, torch.tensor([7])]
    operator = torch.ops.fastgraph.biased_attention.default
    torch.library.opcheck(operator, (*given, 0, False, 0.3, 0.5, True))

    def step(*inputs: Tensor) -> Tensor:
        return call(list(inputs), case.edge_index, bias)[0].relu()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for ours, eager in zip(
        torch.autograd.grad(compiled(*inputs).sum(), inputs),
        torch.autograd.grad(step(*inputs).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"bias": torch.ones(11, 2)}, r"bias must have shape \[12, 2\], got \[11, 2\]"),
        ({"bias": torch.ones(12, 1)}, r"bias must have shape \[12, 2\], got \[12, 1\]"),
        ({"bias": torch.ones(12)}, r"bias must have shape \[12, 2\], got \[12\]"),
        ({"bias": torch.ones(12, 2).double()}, "bias must have the dtype and device"),
        ({"bias_index": torch.zeros(12).byte()}, "bias_index must be None without bias, got"),
        (TABLE | {"bias": torch.ones(3, 1)}, r"bias must have shape \[types, 2\], got \[3, 1\]"),
        (TABLE | {"bias_index": torch.zeros(12)}, "bias_index must be uint8, int16, int32 or int"),
        (TABLE | {"bias_index": torch.ones(12).bool()}, "bias_index must be uint8, int16, int32"),
        (TABLE | {"bias_index": torch.zeros(11).byte()}, r"bias_index must be dense \[12\], got"),
        (TABLE | {"bias_index": torch.zeros(12, 1).byte()}, r"bias_index must be dense \[12\]"),
        (TABLE | {"self_loops": 4}, "self_loops cannot be combined with bias"),
    ],
)
def test_bad_input(given: dict[str, Any], text: str, backend: str) -> None:
    nodes = [torch.ones(4, 2, 5) for _ in range(3)]
    with pytest.raises(ValueError, match=text):
        ops.attention(*nodes, EDGES, **given)


@pytest.mark.parametrize("dtype", ENTRY_TYPES)
@pytest.mark.parametrize("bad", [-1, 3, 99, 2**32 + 1])
def test_types_beyond_the_table(dtype: torch.dtype, bad: int, backend: str) -> None:
    if bad > torch.iinfo(dtype).max:
        pytest.skip("no such number")
    nodes = [torch.ones(4, 2, 5) for _ in range(3)]
    types = torch.zeros(12, dtype=dtype)
    types[5] = bad
    text = rf"bias_index holds {int(types[5])}, expected 0 <= type < 3"
    with pytest.raises(IndexError, match=text):
        ops.attention(*nodes, EDGES, bias=torch.ones(3, 2), bias_index=types)


def test_a_byte_is_a_type_of_a_table_of_more_rows(backend: str) -> None:
    nodes = [torch.ones(4, 2, 5) for _ in range(3)]
    table, types = torch.randn(300, 2), torch.arange(0, 240, 20)
    found = ops.attention(*nodes, EDGES, bias=table, bias_index=types.to(torch.uint8))
    torch.testing.assert_close(found, ops.attention(*nodes, EDGES, bias=table[types]))


def test_no_table_has_a_type_for_edges(backend: str) -> None:
    nodes = [torch.ones(4, 2, 5) for _ in range(3)]
    given = {"bias": torch.ones(0, 2), "bias_index": torch.zeros(12).byte()}
    with pytest.raises(IndexError, match="bias_index holds 0, expected 0 <= type < 0"):
        ops.attention(*nodes, EDGES, **given)
    out, _, _ = ops.attention(*nodes, EDGES[:, :0], **given | {"bias_index": torch.zeros(0).byte()})
    assert not out.any()


def test_a_table_has_rows_that_kernels_can_number() -> None:
    nodes = [torch.ones(4, 0, 5) for _ in range(3)]
    given = {"bias": torch.ones(2**31, 0), "bias_index": torch.zeros(12).byte()}
    with pytest.raises(ValueError, match=r"table must have less than 2\^31 rows, got 2147483648"):
        ops.attention(*nodes, EDGES, **given)


def test_half_types_under_autocast(backend: str) -> None:
    """Operators compute in the dtype of their operands, as products under autocast make them."""
    case = Case("random", random_edges(9, 7, 60), 9, 7)
    bias = Bias("few", 60, 2)
    query, key, value = (t.float() for t in inputs_of(case))
    weight = torch.randn(5, 5)
    with torch.autocast("cpu", torch.bfloat16):
        lowered = [query @ weight, key @ weight, value @ weight, bias.values.bfloat16()]
        out, alpha = call(lowered, case.edge_index, bias)
    expected = exact([t.double() for t in lowered], case, bias)
    assert out.dtype == alpha.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected[0], rtol=1e-2, atol=1e-2)


def test_who_has_the_operator() -> None:
    REGISTRY.select(None)
    for dtype in FLOATING:
        assert REGISTRY.refusal("biased_attention", "cpu", dtype) is None
    refusal = REGISTRY.refusal("biased_attention", "mps", torch.float32)
    assert refusal is not None and "no backend computes biased_attention" in str(refusal)
