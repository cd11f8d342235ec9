"""block_attention against attention by its formula in float64, and windows against their edges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgraph import ops
from fastgraph.graphs.graph import Graph
from fastgraph.graphs.windows import windows_of
from fastgraph.ops.score_bias import ENTRY_TYPES
from fastgraph.plugins.backend import FLOATING
from tests.conftest import EMULATED, selected
from tests.graphs import hub_edges, random_edges

CLIQUE = torch.cartesian_prod(torch.arange(40), torch.arange(40)).T
GRAPHS = {
    "no nodes": (torch.empty(2, 0, dtype=torch.int64), 0, 0),
    "no edges": (torch.empty(2, 0, dtype=torch.int64), 3, 18),
    "one window": (random_edges(5, 9, 30), 5, 9),
    "duplicates": (random_edges(3, 35, 300), 3, 35),
    "bipartite": (random_edges(90, 33, 400), 90, 33),
    "hub": (hub_edges(150, 700), 150, 150),
    "clique": (CLIQUE, 40, 40),
}
TYPES = 5


@pytest.fixture(params=["cpu", "reference", EMULATED])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each backend that has the kernel."""
    yield from selected(request.param)


def inputs(
    graph: str, heads: int, channels: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, list[Tensor]]:
    """The edges, and query, key and value."""
    torch.manual_seed(1)
    index, sources, destinations = GRAPHS[graph]
    tensors = [
        torch.randn(nodes, heads, channels, dtype=dtype, requires_grad=True)
        for nodes in (destinations, sources, sources)
    ]
    return index, tensors


