"""edge_softmax against plain torch in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fastgraph
from fastgraph import ops
from fastgraph.plugins.backend import FLOATING
from tests.graphs import Case, all_cases, hub_edges, random_edges


def expected(score: Tensor, at: Tensor, num_out: int) -> Tensor:
    """The exponentials over their sums, relative to the largest score."""
    index = at.long().view(-1, *[1] * (score.dim() - 1)).expand_as(score)
    largest = score.new_full((num_out, *score.shape[1:]), -torch.inf)
    largest = largest.scatter_reduce(0, index, score.detach(), "amax")
    exponential = (score - largest.gather(0, index)).exp()
    total = torch.zeros_like(largest).scatter_add(0, index, exponential)
    return exponential / total.gather(0, index)


def sizes(case: Case, transpose: bool) -> tuple[Tensor, dict[str, object]]:
    """The node whose edges share a softmax, of each edge, and arguments of the operator."""
    num_in, num_out = case.num_src, case.num_dst
    if transpose:
        num_in, num_out = num_out, num_in
    at = case.edge_index[0 if transpose else 1]
    return at, {"num_in": num_in, "num_out": num_out, "transpose": transpose}


@pytest.mark.parametrize("transpose", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (4, 1), (8,), (2, 5), (19,), (0,)], ids=str)
@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_values_and_gradients(
    case: Case, shape: tuple[int, ...], transpose: bool, backend: str
) -> None:
    at, options = sizes(case, transpose)
    score = torch.randn(case.num_edges, *shape, dtype=torch.float64).mul_(3).requires_grad_()
    out = ops.edge_softmax(score, case.edge_index, **options)
    reference = expected(score, at, options["num_out"])
    torch.testing.assert_close(out, reference)
    grad = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad(o, score, grad)[0] for o in (out, reference))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("heads", [1, 4, 5, 8, 16, 33])
def test_error_is_of_the_size_of_roundings(heads: int, dtype: torch.dtype, backend: str) -> None:
    """Also where the row of a hub is cut into pieces, whose largest scores differ."""
    case = Case("cut", hub_edges(40, 9000), 40, 40)
    at, options = sizes(case, False)
    score = torch.randn(case.num_edges, heads).mul_(4).to(dtype).requires_grad_()
    out = ops.edge_softmax(score, case.edge_index, **options)
    truth = expected(score.double(), at, 40)
    grad = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, score, grad)
    (exact,) = torch.autograd.grad(truth, score, grad.double())
    eps = torch.finfo(dtype).eps
    assert out.dtype == found.dtype == dtype
    upstream = expected(score, at, 40)
    (theirs,) = torch.autograd.grad(upstream, score, grad)

    def relative(weight: Tensor) -> Tensor:
        return ((weight.double() - truth) / truth.clamp(min=torch.finfo(dtype).tiny)).abs().max()

    # Scores differ by up to 32, and half a unit in the last place of that is a factor of 16 eps;
    # sums over thousands of edges are rounded in upstream's arithmetic as well.
    rounding = 17 * eps * (2 if dtype == torch.float64 else 1)  # the truth is rounded, too
    assert relative(out) <= rounding + 2 * relative(upstream)
    limit = rounding * grad.abs().max() + 2 * (theirs.double() - exact.double()).abs().max()
    assert (found.double() - exact.double()).abs().max() <= limit


def test_no_score_is_too_large(backend: str) -> None:
    index = torch.tensor([[0, 1, 2, 0], [0, 0, 0, 1]])
    score = torch.tensor([[1e30], [1e30], [-1e30], [-3e38]], requires_grad=True)
    out = ops.edge_softmax(score, index, num_out=2, num_in=3)
    torch.testing.assert_close(out, torch.tensor([[0.5], [0.5], [0.0], [1.0]]))


@pytest.mark.parametrize("hub", [4, 9000], ids=["whole", "cut"])
def test_infinities_and_nan_stay_in_their_row(hub: int, backend: str) -> None:
    inf = float("inf")
    src, dst = torch.zeros(hub + 5, dtype=torch.int64), torch.full((hub + 5,), 3)
    dst[-5:] = torch.tensor([0, 0, 1, 1, 2])
    score = torch.zeros(hub + 5, 2)
    score[0] = -inf  # no weight among others
    score[-5:] = torch.tensor([-inf, -inf, float("nan"), 1.0, inf])[:, None]
    out = ops.edge_softmax(score, torch.stack([src, dst]), num_out=4, num_in=1)
    assert out[-5:].isnan().all()
    torch.testing.assert_close(out[1:hub], torch.full((hub - 1, 2), 1 / (hub - 1)))
    assert torch.equal(out[0], torch.zeros(2))


def test_edges_are_found_by_number_and_may_have_strides(backend: str) -> None:
    index = random_edges(9, 6, 30)
    order = index[1].argsort(stable=True)
    ptr = torch.zeros(7, dtype=torch.long)
    ptr[1:] = torch.bincount(index[1], minlength=6).cumsum(0)
    numbered = torch.stack([index[0, order], order])
    score = torch.randn(3, 30, dtype=torch.float64).t().requires_grad_()
    out = ops.edge_softmax(score, numbered, ptr=ptr, num_out=6, num_in=9)
    torch.testing.assert_close(out, expected(score, index[1], 6))
    out.sum().backward()  # an expanded gradient has stride 0
    out = ops.edge_softmax(score, numbered, ptr=ptr, num_out=9, num_in=6, transpose=True)
    torch.testing.assert_close(out, expected(score, index[0], 9))


@pytest.mark.parametrize("transpose", [False, True])
def test_derivatives_of_every_order(transpose: bool) -> None:
    case = Case("random", random_edges(4, 3, 9), 4, 3)
    score = torch.randn(9, 2, dtype=torch.float64, requires_grad=True)
    _, options = sizes(case, transpose)

    def softmax(score: Tensor) -> Tensor:
        return ops.edge_softmax(score, case.edge_index, **options)

    assert torch.autograd.gradcheck(softmax, (score,))
    assert torch.autograd.gradgradcheck(softmax, (score,))


def test_opcheck_and_compile() -> None:
    index = random_edges(6, 5, 20)
    score = torch.randn(20, 3, requires_grad=True)
    arguments = (score, index, None, 5, 6, False)
    torch.library.opcheck(torch.ops.fastgraph.edge_softmax.default, arguments)

    def step(score: Tensor) -> Tensor:
        return ops.edge_softmax(score.relu(), index, num_out=5, num_in=6) * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    weight = torch.randn(20, 3)
    ours, eager = (
        torch.autograd.grad((f(score) * weight).sum(), score)[0] for f in (compiled, step)
    )
    torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("heads", [1, 4, 6])
def test_bits_do_not_depend_on_threads(heads: int, restore_threads: None) -> None:
    index = random_edges(300, 300, 20_000)
    index[1, ::3] = 7
    torch.manual_seed(0)
    score, grad = torch.randn(20_000, heads, requires_grad=True), torch.randn(20_000, heads)

    def run() -> list[Tensor]:
        fastgraph.clear_cache()
        out = ops.edge_softmax(score, index, num_out=300)
        return [out, *torch.autograd.grad(out, score, grad)]

    results = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        results.append(run())
    for first, again in zip(results[0] * 2, results[1] + results[2], strict=True):
        assert torch.equal(first, again)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"score": torch.ones(2).int()}, ValueError, "score must be one of"),
        ({"score": torch.ones(3, 2)}, ValueError, r"score must be \[E, \*heads\] for 2 edges, got"),
        ({"score": torch.tensor(1.0)}, ValueError, r"score must be \[E, \*heads\] for 2 edges"),
        ({"num_out": -1}, ValueError, "num_out must be an integer >= 0, got -1"),
        ({"num_in": -1}, ValueError, "num_in must be an integer >= 0, got -1"),
        ({"num_out": 1}, IndexError, "index 1 in row 1"),
        ({"num_in": 1}, IndexError, "index 1 in row 0"),
    ],
)
def test_bad_input(change: dict[str, object], error: type[Exception], text: str) -> None:
    arguments = {"score": torch.ones(2, 2), "index": torch.tensor([[0, 1], [1, 1]]), "num_out": 2}
    with pytest.raises(error, match=text):
        ops.edge_softmax(**(arguments | change))
