"""Calls of operators go past torch's dispatcher only where it would add nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.nn import GCNConv

import fastgraph
from fastgraph import ops
from tests.graphs import random_edges

EDGES = random_edges(6, 6, 20)


def features() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(6, 5)


class _Recorder:
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def record(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class _Calls(_Recorder, TorchDispatchMode):
    __torch_dispatch__ = _Recorder.record


class _Functions(_Recorder, TorchFunctionMode):
    __torch_function__ = _Recorder.record


@pytest.mark.parametrize("mode", [_Calls, _Functions])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_modes_see_the_operator(mode: type[_Calls | _Functions], requires_grad: bool) -> None:
    x = features().requires_grad_(requires_grad)
    with mode() as calls:
        out = ops.spmm(x, EDGES)
    assert "fastgraph.spmm.default" in calls.names
    assert torch.equal(out, ops.spmm(x, EDGES))


def test_profiler_lists_operators() -> None:
    x = features().requires_grad_()
    with torch.profiler.profile() as profile:
        ops.segment_reduce(x, EDGES).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"fastgraph::segment_reduce", "fastgraph::segment_reduce_backward"} <= names


def test_cuda_graphs_of_compiled_code_leave_operators_out() -> None:
    """Each reads on the host which tensors it was given; a replayed CUDA graph would not."""
    every = torch._C._dispatch_get_all_op_names()
    names = [name for name in every if name.startswith("fastgraph::")]
    assert {"fastgraph::spmm", "fastgraph::gat_backward"} <= set(names)
    for name in names:
        tags = getattr(torch.ops.fastgraph, name.removeprefix("fastgraph::")).default.tags
        assert torch.Tag.cudagraph_unsafe in tags, name


def test_negated_views_are_resolved() -> None:
    """The imaginary part of a conjugate is a view whose memory holds the opposite sign."""
    x = torch.complex(features(), features() + 1).conj().imag
    assert x.is_neg()
    assert torch.equal(ops.spmm(x, EDGES), ops.spmm(x.resolve_neg(), EDGES))


def test_fake_tensors_compute_shapes() -> None:
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        x, edges = mode.from_tensor(features()), mode.from_tensor(EDGES)
        out = ops.spmm(x, edges, num_out=9)
    assert type(out) is type(x) and out.shape == (9, 5)
    assert ops.spmm(x, edges, num_out=9).shape == (9, 5)  # outside of the mode, too


def test_subclasses_of_tensors_see_the_operator() -> None:
    seen = []

    class Logged(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return super().__torch_function__(func, types, args, kwargs or {})

    ops.spmm(features().as_subclass(Logged), EDGES)
    assert "fastgraph.spmm.default" in seen


def test_nothing_is_recorded_below_autograd() -> None:
    x = features().requires_grad_()
    with torch._C._AutoDispatchBelowAutograd():
        assert ops.spmm(x, EDGES).grad_fn is None
    with torch.inference_mode():
        assert ops.spmm(x, EDGES).is_inference()
    with torch.no_grad():
        assert not ops.spmm(x, EDGES).requires_grad
    assert not ops.spmm(x.detach(), EDGES).requires_grad


def test_forward_mode_is_refused() -> None:
    x = features()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match="jvp"):
            ops.spmm(dual, EDGES)


def test_a_tensor_that_outlived_its_transform() -> None:
    """Dead wrappers of torch.func are unwrapped, as by torch's own operators."""
    escaped = []
    torch.func.grad(lambda x: (escaped.append(x), x.sum())[1])(features())
    assert torch.equal(ops.spmm(escaped[0], EDGES), ops.spmm(features(), EDGES))


@pytest.mark.parametrize(
    ("change", "name"), [({"index": [[0], [1]]}, "index"), ({"num_out": 2.5}, "num_out")]
)
def test_wrong_types_are_named(change: dict[str, object], name: str) -> None:
    with pytest.raises(RuntimeError, match=f"argument '{name}'"):
        ops.spmm(**{"x": features(), "index": EDGES, **change})


def test_no_zeros_are_made_for_what_has_no_gradient() -> None:
    """The record of a maximum is as large as its output."""
    x = features().requires_grad_()
    out = ops.segment_reduce(x, EDGES)
    grad = torch.ones_like(out)
    with _Calls() as calls:
        out.backward(grad)
    assert "aten.zeros.default" not in calls.names
    assert "fastgraph.segment_reduce_backward.default" in calls.names


def test_a_result_without_a_gradient() -> None:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> None:
            return None

    x = features().requires_grad_()
    assert torch.autograd.grad(Nothing.apply(ops.spmm(x, EDGES)).sum(), x, allow_unused=True) == (
        None,
    )


def test_gradients_through_attention_weights_alone() -> None:
    torch.manual_seed(0)
    x, score = torch.randn(6, 2, 3), torch.randn(6, 2, requires_grad=True)
    out, alpha, _ = ops.gat(x, score, score, EDGES, need_weights=True)
    factor = torch.randn_like(alpha)
    (alone,) = torch.autograd.grad((alpha * factor).sum(), score, retain_graph=True)
    (beside,) = torch.autograd.grad((alpha * factor).sum() + 0 * out.sum(), score)
    torch.testing.assert_close(alone, beside)
    assert alone.abs().sum() > 0


# Whose gradient is the operator itself, on other arguments, and not a backward operator.
OWN_GRADIENT = {"spmm"}


