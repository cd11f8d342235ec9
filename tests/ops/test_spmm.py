"""spmm and sddmm against plain torch in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import fastgraph
from fastgraph import ops
from fastgraph.ops.spmm import _ADJOINT, REDUCTIONS
from fastgraph.plugins.backend import FLOATING
from tests.conftest import BACKENDS, selected
from tests.emulated import repeats_but
from tests.graphs import Case, all_cases, hub_edges, random_edges
from tests.native.cases import assert_close

WIDTHS = (1, 7, 8, 33, 64, 100, 256, 513)


@pytest.fixture(params=(*BACKENDS, "sparse"))
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every backend in turn, and the one that has a kernel of its own for spmm alone."""
    yield from selected(request.param)


def expected(x: Tensor, case: Case, weight: Tensor | None, reduce: str, transpose: bool) -> Tensor:
    """Gather, scatter and divide, as PyG does."""
    src, dst = case.edge_index.long()
    num_out = case.num_dst
    if transpose:
        src, dst, num_out = dst, src, case.num_src
    message = x[src]
    if weight is not None:
        message = message * weight.reshape(*weight.shape, *[1] * (x.dim() - weight.dim()))
    out = x.new_zeros(num_out, *x.shape[1:]).index_add(0, dst, message)
    if reduce == "mean":
        degree = torch.bincount(dst, minlength=num_out).clamp(min=1)
        out = out / degree.view(-1, *[1] * (x.dim() - 1))
    return out


def inputs(
    case: Case, transpose: bool, *channels: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, int]:
    torch.manual_seed(0)
    num_in, num_out = case.num_src, case.num_dst
    if transpose:
        num_in, num_out = num_out, num_in
    x = torch.randn(num_in, *channels, dtype=dtype, requires_grad=True)
    weight = torch.randn(case.edge_index.shape[1], dtype=dtype, requires_grad=True)
    return x, weight, num_out


