"""Reductions of groups of rows outside message passing, against upstream in float64."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric import utils
from torch_geometric.nn import aggr, global_add_pool, global_max_pool, global_mean_pool

import fastgraph
from fastgraph.routing.sizes import FEWEST_CHANNELS_OF_SUMS

pytestmark = pytest.mark.filterwarnings("ignore::fastgraph.FallbackWarning")

Call = Callable[..., Tensor]

# By these names, programs have imported PyG's functions before fastgraph is enabled.
scatter, segment, softmax = utils.scatter, utils.segment, utils.softmax

examples = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

ROWS, CHANNELS, GROUPS = 40, 4, 7
INDEX = torch.randint(GROUPS - 2, (ROWS,), generator=torch.Generator().manual_seed(0))
PTR = torch.tensor([0, 3, 3, 20, 21, 21, ROWS])


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    with fastgraph.enabled(min_edges=0):
        fastgraph.status().reset()
        yield


def rows(*channels: int, num: int = ROWS, seed: int = 0) -> Tensor:
    """Rows with ties, zeros of both signs and equal rows."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-2, 3, (num, *channels), generator=generator).double()
    return values * 0.5


def upstream(call: Call, *args: Any, **kwargs: Any) -> Any:
    """The result of a call without fastgraph."""
    with fastgraph.routing.switch.SWITCH.upstream():
        return call(*args, **kwargs)


def counts() -> dict[str, tuple[int, int]]:
    return {row.layer: (row.routed, row.fell_back) for row in fastgraph.status().rows}


def reasons(name: str) -> list[str]:
    return list(fastgraph.status().row(name).reasons)


def assert_same(call: Callable[[Tensor], Tensor], x: Tensor, *, twice: bool = True) -> None:
    """Output, gradient and the gradient of that are upstream's."""
    found, expected = (_derivatives(run, x, twice) for run in (call, lambda x: upstream(call, x)))
    for name, ours, theirs in zip(("out", "grad", "grad of grad"), found, expected, strict=False):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-11, atol=1e-12, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


def _derivatives(call: Callable[[Tensor], Tensor], x: Tensor, twice: bool) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    out = call(x)
    weights = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
    (grad,) = torch.autograd.grad((weights * out * (1 + out)).sum(), x, create_graph=twice)
    if not twice:
        return [out, grad]
    (second,) = torch.autograd.grad((grad * grad.detach().cos()).sum(), x, allow_unused=True)
    return [out, grad, torch.zeros_like(x) if second is None else second]


@st.composite
def calls(draw: st.DrawFn) -> tuple[Tensor, Tensor, int | None]:
    """Rows, the group of each of them, and how many groups there are."""
    num, groups = draw(st.integers(1, 30)), draw(st.integers(1, 8))
    channels = draw(st.sampled_from([(), (1,), (3,), (8,), (17,), (2, 3)]))
    index = torch.tensor(draw(st.lists(st.integers(0, groups - 1), min_size=num, max_size=num)))
    if draw(st.booleans()):
        index = index.sort()[0]
    size = draw(st.sampled_from([None, int(index.max()) + 1, groups + 2]))
    x = rows(*channels, num=num, seed=draw(st.integers(0, 3)))
    if draw(st.booleans()) and x.dim() > 1:
        x = torch.cat([x, x], 1)[:, ::2]  # not contiguous
    return x, index, size


@examples
@given(calls(), st.sampled_from(["sum", "add", "mean", "max", "min", "amax", "amin"]))
def test_scatter(call: tuple[Tensor, Tensor, int | None], reduce: str) -> None:
    x, index, size = call
    fastgraph.status().reset()
    # Torch has no second derivative of its extrema that ties.
    assert_same(
        lambda x: utils.scatter(x, index, dim_size=size, reduce=reduce),
        x,
        twice=reduce in ("sum", "add", "mean"),
    )
    is_sum = reduce in ("sum", "add", "mean")
    expected = {} if is_sum and x[0].numel() < FEWEST_CHANNELS_OF_SUMS else {"scatter": (1, 0)}
    assert counts() == expected


