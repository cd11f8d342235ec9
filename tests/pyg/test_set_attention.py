"""Set Transformers with and without their routes: values, gradients, empty sets, refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.experimental import set_experimental_mode
from torch_geometric.nn import GraphMultisetTransformer, SetTransformerAggregation
from torch_geometric.nn.aggr.utils import (
    InducedSetAttentionBlock,
    MultiheadAttentionBlock,
    PoolingByMultiheadAttention,
    SetAttentionBlock,
)
from torch_geometric.utils import to_dense_batch

import fastgraph
from tests.ab import arguments, assert_same

SIZES = [3, 0, 17, 1, 0, 5, 0]
SETS, ELEMENTS, CHANNELS = len(SIZES), sum(SIZES), 12
INDEX = torch.repeat_interleave(torch.arange(SETS), torch.tensor(SIZES))


def features() -> Tensor:
    torch.manual_seed(4)
    return torch.randn(ELEMENTS, CHANNELS)


def with_random_biases(module: nn.Module) -> nn.Module:
    for name, parameter in module.named_parameters():  # biases are 0 at first
        if "bias" in name:
            nn.init.normal_(parameter, std=0.4)
    return module


def transformer(**options: Any) -> nn.Module:
    torch.manual_seed(5)
    return with_random_biases(SetTransformerAggregation(CHANNELS, **{"heads": 3} | options))


def multisets(**options: Any) -> nn.Module:
    torch.manual_seed(5)
    return with_random_biases(GraphMultisetTransformer(CHANNELS, 4, **{"heads": 2} | options))


AGGREGATIONS: dict[str, Callable[[], nn.Module]] = {
    "plain": transformer,
    "seeds": lambda: transformer(num_seed_points=3, num_encoder_blocks=2, num_decoder_blocks=2),
    "mean": lambda: transformer(num_seed_points=3, concat=False, heads=1),
    "norms": lambda: transformer(layer_norm=True, num_seed_points=2),
    "no blocks": lambda: transformer(num_encoder_blocks=0, num_decoder_blocks=0),
    "multisets": multisets,
    "multisets with norms": lambda: multisets(layer_norm=True, num_encoder_blocks=2),
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("size", [None, SETS], ids=["up to the last", "empty ones behind"])
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_outputs_and_gradients(name: str, size: int | None, training: bool) -> None:
    """Of empty sets, too, which attend to nothing."""
    call = arguments(features(), INDEX, dim_size=size)
    assert_same(AGGREGATIONS[name](), call, training=training)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_inference(name: str) -> None:
    """By torch's own path of inference, of sets with nothing to attend to, too."""
    module, x = AGGREGATIONS[name]().eval(), features()
    with torch.no_grad():
        plain = module(x, INDEX, dim_size=SETS)
        with fastgraph.enabled(strict=True):
            torch.testing.assert_close(module(x, INDEX, dim_size=SETS), plain)


def test_a_call_is_counted_once() -> None:
    """By its own name, and not what it is made of."""
    fastgraph.status().reset()
    with fastgraph.enabled():
        for module in (transformer(), multisets()):
            module(features(), INDEX)
    counted = {row.layer: (row.routed, row.fell_back) for row in fastgraph.status().rows}
    assert counted == {"SetTransformerAggregation": (1, 0), "GraphMultisetTransformer": (1, 0)}


def test_features_may_be_edited_before_the_backward_pass() -> None:
    found = []
    for enabled in (False, True):
        module = transformer(num_encoder_blocks=1)
        x = features()
        with fastgraph.enabled() if enabled else torch.enable_grad():
            out = module(x, INDEX)
            x.zero_()
            out.sum().backward()
        found.append([parameter.grad for parameter in module.parameters()])
    torch.testing.assert_close(found[1], found[0])


def test_dropout_is_drawn_from_torch_and_inactive_in_evaluation() -> None:
    module, x, outs = transformer(dropout=0.5), features(), []
    with fastgraph.enabled(strict=True):
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            outs.append(module(x, INDEX))
        module.eval()
        assert torch.equal(module(x, INDEX), module(x, INDEX))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


