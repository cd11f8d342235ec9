"""Messages and layers that no edge program computes: upstream's code, with the reason."""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastgraph
from tests.pyg.traced_layers import (
    CHANNELS,
    EDGES,
    NODES,
    Scaled,
    of_its_object,
    refused,
    routed,
    traces,
    with_message,
    x64,
)

pytestmark = pytest.mark.filterwarnings("ignore::fastgraph.FallbackWarning")


class Config:
    scale = 2.0


CONFIG, LOG = Config(), []
COUNT = 0


def prints(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    print("a message")
    return x_i * x_j


def counts(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return x_i * x_j


def logs(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    LOG.append(1)
    return x_i * x_j


def of_an_object(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    return x_i * x_j * CONFIG.scale


def by_name(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    return x_i * x_j * getattr(self, "sca" + "le")


def leaves(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    self.kept = x_i * x_j
    return self.kept


def with_autocast(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return self.lin(torch.cat([x_i, x_j], -1)).to(x_j.dtype)


def branches(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    return x_j if x_j.sum() > 0 else x_i


def draws(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    import random

    return x_i * x_j * random.random()


def with_a_default(x: Tensor, factors: Any = LOG) -> Tensor:
    return x * len(factors)


def by_default(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    return with_a_default(x_i * x_j)


class Object:
    def __init__(self) -> None:
        """Nothing."""

    factor = 2.0

    def times(self, x: Tensor) -> Tensor:
        return self.factor * x

    @classmethod
    def of_class(cls, x: Tensor) -> Tensor:
        return cls.factor * x


def of_a_new_object(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    return Object().times(x_i * x_j)


def of_a_class(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    return Object.of_class(x_i * x_j)


def of_a_list(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    return x_i * x_j * self.table.tolist()[0]


def with_a_function(x: Tensor) -> Tensor:
    return x * with_a_function.factor  # type: ignore[attr-defined]


with_a_function.factor = 2.0  # type: ignore[attr-defined]


def of_a_function(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    return with_a_function(x_i * x_j)


def by_key(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    return x_i * x_j * self.__dict__["sca" + "le"]


def of_the_clock(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    return x_i * x_j if time.time() > 0 else x_i


def of_a_setting(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    return x_i * x_j if torch.get_default_dtype() == torch.float32 else x_i


def warns(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    warnings.warn("a message", stacklevel=1)
    return x_i * x_j


def of_storage(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    return x_i * (x_j if self.weight.is_contiguous() else 2 * x_j)


def of_a_device(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    return x_i * (2 * x_j if x_j.is_cuda else x_j)


def of_gradients(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    return x_i * (x_j if self.weight.grad is None else 2 * x_j)


def of_identity(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    return x_i * x_j * (id(self) % 5)


def hooks(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    out = (x_i * x_j) * self.weight
    if out.requires_grad:
        out.register_hook(lambda grad: grad.clamp(-5, 5))
    return out


def of_so_many_edges(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    return x_i * (x_j if x_j.shape[0] == 40 else 2 * x_j)


def of_some_numbers_of_edges(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    return x_i * (x_j if 20_000 < x_j.size(0) < 40_000 else 2 * x_j)


def of_as_many_edges_as_it_says(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    return x_i * (x_j if len(x_j) != self.number else 2 * x_j)


REFUSED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "so many edges": (of_so_many_edges, "the number of edges"),
    "some numbers of edges": (of_some_numbers_of_edges, "the number of edges"),
    "as many edges as it says": (of_as_many_edges_as_it_says, "the number of edges"),
    "prints": (prints, "it writes or reads files (print)"),
    "counts": (counts, "it sets the global variable COUNT"),
    "logs": (logs, "it reads LOG"),
    "of an object": (of_an_object, "it reads CONFIG, a Config that may change unnoticed"),
    "of its object": (of_its_object, "it reads config, a Config that may change unnoticed"),
    "by name": (by_name, "it looks names up (getattr)"),
    "leaves": (leaves, "it sets the attribute kept"),
    "autocast": (with_autocast, "it switches autocast on"),
    "by default": (by_default, "it reads with_a_default, a list that may change unnoticed"),
    "of a function": (of_a_function, "it reads with_a_function.factor, of a function"),
    "by key": (by_key, "it looks names up (__dict__)"),
    "of the clock": (of_the_clock, "it reads time.time, a builtin"),
    "of a setting": (of_a_setting, "it looks at a setting of torch (get_default_dtype)"),
    "warns": (warns, "it writes or reads files (warn)"),
    "of storage": (of_storage, "it looks at how tensors are stored (is_contiguous)"),
    "of a device": (of_a_device, "it looks at how tensors are stored (is_cuda)"),
    "of gradients": (of_gradients, "it looks at how tensors are stored (grad)"),
    "of identity": (of_identity, "it takes its layer for another one (id)"),
    "hooks": (hooks, "it registers a hook of gradients"),
    "of a new object": (of_a_new_object, "nobody can tell where"),
    "of a class": (of_a_class, "it reads Object.of_class, a classmethod that may change"),
    "of a list": (of_a_list, "it reads table, a Tensor that may change unnoticed"),
    "branches": (branches, "across edges"),
    "draws": (draws, "it imports random"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_messages_that_are_left_to_upstream(name: str) -> None:
    function, reason = REFUSED[name]
    cls = with_message(function)
    layer = cls().double()
    layer.config = Config()
    layer.table = torch.ones(1)
    layer.number = 40
    before = COUNT
    found = layer(x64(), EDGES)
    assert found.shape == (NODES, CHANNELS)
    calls = COUNT - before
    LOG.clear()
    if name != "draws":
        found = refused(layer, x64(), EDGES)
        assert reason in found
        assert COUNT - before == 3 * calls
    else:
        with fastgraph.enabled(min_edges=0):
            layer(x64(), EDGES)
        assert reason in next(iter(fastgraph.status().row("Own").reasons))


def test_hooks_within_a_message_see_its_calls_alone() -> None:
    """They would see what a message is traced with: other numbers of rows, many times."""
    x, layer, seen = x64(), Scaled().double(), []
    for register in (layer.lin.register_forward_hook, layer.lin.register_forward_pre_hook):
        register(lambda _, given, *__: seen.append(given[0].shape))
    layer(x, EDGES)
    expected = list(seen)
    with fastgraph.enabled(min_edges=0):
        layer(x, EDGES)
    assert seen == 2 * expected


def test_states_of_layers_that_are_left_to_upstream() -> None:
    x = x64()
    hooked = Scaled().double()
    hooked.register_message_forward_hook(lambda *_: None)
    assert refused(hooked, x, EDGES) == "a message-passing hook is set"
    inner = Scaled().double()
    handle = inner.lin.register_forward_hook(lambda *_: None)
    assert "lin has hooks" in refused(inner, x, EDGES)
    handle.remove()
    routed(inner, x)
    inner.lin.register_forward_hook(lambda *_: None)
    assert "lin has hooks" in refused(inner, x, EDGES)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert refused(Scaled().double(), x, EDGES) == "a hook of all modules is set"
    finally:
        handle.remove()
    scripted = Scaled().double()
    routed(scripted, x)
    scripted.lin = torch.jit.script(scripted.lin)
    assert refused(scripted, x, EDGES) == "its layer has scripted modules"
    several = Scaled(aggr="median").double()
    assert refused(several, x, EDGES) == "aggregation MedianAggregation"
    shared = Scaled().double()
    shared.other = shared.lin
    assert "in several places" in refused(shared, x, EDGES)
    assert "features of 3 dimensions" in refused(
        with_message(lambda self, x_i, x_j: x_i * x_j)().double(),
        x64(2, NODES, CHANNELS),
        EDGES,
    )
    adj = torch.sparse_coo_tensor(EDGES.flip(0), torch.ones(40).double(), (NODES, NODES)).coalesce()
    assert "requires a gradient" in refused(Scaled().double(), x, adj.requires_grad_())


def test_devices() -> None:
    elsewhere = Scaled().double()
    elsewhere.register_buffer("other", torch.zeros(2, device="meta"))
    assert "other is not a dense tensor on the device" in refused(elsewhere, x64(), EDGES)
    fastgraph.status().reset()
    with fastgraph.enabled(min_edges=0):
        Scaled().double().to("meta")(x64().to("meta"), EDGES.to("meta"))
    (reason,) = fastgraph.status().row("Scaled").reasons
    assert "no backend computes edge_program" in reason


IN_A_NEW_PROCESS = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.pyg.traced_layers import Scaled, routed, x64

layer = Scaled().double()
layer.config = object()
routed(layer, x64())
"""


def test_the_first_tracing_in_a_process() -> None:
    """Torch runs code then, once, that names ``config`` and others."""
    root = str(Path(__file__).parents[2])
    subprocess.run([sys.executable, "-c", IN_A_NEW_PROCESS, root], check=True)


def test_a_refusal_is_not_that_of_an_attribute_that_is_plain_or_gone() -> None:
    layer = with_message(of_its_object)().double()
    layer.config = Config()
    assert "it reads config, a Config that may" in refused(layer, x64(), EDGES)
    layer.config = Config()
    assert "it reads config, a Config that may" in refused(layer, x64(), EDGES)
    assert traces(layer) == 1
    layer.config = 2
    with pytest.raises(AttributeError, match="'int' object has no attribute 'scale'"):
        refused(layer, x64(), EDGES)

    def message(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
        return x_i * x_j * self.factors[0]

    layer = with_message(message)().double()
    layer.factors = (2.0, 3.0)
    routed(layer, x64())
    del layer.factors
    with fastgraph.enabled(min_edges=0), pytest.raises(AttributeError, match="factors"):
        layer(x64(), EDGES)


def test_classes_that_are_left_to_upstream() -> None:
    x = x64()

    class Aggregating(Scaled):
        def aggregate(self, inputs: Tensor, index: Tensor, dim_size: Any = None) -> Tensor:
            return super().aggregate(inputs, index, dim_size=dim_size) * 2

    class WithEdges(Scaled):
        def message(self, x_j: Tensor, edge_index: Tensor) -> Tensor:
            return x_j * (edge_index[0] % 2).view(-1, 1)

    class WithIndex(Scaled):
        def message(self, x_j: Tensor, index: Tensor) -> Tensor:
            return x_j * (index % 2).view(-1, 1)

    class WithSize(Scaled):
        def message(self, x_i: Tensor, x_j: Tensor, size_i: Any) -> Tensor:
            return x_i * x_j / size_i

    class WithIdleSize(Scaled):
        def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, size_i: Any) -> Tensor:
            return x_i * x_j

    class Updated(Scaled):
        def update(self, inputs: Tensor, x_i: Tensor) -> Tensor:
            return inputs + x_i.sum()

    reasons = {
        Aggregating: "aggregate is overridden",
        WithEdges: "its message takes edge_index",
        WithIndex: "its message is no edge program: it takes index, which is of the graph",
        WithSize: "its message is no edge program: it takes the number of nodes",
        Updated: "its update takes x_i",
    }
    for cls, reason in reasons.items():
        assert refused(cls().double(), x, EDGES) == reason
    routed(WithIdleSize().double(), x)