@examples
@given(calls())
def test_softmax(call: tuple[Tensor, Tensor, int | None]) -> None:
    x, index, size = call
    fastgraph.status().reset()
    assert_same(lambda x: utils.softmax(x, index, num_nodes=size), x)
    assert counts() == {"softmax": (1, 0)}


@examples
@given(st.lists(st.integers(0, 5), min_size=1, max_size=9), st.sampled_from(["sum", "mean"]))
def test_segment(lengths: list[int], reduce: str) -> None:
    ptr = torch.tensor([0, *lengths]).cumsum(0)
    x = rows(5, num=int(ptr[-1]))
    fastgraph.status().reset()
    # Torch has no second derivative of segments.
    assert_same(lambda x: utils.segment(x, ptr, reduce), x, twice=False)
    assert counts() == ({"segment": (1, 0)} if len(x) else {})


@pytest.mark.parametrize("values", [[float("inf")], [float("-inf")], [float("nan")]])
@pytest.mark.parametrize("function", ["max", "min", "sum", "softmax"])
def test_special_values(function: str, values: list[float]) -> None:
    x = rows(CHANNELS)
    x[::3] = values[0]
    x[INDEX == 1] = values[0]  # a whole group
    if function == "softmax":
        assert_same(lambda x: utils.softmax(x, INDEX), x, twice=False)
    else:
        assert_same(lambda x: utils.scatter(x, INDEX, reduce=function), x, twice=False)


def test_names_that_were_imported_before() -> None:
    x = rows(CHANNELS)
    for call in (
        lambda: scatter(x, INDEX, reduce="max"),
        lambda: segment(x, PTR),
        lambda: softmax(x, INDEX),
    ):
        call()
    assert counts() == {"scatter": (1, 0), "segment": (1, 0), "softmax": (1, 0)}


MODULES: dict[str, Callable[[], nn.Module]] = {
    "SumAggregation": aggr.SumAggregation,
    "MeanAggregation": aggr.MeanAggregation,
    "MaxAggregation": aggr.MaxAggregation,
    "MinAggregation": aggr.MinAggregation,
    "VarAggregation": aggr.VarAggregation,
    "StdAggregation": aggr.StdAggregation,
    "SoftmaxAggregation": lambda: aggr.SoftmaxAggregation(t=0.5),
    "PowerMeanAggregation": lambda: aggr.PowerMeanAggregation(p=2),
    "MultiAggregation": lambda: aggr.MultiAggregation(["mean", "max", "std", "softmax"]),
    "DegreeScalerAggregation": lambda: aggr.DegreeScalerAggregation(
        ["mean", "max"], ["identity", "amplification"], torch.tensor([1, 2, 4])
    ),
    "AttentionalAggregation": lambda: aggr.AttentionalAggregation(nn.Linear(CHANNELS, 1)),
    "Set2Set": lambda: aggr.Set2Set(CHANNELS, 2),
}


@pytest.mark.parametrize("name", MODULES)
def test_aggregations(name: str) -> None:
    module = MODULES[name]().double()
    assert_same(lambda x: module(x, INDEX, dim_size=GROUPS), rows(CHANNELS), twice=False)
    assert counts() == {name: (1, 0)}


@pytest.mark.parametrize("name", ["SumAggregation", "MeanAggregation"])
def test_aggregations_by_ptr(name: str) -> None:
    module = MODULES[name]()
    assert_same(lambda x: module(x, ptr=PTR), rows(CHANNELS), twice=False)
    assert counts() == {name: (1, 0)}


@pytest.mark.parametrize("pool", [global_add_pool, global_mean_pool, global_max_pool])
def test_global_pooling(pool: Call) -> None:
    batch = INDEX.sort()[0]
    assert_same(lambda x: pool(x, batch), rows(CHANNELS), twice=False)
    assert counts() == {pool.__name__: (1, 0)}


