"""GPSConv with and without its route: values, gradients, random numbers, reasons to refuse."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GINConv, GPSConv, SAGEConv

import fastgraph
from fastgraph.pyg import gps_conv
from tests.ab import arguments, assert_same
from tests.graphs import random_edges

SIZES = [1, 7, 20, 2, 33, 7]
NODES, CHANNELS = sum(SIZES), 12
BATCH = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))
EDGES = random_edges(NODES, NODES, 3 * NODES)


def features() -> Tensor:
    torch.manual_seed(4)
    return torch.randn(NODES, CHANNELS)


def layer(heads: int = 3, attention_dropout: float = 0.0, **options: Any) -> GPSConv:
    torch.manual_seed(5)
    conv = options.pop("conv", GINConv(nn.Linear(CHANNELS, CHANNELS)))
    options["attn_kwargs"] = {"dropout": attention_dropout} | options.get("attn_kwargs", {})
    made = GPSConv(CHANNELS, conv, heads, **options)
    for parameter in made.attn.parameters():  # biases are 0 at first
        nn.init.normal_(parameter, std=0.4)
    return made


def by_batch(module: GPSConv) -> GPSConv:
    """A layer all of whose norms take the batch."""
    assert module.norm_with_batch
    return module


CASES: dict[str, Callable[[], GPSConv]] = {
    "plain": layer,
    "one head": lambda: layer(1),
    "no conv": lambda: layer(conv=None),
    "no norm": lambda: layer(norm=None),
    "norm of graphs": lambda: by_batch(layer(norm="layer_norm")),
    "dropout of features": lambda: layer(dropout=0.4, act="gelu"),
    "no bias": lambda: layer(attn_kwargs={"bias": False}),
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("batch", [BATCH, None, BATCH * 2 + 1], ids=["batch", "one", "gaps"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name: str, batch: Tensor | None, training: bool) -> None:
    """The same random numbers included, which follow attention that drops nothing."""
    assert_same(CASES[name](), arguments(features(), EDGES, batch), training=training)


@pytest.mark.parametrize(
    "batch",
    [torch.stack([BATCH, BATCH + 1], 1)[:, 0], torch.zeros(1, dtype=torch.int64).expand(NODES)],
    ids=["column", "expanded"],
)
def test_strides_of_the_batch(batch: Tensor) -> None:
    assert not batch.is_contiguous()
    assert_same(layer(), arguments(features(), EDGES, batch))


def test_nothing_is_computed_for_inference() -> None:
    module, x = layer().eval(), features()
    with torch.no_grad():
        plain = module(x, EDGES, BATCH)
        with fastgraph.enabled():
            torch.testing.assert_close(module(x, EDGES, BATCH), plain)
    assert not plain.requires_grad


def test_attention_drops_what_upstream_drops_on_average() -> None:
    """The mean of many draws is upstream's, within five of its errors."""
    module, x = layer(attention_dropout=0.5, conv=None, norm=None), features()
    draws = []
    for is_ours in (False, True):
        torch.manual_seed(1)
        with fastgraph.enabled() if is_ours else torch.enable_grad(), torch.no_grad():
            draws.append(torch.stack([module(x, EDGES, BATCH) for _ in range(300)]))
    (theirs, ours), (spread, own) = ([f(d, 0) for d in draws] for f in (torch.mean, torch.std))
    limit = 5 * spread.max() / math.sqrt(300 / 2)
    assert (ours - theirs).abs().max() < limit
    assert ours.std() > 0 and 0.8 < own.mean() / spread.mean() < 1.25


def test_the_seed_determines_what_is_dropped() -> None:
    module, x = layer(attention_dropout=0.5), features()
    found = []
    with fastgraph.enabled():
        for seed in (3, 3, 4):
            torch.manual_seed(seed)
            found.append(module(x, EDGES, BATCH))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert fastgraph.status().row("GPSConv").fell_back == 0


def test_hooks_of_the_layer_and_its_parts_run() -> None:
    module, seen = layer(), []
    for part in (module, module.conv, module.norm1, module.mlp, module.mlp[0]):
        part.register_forward_hook(lambda part, *_: seen.append(part))
    with fastgraph.enabled(strict=True):
        module(features(), EDGES, BATCH)
    assert set(seen) == {module, module.conv, module.norm1, module.mlp, module.mlp[0]}


def test_weights_of_edges_reach_the_convolution() -> None:
    class Weighted(SAGEConv):
        def forward(self, x: Any, edge_index: Any, weight: Any = None) -> Tensor:
            return super().forward(x, edge_index) * weight

    call = arguments(features(), EDGES, BATCH, weight=torch.tensor(3.0))
    assert_same(layer(conv=Weighted(CHANNELS, CHANNELS)), call)


def test_state_and_steps_are_upstreams() -> None:
    """A few steps of an optimizer, whose state another process could load."""
    trained = []
    for is_ours in (False, True):
        module = layer(attention_dropout=0.0, dropout=0.2)
        before = list(module.state_dict())
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        with fastgraph.enabled() if is_ours else torch.enable_grad():
            for _ in range(3):
                optimizer.zero_grad()
                module(features(), EDGES, BATCH).square().mean().backward()
                optimizer.step()
        assert list(module.state_dict()) == before
        trained.append(module.state_dict())
    for name, value in trained[0].items():
        torch.testing.assert_close(trained[1][name], value, rtol=1e-4, atol=1e-5)


