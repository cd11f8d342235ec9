"""The route of ``gcn_norm``: what is remembered, for whom and for how long."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    GraphConv,
    LGConv,
    SGConv,
    TAGConv,
    TransformerConv,
)

import fastgraph
from fastgraph.graphs.memo import MEMO
from fastgraph.pyg import gcn_norm
from tests import forks
from tests.graphs import random_edges

# Whatever computes, the host remembers.
pytestmark = pytest.mark.repeats

EDGES = random_edges(10, 10, 40)


def routed() -> int:
    return sum(row.routed for row in fastgraph.status().rows)


@pytest.mark.parametrize("layer", [GCNConv, SGConv])
def test_normalisation_is_remembered_and_follows_edits(layer: Any) -> None:
    conv, x = layer(4, 2), torch.randn(10, 4)
    edges, weight = EDGES.clone(), torch.rand(40)
    with fastgraph.enabled():
        for change in (None, "edges", "weight"):
            if change == "edges":
                edges[0] = edges[0].flip(0)
            if change == "weight":
                weight.mul_(2).add_(torch.rand(40))
            ours = [conv(x, edges, weight), conv(x, edges, weight)]
            known = len(MEMO)
            conv(x, edges, weight)
            assert len(MEMO) == known
            with fastgraph.enabled():
                fastgraph.disable()
                expected = conv(x, edges, weight)
            for out in ours:
                torch.testing.assert_close(out, expected)


def test_both_passes_sort_a_graph_once(sorted_graphs: list[fastgraph.Graph]) -> None:
    conv, x, edges = GCNConv(4, 2), torch.randn(10, 4), EDGES.clone()
    with fastgraph.enabled():
        for _ in range(3):
            conv(x, edges).sum().backward()
    assert len(sorted_graphs) == 1


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_compiled_layers_normalise_and_sort_a_graph_once(
    weighted: bool, autocast: bool, sorted_graphs: list[fastgraph.Graph]
) -> None:
    conv, x, edges = GCNConv(4, 2), torch.randn(10, 4), EDGES.clone()
    weight = torch.rand(40) if weighted else None
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        expected = conv(x, edges, weight)
        with fastgraph.enabled():
            compiled = torch.compile(conv, backend="aot_eager", fullgraph=True)
            for _ in range(3):
                out = compiled(x, edges, weight)
                out.sum().backward()
    torch.testing.assert_close(out, expected)
    assert len(sorted_graphs) == 1


def _with_leftover_cache() -> GCNConv:
    conv = GCNConv(4, 2, cached=True)
    conv(torch.randn(10, 4), EDGES.flip(0))
    conv.cached = False
    return conv


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (_with_leftover_cache, (10, 4)),
        (lambda: GCNConv(4, 2, node_dim=0), (4, 1, 4)),
        (lambda: GCNConv(4, 2, node_dim=-2), (3, 10, 4)),
        (lambda: GCNConv(4, 2, aggr="max"), (10, 4)),
        (lambda: GCNConv(4, 2, flow="target_to_source"), (10, 4)),
        (lambda: GCNConv(4, 2, add_self_loops=False), (10, 4)),
        (lambda: GCNConv(4, 2, improved=True), (10, 4)),
    ],
)
def test_compiled_layers_are_upstreams(
    build: Callable[[], GCNConv], shape: tuple[int, ...]
) -> None:
    conv = build()
    x, edges = torch.randn(shape), EDGES % shape[conv.node_dim]
    for weight in [None, torch.rand(40)] if len(shape) == 2 else [None]:
        expected = conv(x, edges, weight)
        with fastgraph.enabled():
            compiled = torch.compile(conv, backend="aot_eager")
            torch.testing.assert_close(compiled(x, edges, weight), expected)


REPLACED_BEFORE = """
import torch
from torch_geometric.nn import GCNConv
from torch_geometric.nn.conv import gcn_conv
upstream = gcn_conv.gcn_norm
def doubled(*given):
    index, weight = upstream(*given)
    return index, 2 * weight
gcn_conv.gcn_norm = doubled
conv, x, edges = GCNConv(4, 2), torch.randn(10, 4), torch.randint(10, (2, 40))
expected = conv(x, edges)
import fastgraph
fastgraph.enable()
for layer in (conv, torch.compile(conv, backend="aot_eager")):
    torch.testing.assert_close(layer(x, edges), expected)