def left(call: Callable[[], Any]) -> None:
    """A call gives the very bits of upstream, or raises its error."""
    found, expected = _outcome(call), upstream(_outcome, call)
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor) and torch.equal(found, expected)
    else:
        assert found == expected


def _outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize(
    ("index", "size"),
    [
        (torch.tensor([0, 1, 5]), 3),
        (torch.tensor([0, -1, 2]), 3),
        (torch.tensor([0, -1, 2]), None),
        (torch.tensor([0, 1, 2]), 0),
    ],
)
@pytest.mark.parametrize("function", ["max", "sum", "softmax"])
def test_groups_that_there_are_not(function: str, index: Tensor, size: int | None) -> None:
    x = rows(CHANNELS, num=3)
    if function == "softmax":
        left(lambda: utils.softmax(x, index, num_nodes=size))
        assert reasons("softmax") == ["index points outside the groups"]
    else:
        left(lambda: utils.scatter(x, index, dim_size=size, reduce=function))
        assert reasons("scatter") == ["index points outside the groups"]


@pytest.mark.parametrize(
    "call",
    {
        "no index": lambda x: utils.scatter(x, None, reduce="max"),
        "an index of two dimensions": lambda x: utils.scatter(x, INDEX[:, None], reduce="max"),
        "too few": lambda x: utils.scatter(x, INDEX[:-1], reduce="max"),
        "one for all": lambda x: utils.scatter(x, INDEX[:1], reduce="sum"),
        "channels": lambda x: utils.scatter(x, INDEX[:CHANNELS], dim=1, reduce="max"),
        "no dimension": lambda x: utils.scatter(x, INDEX, dim=5, reduce="max"),
        "no reduction": lambda x: utils.scatter(x, INDEX, reduce="most"),
        "products": lambda x: utils.scatter(x, INDEX, reduce="mul"),
        "integers": lambda x: utils.scatter(x.long(), INDEX, reduce="sum"),
        "halves": lambda x: utils.scatter(x.bfloat16(), INDEX, reduce="sum"),
        "int32": lambda x: utils.scatter(x, INDEX.int(), reduce="max"),
        "no rows": lambda x: utils.scatter(x[:0], INDEX[:0], reduce="max"),
        "no channels": lambda x: utils.scatter(x[:, :0], INDEX, reduce="max"),
        "a negative size": lambda x: utils.scatter(x, INDEX, dim_size=-3, reduce="max"),
        "extrema of segments": lambda x: utils.segment(x, PTR, "max"),
        "softmax of channels": lambda x: utils.softmax(x, INDEX[:CHANNELS], dim=1),
        "softmax of nothing": lambda x: utils.softmax(x),
        "a number": lambda x: utils.softmax(x.sum(), INDEX),
    }.items(),
    ids=lambda case: case[0],
)
def test_no_operator(call: tuple[str, Callable[[Tensor], Tensor]]) -> None:
    left(lambda: call[1](rows(CHANNELS)))
    assert counts() == {}


def test_wrong_calls_are_reported_by_name() -> None:
    with pytest.raises(TypeError, match=r"^scatter\(\) missing 1 required positional argument"):
        utils.scatter(rows(3))  # type: ignore[call-arg]


def test_softmax_of_groups_that_ptr_delimits() -> None:
    x = rows(3)
    left(lambda: utils.softmax(x, ptr=PTR))
    assert counts() == {"softmax": (0, 1)}  # and none of the functions that it calls


@pytest.mark.parametrize("ptr", [[0, 3, 2, ROWS], [1, ROWS], [0, ROWS - 1]])
def test_segments_of_some_rows(ptr: list[int]) -> None:
    x, offsets = rows(CHANNELS), torch.tensor(ptr)
    left(lambda: utils.segment(x, offsets))
    assert reasons("segment") == ["ptr does not rise from the first row to the last"]