@pytest.mark.parametrize("transpose", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_values_and_gradients(
    case: Case, weighted: bool, reduce: str, transpose: bool, backend: str
) -> None:
    x, weight, num_out = inputs(case, transpose, 5)
    leaves = [x, weight] if weighted else [x]
    options = {"num_out": num_out, "reduce": reduce, "transpose": transpose}
    out = ops.spmm(x, case.edge_index, weight if weighted else None, **options)
    reference = expected(x, case, weight if weighted else None, reduce, transpose)
    torch.testing.assert_close(out, reference)
    grad = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, leaves, grad),
        torch.autograd.grad(reference, leaves, grad),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("transpose", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_weights_of_heads(
    case: Case, heads: int, reduce: str, transpose: bool, backend: str
) -> None:
    x, _, num_out = inputs(case, transpose, heads, 5)
    weight = torch.randn(case.edge_index.shape[1], heads, dtype=x.dtype, requires_grad=True)
    options = {"num_out": num_out, "reduce": reduce, "transpose": transpose}
    out = ops.spmm(x, case.edge_index, weight, **options)
    reference = expected(x, case, weight, reduce, transpose)
    grad = torch.randn_like(out)
    compare(out, reference, [x, weight], grad)
    # The channels of a head may have several dimensions, or be a part of one.
    flat = ops.spmm(x.flatten(1), case.edge_index, weight, **options)
    torch.testing.assert_close(flat, reference.flatten(1))


def compare(out: Tensor, reference: Tensor, leaves: list[Tensor], grad: Tensor) -> None:
    torch.testing.assert_close(out, reference)
    ours = torch.autograd.grad(out, leaves, grad)
    torch.testing.assert_close(ours, torch.autograd.grad(reference, leaves, grad))


SHAPES = ((1, 9), (2, 4), (3, 1), (4, 64), (5, 7), (8, 8), (8, 16), (2, 130), (40, 3))


# For GPUs, heads are columns of one matrix or matrices of their own, each as tests/simt has them.
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("shape", repeats_but([(2, 4), (5, 7), (8, 16)], SHAPES), ids=str)
def test_heads_of_every_width(shape: tuple[int, int], dtype: torch.dtype, backend: str) -> None:
    """Those that fill whole vectors and others; with a row that is cut into pieces."""
    case = Case("cut", hub_edges(40, 3000), 40, 40)
    x, _, num_out = inputs(case, False, *shape, dtype=dtype)
    y, grad = (torch.randn_like(x) for _ in range(2))
    y.requires_grad_()
    weight = torch.randn(case.edge_index.shape[1], shape[0]).to(dtype).requires_grad_()
    of_edge = torch.randn_like(weight)

    inputs_and_gradients = (x, y, weight, grad, of_edge)

    def run(operators: Callable[..., tuple[Tensor, Tensor]], *given: Tensor) -> list[Tensor]:
        *leaves, grad, of_edge = (t.detach() for t in given)
        leaves = [t.requires_grad_() for t in leaves]
        summed, product = operators(*leaves)
        of_sums = torch.autograd.grad(summed, [leaves[0], leaves[2]], grad)
        of_products = torch.autograd.grad(product, leaves[:2], of_edge)
        return [summed.detach(), product.detach(), *of_sums, *of_products]

    def ours(a: Tensor, b: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return ops.spmm(a, case.edge_index, w, num_out=num_out), ops.sddmm(a, b, case.edge_index)

    def upstream(a: Tensor, b: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        src, dst = case.edge_index
        return expected(a, case, w, "sum", False), (a[src] * b[dst]).sum(-1)

    truths = run(upstream, *(t.double() for t in inputs_and_gradients))
    magnitudes = run(upstream, *(t.double().abs() for t in inputs_and_gradients))
    for found, truth, magnitude in zip(
        run(ours, *inputs_and_gradients), truths, magnitudes, strict=True
    ):
        assert found.dtype == dtype
        assert_close(found, truth, magnitude)


@pytest.mark.parametrize("transpose", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize("shape", [(5,), (1, 5), (3, 2), (4, 9), (2, 0)], ids=str)
@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_dot_products_of_ends(
    case: Case, shape: tuple[int, ...], transpose: bool, backend: str
) -> None:
    x, _, num_out = inputs(case, transpose, *shape)
    y = torch.randn(num_out, *shape, dtype=x.dtype, requires_grad=True)
    src, dst = case.edge_index.long().flip(0) if transpose else case.edge_index.long()
    out = ops.sddmm(x, y, case.edge_index, transpose=transpose)
    reference = (x[src] * y[dst]).sum(-1)
    compare(out, reference, [x, y], torch.randn_like(out))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_no_larger_than_upstreams(width: int, dtype: torch.dtype, backend: str) -> None:
    case = Case("random", random_edges(50, 40, 900), 50, 40)
    x, weight, num_out = inputs(case, False, width, dtype=dtype)
    out = ops.spmm(x, case.edge_index, weight, num_out=num_out)
    truth = expected(x.double(), case, weight.double(), "sum", False)
    upstream = expected(x, case, weight, "sum", False)
    # Both round; twice upstream's own largest error leaves room for a different order of sums.
    limit = 2 * (upstream.double() - truth).abs().max() + 1e-7
    assert (out.double() - truth).abs().max() <= limit
    grads = torch.autograd.grad(out, [x, weight], torch.ones_like(out))
    truths = torch.autograd.grad(truth, [x, weight], torch.ones_like(truth))
    upstreams = torch.autograd.grad(upstream, [x, weight], torch.ones_like(upstream))
    for ours, theirs, exact in zip(grads, upstreams, truths, strict=True):
        assert ours.dtype == dtype
        limit = 2 * (theirs.double() - exact.double()).abs().max() + 1e-6
        # Autograd rounds the truth itself to the leaf's dtype.
        limit += exact.double().abs().max() * torch.finfo(dtype).eps
        assert (ours.double() - exact.double()).abs().max() <= limit


def test_channels_of_several_dimensions(backend: str) -> None:
    case = Case("random", random_edges(12, 12, 40), 12, 12)
    x, weight, _ = inputs(case, False, 3, 5)
    torch.testing.assert_close(
        ops.spmm(x, case.edge_index, weight), expected(x, case, weight, "sum", False)
    )
    zero_width = torch.ones(12, 0)
    assert ops.spmm(zero_width, case.edge_index).shape == (12, 0)


def test_non_contiguous_inputs(backend: str) -> None:
    case = Case("random", random_edges(12, 12, 40), 12, 12)
    x = torch.randn(7, 12, dtype=torch.float64).t()
    weight = torch.randn(80, dtype=torch.float64)[::2]
    torch.testing.assert_close(
        ops.spmm(x, case.edge_index, weight), expected(x, case, weight, "sum", False)
    )
    out = ops.spmm(x.requires_grad_(), case.edge_index)
    out.sum().backward()  # an expanded gradient has stride 0
    of_heads = torch.randn(2, 12, 5, dtype=torch.float64).transpose(0, 1)
    weight = torch.randn(2, 40, dtype=torch.float64).t()
    out = ops.spmm(of_heads, case.edge_index, weight)
    torch.testing.assert_close(out, expected(of_heads, case, weight, "sum", False))
    src, dst = case.edge_index
    product = ops.sddmm(of_heads.requires_grad_(), out, case.edge_index)
    torch.testing.assert_close(product, (of_heads[src] * out[dst]).sum(-1))
    product.sum().backward()


def test_compressed_input(backend: str) -> None:
    case = Case("random", random_edges(9, 6, 30), 9, 6)
    order = case.edge_index[1].argsort(stable=True)
    src, dst = case.edge_index[:, order]
    ptr = torch.zeros(7, dtype=torch.long)
    ptr[1:] = torch.bincount(dst, minlength=6).cumsum(0)
    x, weight, _ = inputs(case, False, 4)
    grouped = Case("grouped", torch.stack([src, dst]), 9, 6)
    out = ops.spmm(x, src, weight, ptr=ptr, num_out=6)
    torch.testing.assert_close(out, expected(x, grouped, weight, "sum", False))
    x, weight, _ = inputs(case, True, 4)
    out = ops.spmm(x, src, weight, ptr=ptr, num_out=9, transpose=True)
    torch.testing.assert_close(out, expected(x, grouped, weight, "sum", True))


@pytest.mark.parametrize("transpose", [False, True], ids=["forward", "transposed"])
def test_weights_and_products_are_found_by_number_of_edge(transpose: bool, backend: str) -> None:
    case = Case("random", random_edges(9, 6, 30), 9, 6)
    order = case.edge_index[1].argsort(stable=True)
    ptr = torch.zeros(7, dtype=torch.long)
    ptr[1:] = torch.bincount(case.edge_index[1], minlength=6).cumsum(0)
    numbered = torch.stack([case.edge_index[0, order], order])
    x, _, num_out = inputs(case, transpose, 2, 4)
    weight = torch.randn(30, 2, dtype=x.dtype, requires_grad=True)
    options = {"ptr": ptr, "transpose": transpose}
    out = ops.spmm(x, numbered, weight, num_out=num_out, **options)
    compare(out, expected(x, case, weight, "sum", transpose), [x, weight], torch.randn_like(out))
    y = torch.randn(num_out, 2, 4, dtype=x.dtype, requires_grad=True)
    src, dst = case.edge_index.flip(0) if transpose else case.edge_index
    product = ops.sddmm(x, y, numbered, **options)
    compare(product, (x[src] * y[dst]).sum(-1), [x, y], torch.randn_like(product))


def test_nan_and_infinity_stay_where_they_are(backend: str) -> None:
    edge_index = torch.tensor([[0, 1, 2, 2], [0, 0, 1, 2]])
    x = torch.tensor([[1.0], [float("nan")], [float("inf")], [0.0]])
    out = ops.spmm(x, edge_index)
    assert out[0].isnan() and out[1].isinf() and out[2].isinf() and out[3] == 0


@pytest.mark.parametrize("reduce", ["sum", "mean", "mean_adjoint"])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("of_heads", [(), (1,), (2,)], ids=str)
def test_derivatives_of_every_order(
    reduce: str, transpose: bool, of_heads: tuple[int, ...]
) -> None:
    edge_index = random_edges(4, 3, 9)
    num_in, num_out = (3, 4) if transpose else (4, 3)
    x = torch.randn(num_in, 2, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(num_out, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, *of_heads, dtype=torch.float64, requires_grad=True)
    heads = 1 if of_heads == () else of_heads[0]

    def spmm(x: Tensor, weight: Tensor) -> Tensor:
        return torch.ops.fastgraph.spmm(x, edge_index, None, weight, num_out, reduce, transpose)

    def sddmm(grad: Tensor, x: Tensor) -> Tensor:
        return torch.ops.fastgraph.sddmm(grad, x, edge_index, None, heads, reduce, transpose)

    assert set(_ADJOINT) == {"sum", "mean", "mean_adjoint"}
    for function, arguments in ((spmm, (x, weight)), (sddmm, (grad, x))):
        assert torch.autograd.gradcheck(function, arguments)
        assert torch.autograd.gradgradcheck(function, arguments)


def test_gradient_of_weights_alone_for_features_made_in_inference_mode() -> None:
    edge_index, weight = random_edges(6, 6, 20), torch.randn(20, requires_grad=True)
    with torch.inference_mode():
        x = torch.randn(6, 3)
    (found,) = torch.autograd.grad(ops.spmm(x, edge_index, weight).sum(), weight)
    torch.testing.assert_close(found, x[edge_index[0]].sum(1))


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_opcheck(reduce: str) -> None:
    edge_index = random_edges(6, 5, 20)
    x = torch.randn(6, 3, requires_grad=True)
    weight = torch.randn(20, requires_grad=True)
    arguments = (x, edge_index, None, weight, 5, reduce, False)
    torch.library.opcheck(torch.ops.fastgraph.spmm.default, arguments)
    grad = torch.randn(5, 3, requires_grad=True)
    for heads in (1, 3):
        arguments = (grad, x, edge_index, None, heads, reduce, False)
        torch.library.opcheck(torch.ops.fastgraph.sddmm.default, arguments)
    by_head = torch.randn(20, 3, requires_grad=True)
    arguments = (x, edge_index, None, by_head, 5, reduce, False)
    torch.library.opcheck(torch.ops.fastgraph.spmm.default, arguments)


def test_compile_with_dynamic_shapes() -> None:
    def step(x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        return ops.spmm(x.relu(), edge_index, weight, reduce="mean") * 2

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_nodes, num_edges in ((10, 30), (17, 61)):
        edge_index = random_edges(num_nodes, num_nodes, num_edges)
        x = torch.randn(num_nodes, 4, requires_grad=True)
        weight = torch.randn(num_edges, requires_grad=True)
        ours = torch.autograd.grad(compiled(x, edge_index, weight).sum(), [x, weight])
        eager = torch.autograd.grad(step(x, edge_index, weight).sum(), [x, weight])
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("of_heads", [(), (3,), (6,)], ids=str)
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_bits_do_not_depend_on_threads(
    threads: int, of_heads: tuple[int, ...], restore_threads: None
) -> None:
    edge_index = random_edges(300, 300, 20_000)
    edge_index[1, ::3] = 7
    torch.manual_seed(0)
    x = torch.randn(300, 96, requires_grad=True)
    weight = torch.randn(20_000, *of_heads, requires_grad=True)
    grad = torch.randn(300, 96)

    def run() -> list[Tensor]:
        fastgraph.clear_cache()
        out = ops.spmm(x, edge_index, weight)
        return [out, *torch.autograd.grad(out, [x, weight], grad)]

    torch.set_num_threads(1)
    once = run()
    torch.set_num_threads(threads)
    for first, again in zip(once, run(), strict=True):
        assert torch.equal(first, again)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"x": torch.ones(4, 2, dtype=torch.int64)}, ValueError, "x must be one of"),
        ({"x": torch.ones(4)}, ValueError, r"x must be \[nodes, \*channels\], got shape \[4\]"),
        ({"index": torch.tensor([[0, 4], [1, 1]])}, IndexError, "index 4 in row 0, expected 0 <="),
        ({"index": torch.tensor([[0, 1], [1, 9]])}, IndexError, "index 9 in row 1, expected 0 <="),
        ({"index": torch.tensor([[0, -1], [1, 1]])}, IndexError, "index -1 in row 0"),
        ({"index": torch.ones(2, 2)}, ValueError, "edge_index must be int64 or int32, got torch.f"),
        ({"index": torch.ones(3, 2).long()}, ValueError, r"edge_index must be \[2, num_edges\]"),
        ({"x": torch.ones(4, 2).to_sparse()}, ValueError, "x must be a dense tensor, got layout"),
        ({"index": torch.ones(2, 2).long().to_sparse()}, ValueError, "must be a dense tensor"),
        (
            {"index": torch.zeros(2, 2, device="meta").long()},
            ValueError,
            "index and ptr must be on the features' device cpu, got meta",
        ),
        ({"num_out": -1}, ValueError, "num_out must be an integer >= 0, got -1"),
        ({"weight": torch.ones(3)}, ValueError, "weight must have one value for each of 2 edges"),
        ({"weight": torch.ones(3, 2)}, ValueError, r"each of 2 edges.*, got shape \[3, 2\]"),
        ({"weight": torch.ones(2, 2, 1)}, ValueError, r"and each head, got shape \[2, 2, 1\]"),
        ({"weight": torch.ones(2, 3)}, ValueError, "weight must .* that share 2 channels, got 3"),
        ({"weight": torch.ones(2, 0)}, ValueError, "weight must .* that share 2 channels, got 0"),
        ({"weight": torch.ones(2).double()}, ValueError, "weight must have x's dtype and device"),
        ({"reduce": "max"}, ValueError, r"reduce must be one of \['sum', 'mean'\], got 'max'"),
        ({"ptr": torch.tensor([0, 1])}, ValueError, r"ptr must have shape \[5\], got \[2\]"),
    ],
)
def test_bad_input(change: dict[str, object], error: type[Exception], text: str) -> None:
    arguments = {"x": torch.ones(4, 2), "index": torch.tensor([[0, 1], [1, 1]])} | change
    with pytest.raises(error, match=text):
        ops.spmm(**arguments)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"x": torch.ones(4)}, ValueError, r"x must be \[nodes, heads, channels\] or"),
        ({"y": torch.ones(4, 3)}, ValueError, r"the same channels, .* \[2\] .* \[3\]"),
        ({"y": torch.ones(4, 2).double()}, ValueError, "torch.float32 .* and .* torch.float64"),
        ({"y": torch.ones(1, 2)}, IndexError, "index 1 in row 1"),
        ({"index": torch.tensor([[0, 4], [1, 1]])}, IndexError, "index 4 in row 0, expected 0 <="),
    ],
)
def test_bad_input_of_dot_products(
    change: dict[str, object], error: type[Exception], text: str
) -> None:
    arguments = {"x": torch.ones(4, 2), "y": torch.ones(4, 2)}
    arguments |= {"index": torch.tensor([[0, 1], [1, 1]])} | change
    with pytest.raises(error, match=text):
        ops.sddmm(**arguments)


@pytest.mark.parametrize(
    "ptr", [[0, 2, 1, 3], [1, 2, 2, 3], [0, 1, 2, 4], [0, 1, 3], [0, -1, 2, 3]]
)
def test_bad_row_pointers(ptr: list[int], backend: str) -> None:
    with pytest.raises(ValueError, match="ptr"):
        ops.spmm(torch.ones(3, 2), torch.tensor([0, 1, 2]), ptr=torch.tensor(ptr), num_out=3)


def test_more_than_two_to_the_31_elements() -> None:
    num_nodes, width = 2**31 // 256 + 8, 256
    try:
        x = torch.empty(num_nodes, width, dtype=torch.bfloat16)  # pages never touched cost nothing
    except RuntimeError:
        pytest.skip("4 GiB of address space are not available")
    x[-2:] = 1.5
    last = num_nodes - 1
    out = ops.spmm(x, torch.tensor([[last, last - 1], [0, 0]]), num_out=1)
    assert torch.equal(out, torch.full((1, width), 3.0, dtype=torch.bfloat16))