"""


def test_a_normalisation_that_was_replaced_before_is_called_too(tmp_path: Path) -> None:
    done = forks.python("-c", REPLACED_BEFORE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_what_layers_share_is_computed_again_once_it_was_edited() -> None:
    from torch_geometric.nn.conv import sg_conv

    with fastgraph.enabled():
        sg_conv.gcn_norm(EDGES, None, 10)  # which is noted only
        index, weight = sg_conv.gcn_norm(EDGES, None, 10)
        assert sg_conv.gcn_norm(EDGES, None, 10)[1] is weight
        expected = weight.clone()
        weight.zero_()
        again_index, again = sg_conv.gcn_norm(EDGES, None, 10)
        torch.testing.assert_close(again, expected)
        assert torch.equal(index, again_index)
        again.requires_grad_()
        assert not sg_conv.gcn_norm(EDGES, None, 10)[1].requires_grad


def _upstream_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    upstream = gcn_norm.UPSTREAM
    monkeypatch.setattr(
        gcn_norm, "UPSTREAM", lambda *a, **k: (found.append(len(a)), upstream(*a, **k))[1]
    )
    return found


def _normalised(edges: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    from torch_geometric.nn.conv import sg_conv

    index, weight = sg_conv.gcn_norm(edges, None, 10, **options)
    return index, weight


WITHOUT_LOOPS = torch.stack([torch.arange(10), (torch.arange(10) + 3) % 10]).repeat(1, 4)


@pytest.mark.parametrize("edges", [EDGES, WITHOUT_LOOPS])
@pytest.mark.parametrize("loops", [True, False])
def test_a_graph_is_noted_first_and_remembered_at_its_second_use(
    edges: Tensor, loops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fastgraph.clear_cache()
    with fastgraph.enabled(min_edges=0):
        calls = _upstream_calls(monkeypatch)
        for number in range(3):  # batches, each of which several layers use
            batch = edges.clone()
            expected = gcn_norm.UPSTREAM(batch, None, 10, add_self_loops=loops)
            calls.clear()
            found = [_normalised(batch, add_self_loops=loops) for _ in range(3)]
            # Only what begins with the caller's edges tells at once whether they are the same.
            begins = loops and edges is WITHOUT_LOOPS
            assert len(calls) == (1 if begins else 2), number
            assert all(weight is found[1][1] for _, weight in found[0 if begins else 1 :])
            assert (found[0][0] is batch) == (not loops)
            for ours, plain in zip(found[2], expected, strict=True):
                assert torch.equal(ours, plain)
        fastgraph.clear_cache()
        for _ in range(100):
            _normalised(edges.clone(), add_self_loops=loops)
        assert len(MEMO) == 0 and len(MEMO._noted) <= 64
        assert MEMO.nbytes < 10_000
        MEMO.trim()
        assert MEMO.nbytes == 0


@pytest.mark.parametrize("edges", [EDGES, WITHOUT_LOOPS])
@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("counted", [True, False])
def test_edits_after_the_first_use(edges: Tensor, loops: bool, counted: bool) -> None:
    for values in (edges.flip(1), edges.flip(0), edges[:, :1].expand(2, 40)):
        graph = edges.clone()
        with fastgraph.enabled(min_edges=0):
            _normalised(graph, add_self_loops=loops)
            if counted:
                graph.copy_(values)
            else:
                graph.numpy()[:] = values.numpy()
            found = [_normalised(graph, add_self_loops=loops) for _ in range(2)]
            expected = gcn_norm.UPSTREAM(graph, None, 10, add_self_loops=loops)
        for ours in found:
            for a, b in zip(ours, expected, strict=True):
                assert torch.equal(a, b)


def test_what_was_noted_is_computed_again_once_it_was_edited() -> None:
    graph = EDGES.clone()
    with fastgraph.enabled(min_edges=0):
        _, weight = _normalised(graph)
        expected = weight.clone()
        weight.zero_()
        assert torch.equal(_normalised(graph)[1], expected)


def test_a_graph_that_was_used_before_others_is_remembered_at_its_second_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs = [WITHOUT_LOOPS.clone() for _ in range(5)]
    with fastgraph.enabled(min_edges=0):
        calls = _upstream_calls(monkeypatch)
        for _ in range(4):
            for graph in graphs:
                _normalised(graph)
    assert len(calls) == 2 * len(graphs) - 1  # what was made of the last was there yet


@pytest.mark.parametrize("cache_bytes", [0, 10])
def test_nothing_is_kept_beyond_the_bound(cache_bytes: int) -> None:
    fastgraph.clear_cache()
    with fastgraph.enabled(min_edges=0, cache_bytes=cache_bytes):
        for _ in range(3):
            _normalised(EDGES)
            assert MEMO.nbytes == 0


def test_users_get_tensors_of_their_own() -> None:
    from torch_geometric.nn.conv import gcn_conv

    first, second = GCNConv(4, 2, cached=True), GCNConv(4, 2, cached=True)
    x = torch.randn(10, 4)
    with fastgraph.enabled():
        pairs = [gcn_conv.gcn_norm(EDGES, None, 10) for _ in range(2)]
        first(x, EDGES), second(x, EDGES)
    assert pairs[0][1] is not pairs[1][1]
    for a, b in zip(first._cached_edge_index, second._cached_edge_index, strict=True):
        assert a is not b


def test_a_normalisation_that_was_replaced_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_geometric.nn.conv import gcn_conv

    def doubled(*args: object) -> tuple[Tensor, Tensor]:
        index, weight = upstream(*args)
        return index, 2 * weight

    upstream = gcn_conv.gcn_norm
    conv, x = GCNConv(4, 2), torch.randn(10, 4)
    with fastgraph.enabled():
        once = conv(x, EDGES) - conv.bias
        monkeypatch.setattr(gcn_conv, "gcn_norm", doubled)
        torch.testing.assert_close(conv(x, EDGES) - conv.bias, 2 * once)


def test_the_default_dtype_is_part_of_what_is_remembered() -> None:
    from torch_geometric.nn.conv import sg_conv

    with fastgraph.enabled():
        assert sg_conv.gcn_norm(EDGES, None, 10)[1].dtype == torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert sg_conv.gcn_norm(EDGES, None, 10)[1].dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)


# Nothing is derived from the edge weights of other layers.
@pytest.mark.parametrize(
    ("layer", "edit"),
    [
        *((c, "edge_weight") for c in (GCNConv, SGConv)),
        *(
            (c, "edge_index")
            for c in (GCNConv, SGConv, GraphConv, GATConv, GATv2Conv, TransformerConv)
        ),
    ],
)
def test_edits_that_torch_cannot_see(layer: Any, edit: str) -> None:
    conv, x, edges, weight = layer(4, 2), torch.randn(10, 4), EDGES.clone(), torch.rand(40)
    arguments = (x, edges, weight) if layer in (GCNConv, SGConv) else (x, edges)
    with fastgraph.enabled():
        conv(*arguments)
        conv(*arguments)
        edited = edges if edit == "edge_index" else weight
        edited.numpy()[:] = edited.flip(-1).numpy()
        ours = conv(*arguments)
    torch.testing.assert_close(ours, conv(*arguments))


def test_a_weight_of_another_class_is_left_to_upstream() -> None:
    class Tagged(torch.Tensor):
        pass

    conv, x, weight = GCNConv(4, 2), torch.randn(10, 4), torch.rand(40)
    expected = conv(x, EDGES, weight)
    fastgraph.clear_cache()
    with fastgraph.enabled():
        out = conv(x, EDGES, weight.as_subclass(Tagged))
        assert not {"gcn_norm", "normalised"} & {key[0] for key in MEMO._entries}
    torch.testing.assert_close(out.as_subclass(torch.Tensor), expected)
    assert routed() == 0


@pytest.mark.parametrize("layer", [GCNConv, SGConv, TAGConv])
def test_weights_that_differ_in_sign_are_apart(layer: Any) -> None:
    imaginary = torch.complex(torch.zeros(40), torch.rand(40) + 0.5)
    conv, x = layer(4, 4), torch.randn(10, 4)
    weights = (imaginary.imag, imaginary.conj().imag)
    with fastgraph.enabled(min_edges=0), torch.no_grad():
        found = [conv(x, EDGES, weight) for weight in weights for _ in range(3)]
    for out, weight in zip(found, (w for w in weights for _ in range(3)), strict=True):
        torch.testing.assert_close(out, conv(x, EDGES, weight), equal_nan=True)


def test_learned_weights_through_the_normalisation() -> None:
    conv, x = GCNConv(4, 2), torch.randn(10, 4)
    weight = torch.rand(40, requires_grad=True)
    expected = torch.autograd.grad(conv(x, EDGES, weight).sum(), weight)
    with fastgraph.enabled(strict=True):
        for _ in range(2):
            ours = torch.autograd.grad(conv(x, EDGES, weight).sum(), weight)
            torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("edited", ["edges", "weight"])
def test_edits_between_the_passes(edited: str) -> None:
    """Upstream's gradient does not see them: it goes by tensors of its own."""

    def gradient() -> Tensor:
        given = {"edges": EDGES.clone(), "weight": torch.arange(40) / 40}
        leaf = x.clone().requires_grad_()
        out = conv(leaf, *given.values())
        given[edited].zero_()
        return torch.autograd.grad(out.square().sum(), leaf)[0]

    conv, x = GCNConv(4, 2), torch.randn(10, 4)
    expected = gradient()
    with fastgraph.enabled(strict=True):
        torch.testing.assert_close(gradient(), expected)


