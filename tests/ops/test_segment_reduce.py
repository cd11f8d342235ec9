"""segment_reduce against the torch functions whose behaviour it reproduces."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fastgraph
from fastgraph import ops
from fastgraph.ops.segment_reduce import REDUCTIONS
from tests.graphs import Case, all_cases, quantised, random_edges


def scatter(
    x: Tensor, case: Case, weight: Tensor | None, reduce: str, transpose: bool = False
) -> Tensor:
    """PyG's path for ``edge_index``: scatter_reduce into zeros."""
    src, dst = case.edge_index.long()
    num_out = case.num_dst
    if transpose:
        src, dst, num_out = dst, src, case.num_src
    message = x[src] if weight is None else x[src] * weight.unsqueeze(-1)
    index = dst.unsqueeze(-1).expand_as(message)
    zeros = x.new_zeros(num_out, x.shape[1])
    return zeros.scatter_reduce(0, index, message, f"a{reduce}", include_self=False)


def grouped(case: Case) -> tuple[Tensor, Tensor]:
    """Row pointers and sources of the edges grouped by destination."""
    order = case.edge_index[1].argsort(stable=True)
    ptr = torch.zeros(case.num_dst + 1, dtype=torch.long)
    counts = torch.bincount(case.edge_index[1].long(), minlength=case.num_dst)
    ptr[1:] = counts.cumsum(0)
    return ptr, case.edge_index[0].long()[order]