def results(x: Tensor) -> dict[str, Tensor]:
    """Differentiable results, by the operator."""
    heads = x.unflatten(1, (2, 2))
    score = heads.sum(-1)
    return {
        "segment_reduce": ops.segment_reduce(x, EDGES),
        "segment_reduce of winners": ops.segment_reduce(x, EDGES, ties="winner"),
        "head_scores": ops.head_scores(heads, heads[:2]),
        "gat": ops.gat(heads, score, score, EDGES)[0],
        "gat_with_scores": ops.gat_with_scores(heads, heads[:2], EDGES)[0],
        "gatv2": ops.gatv2(heads, heads, heads[:1], EDGES)[0],
        "gatv2 of edges": ops.gatv2(
            heads, heads, heads[:1], EDGES, edge=x[EDGES[0]], weight_edge=heads[:4].transpose(0, 1)
        )[0],
        "attention": ops.attention(heads, heads, heads, EDGES)[0],
        "biased_attention of edges": ops.attention(
            heads, heads, heads, EDGES, bias=score[EDGES[0]]
        )[0],
        "biased_attention of types": ops.attention(
            heads, heads, heads, EDGES, bias=score, bias_index=EDGES[0].to(torch.uint8)
        )[0],
        "block_attention": ops.block_attention(
            heads, heads, heads, EDGES, bias=score, bias_index=EDGES[0].to(torch.uint8)
        )[0],
        "edge_attention": ops.edge_attention(
            heads, heads, heads, EDGES, edge=x[EDGES[0]], weight_edge=heads[:4].transpose(0, 1)
        )[0],
        "dense_attention": ops.dense_attention(heads, heads, heads, torch.tensor([0, 2, 2, 6]))[0],
        "spmm": ops.spmm(x, EDGES),
    }


def test_a_batch_of_gradients() -> None:
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    for name, out in results(x).items():
        grads = torch.randn(3, *out.shape, dtype=torch.float64)
        (together,) = torch.autograd.grad(out, x, grads, retain_graph=True, is_grads_batched=True)
        each = [torch.autograd.grad(out, x, grad, retain_graph=True)[0] for grad in grads]
        torch.testing.assert_close(together, torch.stack(each), msg=lambda m, n=name: f"{n}: {m}")


def test_the_tangent_of_a_gradient() -> None:
    """The gradient is linear in the gradient of the result, so its tangent is another gradient."""
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    for name, out in results(x).items():
        grad, tangent = torch.randn_like(out), torch.randn_like(out)
        (expected,) = torch.autograd.grad(out, x, tangent, retain_graph=True)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(grad, tangent)
            if name in OWN_GRADIENT:
                with pytest.raises(NotImplementedError, match="forward"):
                    torch.autograd.grad(out, x, dual)
                continue
            (found,) = torch.autograd.grad(out, x, dual, retain_graph=True)
            found = forward_ad.unpack_dual(found).tangent
        torch.testing.assert_close(found, expected, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("name", "edited"),
    [
        ("spmm", "index"),
        ("gat", "index"),
        ("gat_with_scores", "index"),
        ("gcn", "index"),
        ("gcn", "weight"),
    ],
)
@pytest.mark.parametrize("eager_first", [False, True])
def test_compiled_code_may_write_without_counting(
    name: str, edited: str, eager_first: bool
) -> None:
    x, index, weight = features(), EDGES.clone(), torch.rand(EDGES.shape[1])
    scores, att = torch.randn(6, 1), torch.randn(2, 1, 5)

    def call() -> Tensor:  # as compiled code does
        if name == "spmm":
            arguments: tuple[Any, ...] = (x, index, None, weight, 6, "sum", False)
        elif name == "gcn":
            arguments = (x, index, weight, 1.0, False, False)
        else:
            given = (scores, scores) if name == "gat" else (att,)
            options = (None, None, 6, False, 0.2, 0.0, False)
            arguments = (x.unsqueeze(1), *given, None, None, index, *options)
        out = getattr(torch.ops.fastgraph, name).default(*arguments)
        return out if isinstance(out, Tensor) else out[0]

    if eager_first:
        ops.spmm(x, index)
        ops.gcn(x, index, weight)
        ops.gat(x.unsqueeze(1), scores, scores, index, self_loops=6)
    call()
    version = index._version, weight._version
    if edited == "index":
        index.numpy()[0] = EDGES.flip(1)[0].numpy()
    else:
        weight.numpy()[:] *= 3
    assert version == (index._version, weight._version)
    again = call()
    fastgraph.clear_cache()
    assert torch.equal(again, call())


@pytest.mark.parametrize("changing", ["edges", "weight"])
def test_compiled_code_may_put_one_graph_where_another_was(changing: str) -> None:
    first, second = GCNConv(5, 5), GCNConv(5, 5)

    def step(x: Tensor, edges: Tensor, weight: Tensor) -> Tensor:
        if changing == "weight":
            out = first(x, edges, weight.sigmoid())
            return second(x, edges, weight.square() + out[0, 0].abs())
        out = first(x, (edges + 1) % 6)
        return second(x, (edges * 3 + (out[0, 0] > 0)) % 6)

    x, weight = features(), torch.rand(EDGES.shape[1])
    with torch.no_grad(), fastgraph.enabled(min_edges=0):
        expected = step(x, EDGES, weight)
        torch.testing.assert_close(torch.compile(step)(x, EDGES, weight), expected)