def test_small_calls_are_left_to_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTGRAPH_MIN_EDGES")
    x = rows(CHANNELS)
    with fastgraph.enabled():
        left(lambda: utils.scatter(x, INDEX, reduce="max"))
        left(lambda: aggr.MultiAggregation(["max", "mean"])(x, INDEX))
    assert counts() == {"scatter": (0, 1), "MultiAggregation": (0, 1)}
    with fastgraph.enabled(min_edges=ROWS + 1):
        left(lambda: utils.scatter(x, INDEX, reduce="max"))
    assert reasons("scatter")[1:] == [f"fewer than min_edges={ROWS + 1} edges"]


def test_transforms() -> None:
    x, tangent = rows(CHANNELS), rows(CHANNELS, seed=1)

    def call(x: Tensor) -> Tensor:
        return utils.softmax(x, INDEX)

    assert torch.equal(torch.func.vmap(call)(torch.stack([x, tangent]))[0], upstream(call, x))
    found = torch.func.jvp(call, (x,), (tangent,))[1]
    torch.testing.assert_close(found, upstream(lambda: torch.func.jvp(call, (x,), (tangent,))[1]))
    assert counts()["softmax"] == (0, 2)


def test_batches_of_gradients() -> None:
    x = rows(CHANNELS).requires_grad_()
    for out in (utils.scatter(x, INDEX, reduce="max"), utils.softmax(x, INDEX)):
        grads = torch.stack([torch.ones_like(out), rows(CHANNELS, num=len(out), seed=2)])
        (batch,) = torch.autograd.grad(out, x, grads, is_grads_batched=True, retain_graph=True)
        for found, grad in zip(batch, grads, strict=True):
            torch.testing.assert_close(
                found, torch.autograd.grad(out, x, grad, retain_graph=True)[0]
            )