def test_training_on_a_graph_made_in_inference_mode() -> None:
    conv, x = GCNConv(4, 2), torch.randn(10, 4, requires_grad=True)
    with torch.inference_mode():
        edges, weight = EDGES.clone(), torch.rand(40)
    for given in ((edges,), (edges, weight), (EDGES, weight)):
        expected = torch.autograd.grad(conv(x, *given).square().sum(), x)
        with fastgraph.enabled(strict=True):
            ours = torch.autograd.grad(conv(x, *given).square().sum(), x)
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("make", [LGConv, lambda: TAGConv(4, 5), lambda: GCNConv(4, 5)])
def test_calls_without_content_end_as_upstreams(make: Any) -> None:
    """At each of several calls, since what is remembered of the first may not be compared."""
    layer = make().to("meta")
    x, edges = torch.randn(12, 4, device="meta"), torch.ones(2, 40, device="meta").long()

    def ends() -> list[object]:
        found: list[object] = []
        for _ in range(3):
            try:
                found.append(layer(x, edges).shape)
            except (NotImplementedError, RuntimeError) as error:
                found.append((type(error), str(error)))
        return found

    expected = ends()
    with fastgraph.enabled(min_edges=0):
        assert ends() == expected


@pytest.mark.parametrize("options", [{}, {"improved": True}, {"flow": "target_to_source"}])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("loops", [0, 3])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_self_loops_are_added_as_upstream_adds_them(
    options: dict[str, Any], weighted: bool, loops: int, dtype: torch.dtype
) -> None:
    """Bit by bit, of graphs with and without any, and so are the gradients of weights."""
    edges = random_edges(30, 30, 200)
    edges = edges[:, edges[0] != edges[1]]
    edges = torch.cat([edges, torch.arange(loops).repeat(2, 1)], dim=1).to(dtype)
    given = torch.rand(edges.shape[1], dtype=torch.float64) if weighted else None
    found = []
    for norm in (gcn_norm.gcn_norm, gcn_norm.UPSTREAM):
        weight = None if given is None else given.clone().requires_grad_()
        with fastgraph.enabled(min_edges=0):
            index, normalised = norm(edges, weight, 31, dtype=torch.float64, **options)
        results = [index, normalised]
        if weight is not None:
            results += torch.autograd.grad(normalised.square().sum(), weight)
        found.append(results)
    for ours, upstreams in zip(*found, strict=True):
        torch.testing.assert_close(ours, upstreams, rtol=0, atol=0)


@pytest.mark.parametrize(
    "arguments",
    [
        ((None,), {"flow": "sideways"}),
        ((None, 30), {"num_nodes": 30}),
        ((None, 30, False, True, "source_to_target", None, 1), {}),
        ((None, 30), {"loops": True}),
        ((None, 5), {}),
        ((torch.rand(3), 30), {}),
    ],
)
def test_errors_are_those_of_upstream(arguments: tuple[Any, Any]) -> None:
    edges = torch.tensor([[1, 2, 9, 4], [2, 3, 1, 8]])
    args, kwargs = arguments
    texts = []
    for norm in (gcn_norm.UPSTREAM, gcn_norm.gcn_norm):
        with fastgraph.enabled(min_edges=0), pytest.raises(Exception) as raised:
            norm(edges, *args, **kwargs)
        texts.append((type(raised.value), str(raised.value)))
    assert texts[0] == texts[1]