@pytest.mark.parametrize("transpose", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_split_ties_equal_scatter_reduce(
    case: Case, weighted: bool, reduce: str, transpose: bool, backend: str
) -> None:
    num_in, num_out = case.num_src, case.num_dst
    if transpose:
        num_in, num_out = num_out, num_in
    weight = quantised(case.edge_index.shape[1], seed=5) - 1 if weighted else None
    for x in (quantised(num_in, 5), torch.randn(num_in, 5, dtype=torch.float64)):
        x.requires_grad_()
        options = {"num_out": num_out, "reduce": reduce, "transpose": transpose}
        out = ops.segment_reduce(x, case.edge_index, weight, **options)
        reference = scatter(x, case, weight, reduce, transpose)
        torch.testing.assert_close(out, reference, rtol=0, atol=0)
        grad = torch.randn_like(out)
        ours, theirs = (torch.autograd.grad(y, x, grad)[0] for y in (out, reference))
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_winner_takes_all_as_in_torch_sparse_mm(case: Case, reduce: str, backend: str) -> None:
    if backend not in ("cpu", "simt"):
        pytest.skip("which of several tied edges wins is the contract of our own kernels")
    ptr, src = grouped(case)
    values = quantised(src.numel(), seed=3) + 1
    for x in (quantised(case.num_src, 5), torch.randn(case.num_src, 5, dtype=torch.float64)):
        adj = torch.sparse_csr_tensor(ptr, src, values, (case.num_dst, case.num_src))
        x.requires_grad_()
        out = ops.segment_reduce(
            x, src, values, ptr=ptr, num_out=case.num_dst, reduce=reduce, ties="winner"
        )
        reference = torch.sparse.mm(adj, x, f"a{reduce}")
        torch.testing.assert_close(out, reference, rtol=0, atol=0)
        grad = torch.randn_like(out)
        ours, theirs = (torch.autograd.grad(y, x, grad)[0] for y in (out, reference))
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("width", [31, 64, 70])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_few_winners_of_many_entries(
    dtype: torch.dtype, width: int, weighted: bool, backend: str
) -> None:
    """Gradients as autograd takes them, with an empty row and a source that wins everywhere."""
    if backend not in ("cpu", "simt"):
        pytest.skip("which of several tied edges wins is the contract of our own kernels")
    case = Case("dense", random_edges(50, 40, 2000), 50, 41)
    ptr, src = grouped(case)
    values = torch.rand(src.numel()).to(dtype) + 0.5 if weighted else None
    x = torch.randn(50, width).to(dtype)
    x[src[0]] = 9
    x.requires_grad_()
    out = ops.segment_reduce(x, src, values, ptr=ptr, num_out=41, reduce="max", ties="winner")
    grad = torch.randn(41, width).to(dtype)
    (ours,) = torch.autograd.grad(out, x, grad)

    exact = x.detach().double().requires_grad_()
    row = torch.repeat_interleave(torch.arange(41), ptr.diff())
    messages = exact[src] if values is None else exact[src] * values.double()[:, None]
    expected = torch.zeros_like(exact)
    for i in range(40):
        best, first = messages.detach()[row == i].max(0)  # the first of equals wins
        edge = (row == i).nonzero()[first, 0]
        share = grad[i].double() * (1 if values is None else values[edge].double())
        expected[src[edge], torch.arange(width)] += share
        torch.testing.assert_close(out[i].double(), best, rtol=torch.finfo(dtype).eps, atol=0)
    # Sums have up to 40 terms, each rounded; those of bfloat16 are of float32, and rounded once.
    limit = torch.finfo(dtype).eps * (1 if dtype == torch.bfloat16 else 40)
    assert (ours.double() - expected).abs().max() <= limit * expected.abs().max()


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_winner_among_nan_and_infinity_as_in_torch_sparse_mm(reduce: str, backend: str) -> None:
    """Infinite weights of losers included: 0 * infinity is nothing that they get."""
    if backend == "scatter":
        pytest.skip("torch_scatter passes NaN over")
    nan, inf = float("nan"), float("inf")
    case = Case("short", random_edges(9, 9, 30), 9, 9)
    ptr, src = grouped(case)
    for special in ((nan,), (inf,), (-inf,), (nan, inf, -inf)):
        for everywhere in (False, True):
            x = torch.randn(9, 5, dtype=torch.float64)
            values = torch.rand(30, dtype=torch.float64) + 0.5
            for number in special:
                x[torch.rand_like(x) < (1 if everywhere else 0.2)] = number
                values[torch.rand_like(values) < 0.1] = number
            x.requires_grad_()
            adj = torch.sparse_csr_tensor(ptr, src, values, (9, 9))
            out = ops.segment_reduce(x, src, values, ptr=ptr, reduce=reduce, ties="winner")
            reference = torch.sparse.mm(adj, x, f"a{reduce}")
            torch.testing.assert_close(out, reference, rtol=0, atol=0, equal_nan=True)
            grad = torch.randn_like(out)
            ours, theirs = (torch.autograd.grad(y, x, grad)[0] for y in (out, reference))
            torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_the_measured_shares_of_ties() -> None:
    """Zeros share with the zero that the output starts from."""
    edge_index = torch.tensor([[0, 1, 2], [0, 0, 0]])
    for values, shares in (
        ([0.0, 0.0, -1.0], [1 / 3, 1 / 3, 0.0]),
        ([1.0, 1.0, -1.0], [0.5, 0.5, 0.0]),
        ([-1.0, -2.0, -1.0], [0.5, 0.0, 0.5]),
    ):
        x = torch.tensor(values).unsqueeze(-1).requires_grad_()
        out = ops.segment_reduce(x, edge_index, num_out=1)
        (grad,) = torch.autograd.grad(out.sum(), x)
        torch.testing.assert_close(grad.squeeze(-1), torch.tensor(shares))


@pytest.mark.parametrize("width", [1, 7, 8, 33, 64, 256, 513])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_width_and_dtype(width: int, dtype: torch.dtype, backend: str) -> None:
    case = Case("random", random_edges(50, 40, 600), 50, 40)
    x = torch.randn(50, width).to(dtype).requires_grad_()
    out = ops.segment_reduce(x, case.edge_index, num_out=40)
    reference = scatter(x, case, None, "max")
    assert out.dtype == dtype
    torch.testing.assert_close(out, reference, rtol=0, atol=0)
    exact = x.detach().double().requires_grad_()
    grad = torch.randn(40, width).to(dtype)
    ours, theirs = (torch.autograd.grad(y, x, grad)[0].double() for y in (out, reference))
    (truth,) = torch.autograd.grad(scatter(exact, case, None, "max"), exact, grad.double())
    # A source sums the shares of up to 20 destinations. Upstream's error over one column can be
    # nought by luck, so an absolute part is needed: a few roundings of the largest partial sum.
    limit = 2 * (theirs - truth).abs().max() + 4 * truth.abs().max() * torch.finfo(dtype).eps
    assert (ours - truth).abs().max() <= limit


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_nan_and_infinity_propagate_as_upstream(reduce: str) -> None:
    nan, inf = float("nan"), float("inf")
    case = Case("nan", torch.tensor([[0, 1, 2, 3, 3, 4, 1], [0, 0, 1, 1, 2, 3, 3]]), 5, 5)
    x = torch.tensor([[1.0], [nan], [inf], [-inf], [2.0]], requires_grad=True)
    out, reference = (
        ops.segment_reduce(x, case.edge_index, reduce=reduce),
        scatter(x, case, None, reduce),
    )
    torch.testing.assert_close(out, reference, equal_nan=True)
    grad = torch.ones_like(out)
    ours, theirs = (torch.autograd.grad(y, x, grad)[0] for y in (out, reference))
    torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("ties", ["split", "winner"])
def test_first_and_second_derivatives(ties: str) -> None:
    edge_index = random_edges(4, 3, 9)
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor) -> Tensor:  # the last row is empty
        return ops.segment_reduce(x, edge_index, num_out=4, ties=ties)

    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)