def test_modes_that_look_at_operations() -> None:
    class Mode(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
            self.seen += "scatter" in str(function)
            return function(*args, **(kwargs or {}))

    with Mode() as mode:
        utils.scatter(rows(CHANNELS), INDEX, reduce="max")
    assert mode.seen == 1 and counts() == {}


def test_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        x, index = mode.from_tensor(rows(CHANNELS)), mode.from_tensor(INDEX)
        assert utils.scatter(x, index, dim_size=GROUPS, reduce="max").shape == (GROUPS, CHANNELS)
    assert counts() == {}


def test_edits_between_the_passes() -> None:
    x = rows(CHANNELS).requires_grad_()
    for call in (
        lambda x, index: utils.scatter(x, index, reduce="sum"),
        lambda x, index: utils.scatter(x, index, reduce="max"),
        lambda x, index: utils.softmax(x, index),
    ):
        index = INDEX.clone()
        own = x * 1
        out = call(own, index)
        own.data.zero_()  # which upstream does not need, or has copied
        index[0] = 1 - index[0]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("reduce", ["max", "min", "sum", "mean"])
@pytest.mark.parametrize("channels", [(), (CHANNELS,)])
def test_rows_that_upstream_saves_may_not_be_edited(reduce: str, channels: tuple[int, ...]) -> None:
    def gradient() -> Tensor | str:
        x = rows(*channels).requires_grad_()
        own = x * 1
        out = utils.scatter(own, INDEX, dim_size=GROUPS, reduce=reduce)
        own.mul_(2)
        try:
            (grad,) = torch.autograd.grad(out.sum(), x)
        except RuntimeError as error:
            return str(error).partition(":")[0]
        return grad

    found, expected = gradient(), upstream(gradient)
    assert isinstance(found, str) is isinstance(expected, str) is (reduce in ("max", "min"))
    assert found == expected if isinstance(found, str) else torch.allclose(found, expected)


def test_an_edited_index_is_another() -> None:
    x, index = rows(CHANNELS), INDEX.clone()
    before = utils.scatter(x, index, dim_size=GROUPS, reduce="max")
    for edit in (lambda: index.add_(1), lambda: index.numpy().__isub__(1)):
        edit()
        found = utils.scatter(x, index, dim_size=GROUPS, reduce="max")
        assert torch.equal(found, upstream(utils.scatter, x, index, 0, GROUPS, "max"))
    assert torch.equal(found, before)


def test_results_may_be_edited() -> None:
    for function in (lambda x: utils.scatter(x, INDEX), lambda x: utils.segment(x, PTR)):
        x = rows(CHANNELS).requires_grad_()
        out = function(x)
        out += 1
        out.mul_(2).sum().backward()
        theirs = x.detach().clone().requires_grad_()
        upstream(function, theirs).mul(2).sum().backward()
        torch.testing.assert_close(x.grad, theirs.grad)


def test_groups_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastgraph.graphs import groups

    made = []
    build = groups.grouped
    monkeypatch.setattr(groups, "grouped", lambda *given: made.append(given) or build(*given))
    x, edge_index = rows(CHANNELS).requires_grad_(), torch.stack([INDEX, INDEX.flip(0)])
    for _ in range(3):
        utils.softmax(x, edge_index[1], num_nodes=GROUPS).sum().backward()
        utils.scatter(x, edge_index[1], dim_size=GROUPS, reduce="mean").sum().backward()
    assert len(made) == 1


def test_inference_tensors() -> None:
    with torch.inference_mode():
        x, index = rows(CHANNELS), INDEX.clone()
        found = utils.scatter(x, index, reduce="max"), utils.softmax(x, index)
    torch.testing.assert_close(found[0], upstream(utils.scatter, x, INDEX, reduce="max"))
    torch.testing.assert_close(found[1], upstream(utils.softmax, x, INDEX))
    # What was remembered in inference mode serves training.
    with torch.inference_mode():
        utils.scatter(rows(CHANNELS), INDEX, reduce="sum")
    assert_same(lambda x: utils.scatter(x, INDEX, reduce="sum"), rows(CHANNELS))


def test_gradients_after_everything_is_forgotten() -> None:
    x = rows(CHANNELS).requires_grad_()
    outs = [utils.scatter(x, INDEX, reduce=r) for r in ("sum", "mean", "max")]
    outs.append(utils.softmax(x, INDEX))
    fastgraph.clear_cache()
    gc.collect()
    (found,) = torch.autograd.grad(sum((out**2).sum() for out in outs), x)
    theirs = [upstream(utils.scatter, x, INDEX, reduce=r) for r in ("sum", "mean", "max")]
    theirs.append(upstream(utils.softmax, x, INDEX))
    (expected,) = torch.autograd.grad(sum((out**2).sum() for out in theirs), x)
    torch.testing.assert_close(found, expected)


class Readout(nn.Module):
    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        score = utils.softmax(x, batch)
        return global_max_pool(x * score, batch) + utils.scatter(x, batch, reduce="mean")


def test_compiled_and_scripted_code_is_upstreams() -> None:
    model, x, batch = Readout(), rows(CHANNELS), INDEX.sort()[0]
    expected = upstream(model, x, batch)
    torch.testing.assert_close(model(x, batch), expected)
    assert counts() == {"softmax": (1, 0), "global_max_pool": (1, 0), "scatter": (1, 0)}
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, batch), expected)
    assert torch.equal(torch.jit.script(model)(x, batch), expected)
    traced = torch.jit.trace(model, (x, batch), check_trace=False)
    assert not any("fastgraph" in str(node.kind()) for node in traced.inlined_graph.nodes())


def test_functions_come_back() -> None:
    from torch_geometric.nn.aggr import base
    from torch_geometric.nn.pool import glob

    holders = [(utils, "scatter"), (utils, "segment"), (utils, "softmax"), (base, "scatter")]
    holders += [(glob, "scatter"), (utils._softmax, "segment")]
    enabled = [getattr(module, name) for module, name in holders]
    kept = utils.scatter
    with fastgraph.routing.switch.SWITCH.upstream():
        before = [getattr(module, name) for module, name in holders]
    assert all(a is not b for a, b in zip(enabled, before, strict=True))
    assert kept._fastgraph_upstream is before[0]  # type: ignore[attr-defined]
    fastgraph.disable()
    assert [getattr(module, name) for module, name in holders] == before
    assert torch.equal(kept(rows(3), INDEX), scatter(rows(3), INDEX))
    assert counts() == {}