def changed(change: Callable[[Any], object]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = transformer(layer_norm=True)
        change(module)
        return module

    return make


class OwnBlock(SetAttentionBlock):
    pass


def put_own_block(module: Any) -> None:
    module.encoders[0].__class__ = OwnBlock


def put_another_norm(module: Any) -> None:
    module.encoders[0].mab.layer_norm1 = nn.Identity()


def put_another_map(module: Any) -> None:
    module.pma.lin = nn.Sequential(module.pma.lin)


def put_own_padding(module: Any) -> None:
    upstream = module.to_dense_batch

    def doubled(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        padded, mask = upstream(x, *args, **kwargs)
        return 2 * padded, mask

    module.to_dense_batch = doubled


def watch(module: nn.Module) -> None:
    module.register_forward_hook(lambda *_: None)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "hook of a block": (changed(lambda m: watch(m.encoders[0].mab)), "hooks or another forward"),
    "hook of a map": (changed(lambda m: watch(m.encoders[0].mab.lin)), "hooks or another forward"),
    "hook of attention": (changed(lambda m: watch(m.pma.mab.attn)), "MultiheadAttention has hooks"),
    "own block": (changed(put_own_block), "a block is of another class"),
    "another norm": (changed(put_another_norm), "no LayerNorm of channels"),
    "another map": (changed(put_another_map), "no Linear"),
    "own padding": (changed(put_own_padding), "to_dense_batch or assert_sorted_index"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, reason = REFUSED[name]
    assert_refused(make(), reason, features(), INDEX)


def assert_refused(module: nn.Module, reason: str, *args: Any, **kwargs: Any) -> None:
    """The result or the error is upstream's, and the reason the expected one."""
    results: list[Any] = []
    fastgraph.status().reset()
    for enabled in (False, True):
        with fastgraph.enabled() if enabled else torch.enable_grad():
            try:
                results.append(copy.deepcopy(module)(*args, **kwargs))
            except Exception as error:
                results.append(str(error))
    if isinstance(results[0], Tensor):
        torch.testing.assert_close(results[1], results[0])
    else:
        assert results[0] == results[1]
    row = fastgraph.status().row(type(module).__name__)
    assert row.routed == 0 and any(reason in found for found in row.reasons), row.reasons
    # PyG makes an error of its own of any that a wrong number of sets ends in.
    wrong = (ValueError, "dim_size") if "more graphs" in reason else None
    error, text = wrong or (fastgraph.RouteRefusedError, reason)
    with fastgraph.enabled(strict=True), pytest.raises(error, match=text):
        module(*args, **kwargs)


def test_calls_that_are_upstreams() -> None:
    x, module = features(), transformer()
    assert_refused(module, "index is not sorted", x, INDEX.flip(0))
    assert_refused(module, "index is no int64", x, INDEX[1:], dim_size=SETS)
    assert_refused(module, "max_num_elements", x, INDEX, max_num_elements=4)
    assert_refused(module, "no nodes", x[:0], INDEX[:0], dim_size=2)
    assert_refused(module, "more graphs than there are", x, INDEX, dim_size=2)
    assert_refused(module, "no index", x, ptr=torch.tensor([0, ELEMENTS]))
    assert_refused(module, "as wide as MultiheadAttention", x[:, :6], INDEX)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_refused(module, "under autocast", x, INDEX)
    with set_experimental_mode(True, "disable_dynamic_shapes"):
        assert_refused(module, "shapes that stay", x, INDEX, dim_size=SETS, max_num_elements=17)


def test_compiled_code_is_upstreams() -> None:
    module = transformer()
    plain = module(features(), INDEX, dim_size=SETS)
    with fastgraph.enabled():
        compiled = torch.compile(module, backend="eager")
        torch.testing.assert_close(compiled(features(), INDEX, dim_size=SETS), plain)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "among themselves": lambda: SetAttentionBlock(CHANNELS, 3),
    "without norms": lambda: SetAttentionBlock(CHANNELS, 2, layer_norm=False),
    "induced": lambda: InducedSetAttentionBlock(CHANNELS, 4, 3),
    "pooling": lambda: PoolingByMultiheadAttention(CHANNELS, 2, 3),
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_on_padded_sets(name: str, training: bool) -> None:
    """Padding included: blocks compute with it, though it attends to nothing."""
    torch.manual_seed(5)
    module = with_random_biases(BLOCKS[name]())
    x, mask = to_dense_batch(features(), INDEX, batch_size=SETS)
    call = arguments(x + 0.3, mask)
    assert_same(module, call, layer="MultiheadAttentionBlock", training=training)


@pytest.mark.parametrize("name", BLOCKS)
def test_masks_may_be_edited_before_the_backward_pass(name: str) -> None:
    found, module = [], BLOCKS[name]()
    for enabled in (False, True):
        x, mask = to_dense_batch(features(), INDEX, batch_size=SETS)
        with fastgraph.enabled() if enabled else torch.enable_grad():
            out = module(x, mask)
            mask.zero_()
            found.append(torch.autograd.grad(out.square().sum(), list(module.parameters())))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("has_mask", [True, False])
def test_a_block_of_two_sets(has_mask: bool) -> None:
    """Masks need not be of the first elements, and sets of seeds may have no elements."""
    torch.manual_seed(5)
    module = with_random_biases(MultiheadAttentionBlock(CHANNELS, 3))
    y, x_mask, y_mask = torch.randn(5, 9, CHANNELS), torch.rand(5, 4) > 0.4, torch.rand(5, 9) > 0.5
    y_mask[2] = False
    for seeds in (4, 0):
        x = torch.randn(5, seeds, CHANNELS)
        own = x_mask[:, :seeds] if has_mask else None
        assert_same(module, arguments(x, y, own, y_mask))


def test_blocks_that_are_upstreams(monkeypatch: pytest.MonkeyPatch) -> None:
    module = MultiheadAttentionBlock(CHANNELS, 3)
    x, mask = torch.randn(2, 5, CHANNELS), torch.ones(2, 5, dtype=torch.bool)
    assert_refused(module, "y_mask is no bool", x, x, None, mask[:, :3])
    assert_refused(module, "x_mask is no bool", x, x, mask[:, :3], mask)
    assert_refused(module, "as wide as MultiheadAttention", x[..., :6], x, None, mask)
    assert_refused(module, "have not as many sets", x[:1], x, None, mask)
    fastgraph.status().reset()
    monkeypatch.delenv("FASTGRAPH_MIN_EDGES")
    large = torch.randn(5, 1000, CHANNELS)
    with fastgraph.enabled(strict=True):
        module(x, x)
        module(x, x, mask, mask)
        module(large[:, :2], large, None, torch.ones(5, 1000, dtype=torch.bool))
    row = fastgraph.status().row("MultiheadAttentionBlock")
    assert row.routed == 0 and row.fell_back == 2
    assert any("too few" in reason for reason in row.reasons)
    assert any("sets fill" in reason for reason in row.reasons)