@pytest.mark.parametrize("ties", ["split", "winner"])
def test_opcheck(ties: str) -> None:
    edge_index = random_edges(6, 5, 20)
    x = torch.randn(6, 3, requires_grad=True)
    arguments = (x, edge_index, None, None, 5, "max", False, ties)
    torch.library.opcheck(torch.ops.fastgraph.segment_reduce.default, arguments)


def test_compile_with_dynamic_shapes() -> None:
    def step(x: Tensor, edge_index: Tensor) -> Tensor:
        return ops.segment_reduce(x.relu(), edge_index) * 2

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_nodes, num_edges in ((10, 30), (17, 61)):
        edge_index = random_edges(num_nodes, num_nodes, num_edges)
        x = torch.randn(num_nodes, 4, requires_grad=True)
        (ours,) = torch.autograd.grad(compiled(x, edge_index).sum(), x)
        (eager,) = torch.autograd.grad(step(x, edge_index).sum(), x)
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ties", ["split", "winner"])
@pytest.mark.parametrize("entries", [2, 6])
def test_channels_have_the_gradients_that_they_have_alone(
    entries: int, ties: str, weighted: bool
) -> None:
    """However many are added at once, and whether or not others tie or are infinite."""
    nodes, channels = 9000, 70  # sums of 2.5 MB, which are added in parts where they are used often
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(nodes, (2, entries * nodes), generator=generator)
    x = torch.randn(nodes, channels, generator=generator)
    x[:, ::3] = x[:, ::3].relu()  # most of which tie
    weight = torch.rand(index.shape[1], generator=generator) if weighted else None
    grad = torch.randn(nodes, channels, generator=generator)
    grad[5, 40] = float("inf")

    def gradient(columns: slice) -> torch.Tensor:
        part = x[:, columns].clone().requires_grad_()
        out = ops.segment_reduce(part, index, weight, ties=ties)
        (found,) = torch.autograd.grad(out, part, grad[:, columns])
        return found

    found = gradient(slice(None))
    for column in (0, 1, 15, 16, 40, 41, 68, 69):
        alone = gradient(slice(column, column + 1))
        assert torch.equal(found[:, column : column + 1].view(torch.int32), alone.view(torch.int32))


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("ties", ["split", "winner"])
def test_bits_do_not_depend_on_threads(threads: int, ties: str, restore_threads: None) -> None:
    edge_index = random_edges(300, 300, 20_000)
    edge_index[1, ::3] = 7
    x = quantised(300, 96, dtype=torch.float32).requires_grad_()
    torch.manual_seed(0)
    grad = torch.randn(300, 96)

    def run() -> list[Tensor]:
        fastgraph.clear_cache()
        out = ops.segment_reduce(x, edge_index, ties=ties)
        return [out, *torch.autograd.grad(out, x, grad)]

    torch.set_num_threads(1)
    once = run()
    torch.set_num_threads(threads)
    for first, again in zip(once, run(), strict=True):
        assert torch.equal(first, again)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"reduce": "sum"}, r"reduce must be one of \['max', 'min'\], got 'sum'"),
        ({"ties": "first"}, r"ties must be one of \['split', 'winner'\], got 'first'"),
        ({"weight": torch.ones(2, requires_grad=True)}, "weight must not require a gradient"),
        ({"weight": torch.ones(5)}, "weight must have one value for each of 2 edges"),
    ],
)
def test_bad_input(change: dict[str, object], text: str) -> None:
    arguments = {"x": torch.ones(4, 2), "index": torch.tensor([[0, 1], [1, 1]])} | change
    with pytest.raises(ValueError, match=text):
        ops.segment_reduce(**arguments)