def test_a_batch_is_its_graphs_one_by_one() -> None:
    module, x = layer(norm=None, conv=None).double(), features().double()
    with fastgraph.enabled(min_edges=0):
        together = module(x, EDGES, BATCH)
        alone = [module(part, EDGES) for part in x.split(SIZES)]
    torch.testing.assert_close(together, torch.cat(alone))


def test_one_small_graph_is_upstreams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTGRAPH_MIN_EDGES")
    module, x = layer(conv=None), features()
    plain = module(x, EDGES)
    fastgraph.status().reset()
    with fastgraph.enabled(strict=True):
        torch.testing.assert_close(module(x, EDGES), plain)
    assert any("too few" in reason for reason in fastgraph.status().row("GPSConv").reasons)


def attention(change: Callable[[nn.MultiheadAttention], object]) -> GPSConv:
    module = layer(conv=None)
    change(module.attn)
    return module


class OwnAttention(nn.MultiheadAttention):
    pass


def with_own_attention() -> GPSConv:
    module = layer(conv=None)
    module.attn.__class__ = OwnAttention
    return module


def not_batch_first(module: nn.MultiheadAttention) -> None:
    module.batch_first = False


REFUSED: dict[str, tuple[Callable[[], GPSConv], Any, str]] = {
    "hook": (
        lambda: attention(lambda a: a.register_forward_hook(lambda *_: None)),
        BATCH,
        "MultiheadAttention has hooks",
    ),
    "hook before": (
        lambda: attention(lambda a: a.register_forward_pre_hook(lambda *_: None)),
        BATCH,
        "MultiheadAttention has hooks",
    ),
    "subclass": (with_own_attention, BATCH, "a subclass of MultiheadAttention"),
    "added keys": (
        lambda: layer(attn_kwargs={"add_bias_kv": True}),
        BATCH,
        "with add_bias_kv or add_zero_attn",
    ),
    "a key of zeros": (
        lambda: layer(attn_kwargs={"add_zero_attn": True}),
        BATCH,
        "with add_bias_kv or add_zero_attn",
    ),
    "not batch_first": (lambda: attention(not_batch_first), None, "without batch_first"),
    "batch of int32": (layer, BATCH.int(), "batch is no int64 for each node"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, batch, reason = REFUSED[name]
    module, x = make(), features()
    assert_refused(module, reason, x, EDGES, batch)


def assert_refused(module: GPSConv, reason: str, *args: Any) -> None:
    """The result or the error is upstream's, and the reason the expected one."""
    results: list[Any] = []
    fastgraph.status().reset()
    for is_ours in (False, True):
        with fastgraph.enabled() if is_ours else torch.enable_grad():
            try:
                results.append(copy.deepcopy(module)(*args))
            except Exception as error:
                results.append(str(error))
    if isinstance(results[0], Tensor):
        assert torch.equal(results[0], results[1])
    else:
        assert results[0] == results[1]
    row = fastgraph.status().row("GPSConv")
    assert row.routed == 0 and any(reason in found for found in row.reasons), row.reasons


def test_batches_that_cannot_be_offsets() -> None:
    x = features()
    assert_refused(layer(), "batch is not sorted", x, EDGES, BATCH.flip(0))
    assert_refused(layer(), "batch is not sorted", x, EDGES, BATCH - 1)
    assert_refused(layer(), "batch is no int64", x, EDGES, BATCH[1:])
    assert_refused(layer(), "no nodes", x[:0], EDGES[:, :0], BATCH[:0])


def test_dtypes_and_autocast() -> None:
    x = features()
    assert_refused(layer(conv=None), "the dtype and device", x.double(), EDGES, BATCH)
    assert_refused(layer(conv=None), "as wide as MultiheadAttention", x[:, :6], EDGES, BATCH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_refused(layer(), "under autocast", x, EDGES, BATCH)


def test_performer_is_upstreams_and_not_counted() -> None:
    module = layer(2, conv=None, attn_type="performer", attn_kwargs={"head_channels": 8})
    fastgraph.status().reset()
    with fastgraph.enabled(strict=True):
        module(features(), EDGES, BATCH)
    row = fastgraph.status().row("GPSConv")
    assert row.routed == row.fell_back == 0


def test_devices_without_the_operator_are_upstreams_and_strict_allows_it() -> None:
    """The convolution inside may still be routed there."""
    module, x, edges = (each.to("meta") for each in (layer(), features(), EDGES))
    fastgraph.status().reset()
    with fastgraph.enabled(strict=True):
        assert gps_conv.plan(module, x, edges) is None
    row = fastgraph.status().row("GPSConv")
    assert row.routed == 0 and row.fell_back == 1
    assert all("no backend computes dense_attention" in reason for reason in row.reasons)


def test_compiled_code_is_upstreams() -> None:
    module = layer(conv=None)
    plain = module(features(), EDGES, BATCH)
    with fastgraph.enabled():
        compiled = torch.compile(module, backend="eager")
        torch.testing.assert_close(compiled(features(), EDGES, BATCH), plain)