def table(heads: int, index: Tensor, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    bias = torch.randn(TYPES, heads, dtype=dtype, requires_grad=True)
    return {"bias": bias, "bias_index": (index[0] * 7 + index[1]).remainder(TYPES).to(torch.uint8)}


def expected(
    query: Tensor, key: Tensor, value: Tensor, index: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The output, and the logarithm of the sum of exponentials, 0 without edges; bias of edges."""
    source, destination = index
    score = query.shape[-1] ** -0.5 * (query[destination] * key[source]).sum(-1)
    if bias is not None:
        score = score + bias
    outs, sums = [query[:0]], [query[:0, :, 0]]
    for node in range(len(query)):
        own = destination == node
        weight = score[own].softmax(0).unsqueeze(-1)
        outs.append((weight * value[source[own]]).sum(0, keepdim=True))
        total = score[own].logsumexp(0) if own.any() else query[node, :, 0] * 0
        sums.append(total.unsqueeze(0))
    return torch.cat(outs), torch.cat(sums)


def logsum(stats: Tensor) -> Tensor:
    """The logarithm of the sum of exponentials, 0 for none."""
    is_empty = stats[..., 1] == 0
    return stats[..., 0].detach() - torch.where(is_empty, 1, stats[..., 1]).log()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("channels", [1, 8, 19, 32])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("graph", GRAPHS)
def test_values_and_gradients(
    graph: str, heads: int, channels: int, has_bias: bool, backend: str
) -> None:
    index, tensors = inputs(graph, heads, channels)
    given: dict[str, Any] = table(heads, index) if has_bias else {}
    out, stats = ops.block_attention(*tensors, index, **given)
    of_edges = given["bias"][given["bias_index"].long()] if has_bias else None
    wanted, sums = expected(*tensors, index, of_edges)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(logsum(stats), sums)
    learned = [*tensors, *([given["bias"]] if has_bias else [])]
    grads = torch.randn_like(out), torch.randn_like(sums)
    ours = torch.autograd.grad((out, logsum(stats)), learned, grads, allow_unused=True)
    theirs = torch.autograd.grad((wanted, sums), learned, grads, allow_unused=True)
    for found, exact in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, torch.zeros_like(found) if exact is None else exact)


@pytest.mark.parametrize("given", ["transpose", "ptr", "self_loops", "scale"])
def test_forms_of_edges(given: str, backend: str) -> None:
    index, (query, key, value) = inputs("hub", 2, 8)
    options: dict[str, Any] = {"scale": 0.3} if given == "scale" else {}
    same: dict[str, Any] = dict(options)
    edges = index
    if given == "transpose":
        edges, options = index.flip(0), {"transpose": True}
    elif given == "ptr":
        order = index[1].argsort(stable=True)
        counts = torch.bincount(index[1], minlength=len(query))
        edges = index[0][order]
        options = {"ptr": torch.cat([counts.new_zeros(1), counts.cumsum(0)])}
    elif given == "self_loops":
        options = same = {"self_loops": len(query)}
    found, stats = ops.block_attention(query, key, value, edges, **options)
    out, _, known = ops.attention(query, key, value, index, **same)
    torch.testing.assert_close(found, out)
    torch.testing.assert_close(stats, known)
    ours, theirs = (
        torch.autograd.grad(y.square().sum(), [query, key, value]) for y in (found, out)
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [x for x in FLOATING if x != torch.float64])
@pytest.mark.parametrize("graph", ["hub", "clique"])
def test_dtypes(graph: str, dtype: torch.dtype, backend: str) -> None:
    """As near to float64 as attention by rows, to a small factor."""
    index, tensors = inputs(graph, 2, 8, dtype)
    given = table(2, index, dtype)
    wide = [x.detach().double().requires_grad_() for x in (*tensors, given["bias"])]
    grad = torch.randn(tensors[0].shape, dtype=torch.float64).to(dtype)

    def results(operator: Any, tensors: list[Tensor], bias: Tensor) -> list[Tensor]:
        out = operator(*tensors, index, bias=bias, bias_index=given["bias_index"])[0]
        found = torch.autograd.grad(out, [*tensors, bias], grad.to(out.dtype))
        return [x.detach().double() for x in (out, *found)]

    exact = results(ops.attention, wide[:3], wide[3])
    by_rows, found = (
        results(operator, tensors, given["bias"])
        for operator in (ops.attention, ops.block_attention)
    )
    for ours, theirs, truth in zip(found, by_rows, exact, strict=True):
        assert ours.dtype == torch.float64
        rounding = torch.finfo(dtype).eps * float(truth.abs().max())
        allowed = 4 * float((theirs - truth).abs().max()) + 2 * rounding
        assert float((ours - truth).abs().max()) <= allowed


@pytest.mark.parametrize("backend", ["cpu"], indirect=True)
@pytest.mark.parametrize("is_source", [False, True], ids=["of keys", "of queries"])
def test_sums_of_hubs_err_by_columns_at_once(is_source: bool, backend: str) -> None:
    """One float32 sum over all 60,000 edges errs 10 times as much as these, and more."""
    torch.manual_seed(2)
    index = torch.stack([torch.randint(3000, (60_000,)), torch.zeros(60_000, dtype=torch.int64)])
    shapes = {False: (1, 2, 8), True: (3000, 2, 8)}
    query, key = torch.randn(shapes[is_source]), torch.randn(shapes[not is_source])
    value = torch.rand(key.shape) + 1
    tensors = [x.requires_grad_() for x in (query, key, value)]
    grad = torch.rand(query.shape) + 1

    def results(tensors: list[Tensor]) -> list[Tensor]:
        out = ops.block_attention(*tensors, index.flip(0) if is_source else index)[0]
        found = torch.autograd.grad(out, tensors, grad.to(out.dtype))
        return [out.detach(), found[0], found[2]]

    exact = results([x.detach().double().requires_grad_() for x in tensors])
    for ours, truth, allowed in zip(results(tensors), exact, (3e-6, 5e-4, 3e-6), strict=True):
        if truth.norm() > 1e-6:  # a query with one value has no gradient but rounding
            assert (ours - truth).norm() < allowed * truth.norm()


@pytest.mark.parametrize("dtype", FLOATING)
def test_a_lone_edge_has_all_weight_in_all_passes(dtype: torch.dtype, backend: str) -> None:
    """Scores of 10,000, which are rounded by a thousandth in float32, have the same bits in all."""
    torch.manual_seed(2)
    index = torch.randperm(40).expand(2, 40)
    tensors = [(100 * torch.randn(40, 2, 19)).to(dtype).requires_grad_() for _ in range(3)]
    grad = torch.randn(40, 2, 19).to(dtype)
    out, _ = ops.block_attention(*tensors, index)
    assert torch.equal(out, tensors[2])
    of_query, of_key, of_value = torch.autograd.grad(out, tensors, grad)
    assert torch.equal(of_value, grad)
    assert not of_query.any() and not of_key.any()


@pytest.mark.parametrize("kind", ENTRY_TYPES)
@pytest.mark.parametrize("types", [1, 40, 200])
def test_types_of_all_dtypes(types: int, kind: torch.dtype, backend: str) -> None:
    index, tensors = inputs("bipartite", 3, 8)
    bias = torch.randn(types, 3, dtype=torch.float64)
    bias_index = torch.randint(types, index.shape[1:]).to(kind)
    found, _ = ops.block_attention(*tensors, index, bias=bias, bias_index=bias_index)
    torch.testing.assert_close(found, expected(*tensors, index, bias[bias_index.long()])[0])


def test_hidden_edges(backend: str) -> None:
    """Edges with a bias of -infinity take no part, and nodes with these alone get 0."""
    index, tensors = inputs("hub", 2, 8)
    bias = torch.zeros(2, 2, dtype=torch.float64)
    bias[1] = -torch.inf
    bias_index = ((index[1] % 3 == 0) | (index[0] % 4 == 0)).to(torch.uint8)
    out, stats = ops.block_attention(*tensors, index, bias=bias, bias_index=bias_index)
    kept = index[:, bias_index == 0]
    torch.testing.assert_close(out, expected(*tensors, kept)[0])
    assert not out[0].any() and not stats[0].any()
    grads = torch.autograd.grad(out.square().sum(), tensors)
    exact = torch.autograd.grad(expected(*tensors, kept)[0].square().sum(), tensors)
    torch.testing.assert_close(grads, exact)


@pytest.mark.parametrize("special", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_what_is_not_finite_stays_with_its_edges(which: int, special: float, backend: str) -> None:
    """A node has no part in results of others in its window, as by rows."""
    index, tensors = inputs("hub", 2, 8)
    grad = torch.randn_like(tensors[0])
    with torch.no_grad():
        (*tensors, grad)[which][20, 1, 3] = special

    def results(operator: Any) -> list[Tensor]:
        out = operator(*tensors, index)[0]
        return [out, *torch.autograd.grad(out, tensors, grad)]

    found = results(ops.block_attention)
    assert not all(ours.isfinite().all() for ours in found)
    for ours, rows in zip(found, results(ops.attention), strict=True):
        is_finite = ours.isfinite()
        assert torch.equal(is_finite, rows.isfinite())
        torch.testing.assert_close(ours[is_finite], rows[is_finite])


@pytest.mark.parametrize("has_bias", [False, True])
def test_scores_of_minus_infinity_alone(has_bias: bool, backend: str) -> None:
    """NaN as by rows and in PyG, but with a bias as a node without edges."""
    index, tensors = inputs("hub", 2, 8)
    query, key, _ = (x.detach().fill_(1) for x in tensors)
    key[index[0, index[1] == 20], 1, 3] = -torch.inf
    bias = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    hidden = {"bias": bias, "bias_index": torch.zeros_like(index[0])} if has_bias else {}
    grad = torch.randn_like(query)

    def results(operator: Any) -> list[Tensor]:
        out, *_, stats = operator(*tensors, index, **hidden)
        return [out, stats, *torch.autograd.grad(out, tensors, grad)]

    out, *rest = results(ops.block_attention)
    assert bool(out[20, 1].isnan().all()) != has_bias
    for ours, rows in zip([out, *rest], results(ops.attention), strict=True):
        torch.testing.assert_close(ours, rows, equal_nan=True)


def test_second_derivatives(backend: str) -> None:
    index = random_edges(4, 4, 9)
    tensors = [torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    bias = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    types = (index[0] % 2).to(torch.uint8)

    def call(*given: Tensor) -> Tensor:
        return ops.block_attention(*given[:3], index, bias=given[3], bias_index=types)[0]

    assert torch.autograd.gradcheck(call, [*tensors, bias])
    assert torch.autograd.gradgradcheck(call, [*tensors, bias])


def test_torch_knows_the_operator(backend: str) -> None:
    index, tensors = inputs("one window", 2, 3)
    given = table(2, index)
    torch.library.opcheck(
        torch.ops.fastgraph.block_attention.default,
        (*tensors, *given.values(), None, index, None, None, 0, False, 0.5, 0.0, False),
    )


@pytest.mark.parametrize("has_bias", [False, True])
def test_kernels_do_what_rows_do_where_sub_blocks_cannot(has_bias: bool, backend: str) -> None:
    """With dropout, weights and something added, which the operator takes as all of its kind do."""
    index, tensors = inputs("bipartite", 2, 8)
    given: dict[str, Any] = table(2, index) if has_bias else {}
    seed, addend = torch.tensor([3]), torch.randn(1, 2, 8, dtype=torch.float64)
    operands = (*tensors, given.get("bias"), given.get("bias_index"))
    out, stats, alpha = torch.ops.fastgraph.block_attention(
        *operands, addend, index, None, seed, 0, False, 8**-0.5, 0.3, True
    )
    wanted = ops.attention(
        *tensors, index, addend=addend, dropout=0.3, seed=seed, need_weights=True, **given
    )
    torch.testing.assert_close((out, alpha, stats), wanted)
    learned = [*tensors, *([given["bias"]] if has_bias else [])]
    grads = torch.randn_like(out), torch.randn_like(alpha)
    ours = torch.autograd.grad((out, alpha), learned, grads)
    torch.testing.assert_close(ours, torch.autograd.grad(wanted[:2], learned, grads))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"key": torch.ones(5, 2, 7)}, ValueError, "key must have shape"),
        ({"value": torch.ones(4, 2, 8)}, ValueError, "value must have shape"),
        ({"query": torch.ones(9, 2, 8).double()}, ValueError, "must have the dtype"),
        ({"bias": torch.ones(2, 2)}, ValueError, "bias_index must be given together with bias"),
        ({"bias_index": torch.ones(30).int()}, ValueError, "bias_index must be None without bias"),
        (
            {"bias": torch.ones(2, 3), "bias_index": torch.zeros(30).int()},
            ValueError,
            r"bias must have shape \[types, 2\], got \[2, 3\]",
        ),
        (
            {"bias": torch.ones(2, 2).double(), "bias_index": torch.zeros(30).int()},
            ValueError,
            "bias must have the dtype",
        ),
        (
            {"bias": torch.ones(2, 2), "bias_index": torch.full((30,), 2)},
            IndexError,
            "bias_index holds 2",
        ),
        ({"bias": torch.ones(2, 2), "bias_index": torch.zeros(29).int()}, ValueError, "bias_index"),
        ({"index": torch.full((2, 30), 9)}, IndexError, "holds index 9"),
        ({"self_loops": -1}, ValueError, "self_loops must be an integer >= 0"),
    ],
)
def test_wrong_arguments(
    changed: dict[str, Any], error: type[Exception], message: str, backend: str
) -> None:
    index, _, _ = GRAPHS["one window"]
    sizes = {"query": 9, "key": 5, "value": 5}
    given: dict[str, Any] = {name: torch.ones(nodes, 2, 8) for name, nodes in sizes.items()}
    with pytest.raises(error, match=message):
        ops.block_attention(**given | {"index": index} | changed)


@pytest.mark.parametrize("graph", GRAPHS)
def test_windows_have_each_edge_once(graph: str) -> None:
    index, sources, destinations = GRAPHS[graph]
    made = Graph(index, sources, destinations)
    for rows, ends in ((made.by_destination, index.flip(0)), (made.by_source, index)):
        windows = windows_of(rows)
        found, edge = [], 0
        for window, (begin, end) in enumerate(zip(windows.ptr, windows.ptr[1:], strict=False)):
            for column in range(int(begin), int(end)):
                assert int(windows.first[column]) == edge
                lanes = int(windows.lanes[column])
                assert 0 < lanes < 1 << 16
                for lane in range(16):
                    if lanes >> lane & 1:
                        number = int(windows.edge[edge])
                        assert [16 * window + lane, int(windows.node[column])] == ends[
                            :, number
                        ].tolist()
                        found.append(number)
                        edge += 1
        assert sorted(found) == list(range(index.shape[1]))
        assert int(windows.first[-1]) == edge
        assert windows.fill == index.shape[1] / max(len(windows.node), 1)
    if graph == "clique":
        assert windows.fill == 40 / 3


def test_windows_of_rows_in_another_order_are_refused() -> None:
    rows = Graph(random_edges(5, 9, 30), 5, 9).by_destination
    with pytest.raises(ValueError, match="rows must be in ascending order"):
        windows_of(rows._replace(order=torch.arange(9).int()))


def test_the_same_bits_for_any_number_of_threads() -> None:
    index = random_edges(2000, 2000, 40_000)
    tensors = [torch.randn(2000, 4, 8, requires_grad=True) for _ in range(3)]
    given = table(4, index, torch.float32)
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            out, _ = ops.block_attention(*tensors, index, **given)
            found.append([out, *torch.autograd.grad(out.sum(), [*tensors, given["bias"]])])
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))
