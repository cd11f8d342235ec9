"""Dual-interleaved attention beside its formula with masks of all pairs, in float64."""

from __future__ import annotations

import copy
import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastgraph.nn import (
    DualInterleavedAttention,
    DualPattern,
    Schedule,
    dual_pattern,
    period_of_share,
)
from fastgraph.nn.dual_pattern import EDGE, LOOP, OTHER, PATH, TOKEN, TYPES
from tests.graphs import random_edges

CHANNELS, HEADS = 12, 3
SIZES = [1, 7, 12, 0, 5]
NODES, GRAPHS = sum(SIZES), len(SIZES)
BATCH = torch.repeat_interleave(torch.arange(GRAPHS), torch.tensor(SIZES))
STARTS = [0, *itertools.accumulate(SIZES)]
DENSE, SPARSE = Schedule("layer", 1), None


def edges_of(sizes: list[int]) -> Tensor:
    """Within each graph, with duplicates, in one direction: some loops, some nodes alone."""
    parts, first = [], 0
    for number, size in enumerate(sizes):
        if size > 1:
            parts.append(random_edges(size - 1, size - 1, 2 * size, seed=number) + first)
        first += size
    return torch.cat(parts, dim=1)


EDGES = edges_of(SIZES)


def layer(**options: Any) -> DualInterleavedAttention:
    torch.manual_seed(5)
    made = DualInterleavedAttention(CHANNELS, HEADS, **options).double()
    for parameter in made.parameters():  # biases are 0 at first
        torch.nn.init.normal_(parameter, std=0.4)
    return made


def inputs(token: bool) -> tuple[Tensor, Tensor | None]:
    torch.manual_seed(4)
    x = torch.randn(NODES, CHANNELS, dtype=torch.float64, requires_grad=True)
    tokens = torch.randn(GRAPHS, CHANNELS, dtype=torch.float64, requires_grad=True)
    return x, tokens if token else None


def types_of_pairs(edges: Tensor, size: int, token: bool, path: bool, hops: int = 1) -> Tensor:
    """Of one graph, queries by keys, the token last."""
    rows = size + token
    types = torch.full((rows, rows), OTHER)
    reached = steps = torch.eye(size, dtype=torch.bool)
    for distance in range(1, hops + 1):
        following = torch.zeros_like(steps)
        for source, destination in edges.T.tolist():
            following[destination] |= steps[source]
        steps = following & ~reached
        reached = reached | steps
        if distance > 1:
            types[:size, :size][steps] = TYPES + distance - 2
    if path:
        for node in range(size - 1):
            types[node, node + 1] = types[node + 1, node] = PATH
    for source, destination in edges.T.tolist():
        types[destination, source] = EDGE
    if token:
        types[-1] = types[:, -1] = TOKEN
    types[torch.arange(rows), torch.arange(rows)] = LOOP
    return types


def formula(
    module: DualInterleavedAttention, x: Tensor, token: Tensor | None, dense: list[bool]
) -> Tensor:
    """The outputs of all nodes, then of all tokens, graph by graph with scores of all pairs."""
    outs, of_tokens = [], []
    for graph, size in enumerate(SIZES):
        first = STARTS[graph]
        rows = x[first : first + size]
        own = (EDGES[0] >= first) & (EDGES[0] < first + size)
        if token is not None:
            rows = torch.cat([rows, token[graph : graph + 1]])
        hops = module.hops if dense[graph] else 1
        of_graph = EDGES[:, own] - first
        types = types_of_pairs(of_graph, size, token is not None, module.path, hops)
        q, k, v = (t.transpose(0, 1) for t in module._projected(rows))
        scores = q @ k.transpose(1, 2) / (CHANNELS / HEADS) ** 0.5
        if module.type_bias is not None:
            scores = scores + module.type_bias[types].permute(2, 0, 1)
        if not dense[graph]:
            scores = scores.masked_fill(types == OTHER, -torch.inf)
        out = module.out_proj((scores.softmax(-1) @ v).transpose(0, 1).reshape(rows.shape))
        outs.append(out[:size])
        of_tokens.append(out[size:])
    return torch.cat([*outs, *of_tokens])


def joined(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else torch.cat(out)


@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize("path", [False, True])
@pytest.mark.parametrize("hops", [0, 1, 3])
@pytest.mark.parametrize("is_dense", [False, True])
def test_outputs_and_gradients(is_dense: bool, hops: int, path: bool, token: bool) -> None:
    """The traps of offsets, lost loops, scales and directions would each show here."""
    schedule = Schedule("layer", 1, evaluation="dense" if is_dense else "sparse")
    biases = {"type_bias": True, "hops": hops} if hops else {}
    module = layer(schedule=schedule, path=path, **biases).eval()
    x, tokens = inputs(token)
    out = joined(module(x, EDGES, BATCH, tokens))
    truth = formula(module, x, tokens, [is_dense] * GRAPHS)
    torch.testing.assert_close(out, truth)
    grad = torch.randn_like(out)
    learned = [x, *module.parameters()] + ([] if tokens is None else [tokens])
    ours, theirs = (torch.autograd.grad(y, learned, grad) for y in (out, truth))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize("type_bias", [False, True])
@pytest.mark.parametrize("policy", ["paper", "dense"])
def test_a_batch_is_its_graphs_one_by_one(policy: str, type_bias: bool, token: bool) -> None:
    options: dict[str, Any] = {"policy": "paper"} if policy == "paper" else {"schedule": DENSE}
    module = layer(type_bias=type_bias, **options)
    x, tokens = inputs(token)
    outs, of_tokens = [], []
    for graph, size in enumerate(SIZES):
        first = STARTS[graph]
        own = (EDGES[0] >= first) & (EDGES[0] < first + size)
        alone = None if tokens is None else tokens[graph : graph + 1]
        out = module(x[first : first + size], EDGES[:, own] - first, None, alone)
        outs.append(out if alone is None else out[0])
        of_tokens.append(x[:0] if alone is None else out[1])
    together = joined(module(x, EDGES, BATCH, tokens))
    torch.testing.assert_close(together, torch.cat([*outs, *of_tokens]))


def ring(size: int) -> Tensor:
    node = torch.arange(size)
    return torch.stack([torch.cat([node, node.roll(-1)]), torch.cat([node.roll(-1), node])])


@pytest.mark.parametrize("token", [False, True])
def test_the_papers_policy(token: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse where all three are yes, dense where one is no or undecided."""
    star = torch.tensor([[0] * 5 + [1, 2, 3, 4, 5], [1, 2, 3, 4, 5] + [0] * 5])  # C2 is no
    pair = torch.tensor([[0, 1], [1, 0]])
    edges = torch.cat([ring(7), pair + 7, star + 9, ring(12) + 15], dim=1)
    sizes = [7, 2, 6, 12]
    batch = torch.repeat_interleave(torch.arange(4), torch.tensor(sizes))
    module = layer(policy="paper", layers=3)
    pattern = module.pattern(edges, 27, batch, 4, token)
    report = module.report(pattern)
    far = not token  # the ends of the ring of 12 are 6 steps apart, of the ring of 7 three
    assert report.dense == (False, False, True, far)
    assert report.pairs == (6 + token) ** 2 + far * 12**2
    entries = [3 * size + (2 * size + 1) * token for size in (7, 12)]
    of_pair = 4 + 5 * token
    assert report.entries == entries[0] + of_pair + (0 if far else entries[1])
    assert report.conditions is not None and len(report.conditions) == 4
    assert f"{1 + far} of 4 graphs dense" in str(report)
    x = torch.randn(27, CHANNELS, dtype=torch.float64)
    tokens = torch.randn(4, CHANNELS, dtype=torch.float64) if token else None
    mixed = joined(module(x, pattern, None, tokens))
    of_layer = {}
    for name, evaluation in (("dense", "dense"), ("sparse", "sparse")):
        other = layer(policy="union", layers=3, schedule=Schedule("layer", 3, evaluation)).eval()
        other.load_state_dict(module.state_dict())
        of_layer[name] = joined(other(x, pattern, None, tokens))
    graphs = torch.cat([batch, torch.arange(4)]) if token else batch
    is_dense = torch.tensor(report.dense)[graphs].unsqueeze(1)
    expected = torch.where(is_dense, of_layer["dense"], of_layer["sparse"])
    torch.testing.assert_close(mixed, expected)
    monkeypatch.setattr("fastgraph.nn.hamiltonian.path_by_rotations", lambda *_: None)
    found = module.report(module.pattern(bipartite(10, 20), 30, token=token))
    assert found.conditions is not None and found.dense == (True,)
    assert found.conditions[0].hamiltonian_path.verdict == "undecided"


def bipartite(first: int, second: int) -> Tensor:
    edges = torch.cartesian_prod(torch.arange(first), torch.arange(first, first + second)).T
    return torch.cat([edges, edges.flip(0)], dim=1)


def test_dense_turns_that_do_not_fit() -> None:
    for options in ({"policy": "paper"}, {"policy": "union"}):
        module = layer(max_pairs=NODES, **options)
        with pytest.raises(ValueError, match=r"does not fit: it has \d+ pairs.*10\^12 operations"):
            module(*inputs(False)[:1], EDGES, BATCH)
    module = layer(max_pairs=NODES, path=True)
    assert module(*inputs(False)[:1], EDGES, BATCH).shape == (NODES, CHANNELS)


@pytest.mark.parametrize("training", [False, True])
def test_turns_by_layer(training: bool) -> None:
    """One layer of three is dense, in evaluation as in training, unless it is told otherwise."""
    x, _ = inputs(False)
    for number in range(3):
        module = layer(layers=3, layer=number).train(training)
        out = module(x, EDGES, BATCH)
        torch.testing.assert_close(out, formula(module, x, None, [number == 0] * GRAPHS))
        report = module.report(module.pattern(EDGES, NODES, BATCH))
        assert report.dense == (number == 0,) * GRAPHS
        if number:
            assert "layer 0 attends to all pairs" in report.reason and report.pairs == 0
        else:
            assert report.pairs == sum(size * size for size in SIZES) and report.entries == 0
    never = layer(schedule=Schedule("layer", None)).train(training)
    truth = formula(never, x, None, [False] * GRAPHS)
    torch.testing.assert_close(never(x, EDGES, BATCH), truth)
    for evaluation in ("dense", "sparse"):
        schedule = Schedule("layer", 3, evaluation=evaluation)
        turns = [schedule.is_dense(number, training) for number in range(6)]
        expected = [True, False, False] * 2 if training else [evaluation == "dense"] * 6
        assert turns == expected


def test_dense_turns_are_torchs_attention() -> None:
    """With its ``state_dict``, and in a new layer its parameters."""
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(CHANNELS, HEADS, batch_first=True).double()
    module, x = layer(), inputs(False)[0]
    module.load_state_dict(theirs.state_dict())
    out = module(x, EDGES[:, :0])
    torch.testing.assert_close(out, theirs(x[None], x[None], x[None])[0][0])
    torch.manual_seed(0)
    assert not DualInterleavedAttention(CHANNELS, HEADS).double().in_proj_bias.any()
    for bias in (True, False):
        own = DualInterleavedAttention(CHANNELS, HEADS, bias=bias, type_bias=True)
        before = [parameter.clone() for parameter in own.parameters()]
        for parameter in own.parameters():
            torch.nn.init.normal_(parameter)
        own.reset_parameters()
        for first, second in zip(before, own.parameters(), strict=True):
            assert first.any() == second.any() and first.shape == second.shape


def test_turns_by_step() -> None:
    schedule = Schedule("step", 3, evaluation="sparse")
    module, x = layer(schedule=schedule, layers=4, layer=2), inputs(False)[0]
    found, truths = [], [formula(module, x, None, [kind] * GRAPHS) for kind in (False, True)]
    for _ in range(7):
        out = module(x, EDGES, BATCH)
        found.append([torch.allclose(out, truth) for truth in truths].index(True))
        torch.testing.assert_close(module.eval()(x, EDGES, BATCH), truths[0])
        module.train()
        schedule.step()
    assert found == [1, 0, 0, 1, 0, 0, 1]
    other = Schedule("step", 3, evaluation="sparse")
    other.load_state_dict(schedule.state_dict())
    assert [other.is_dense(0, True), other.steps] == [False, 7]
    pattern = module.pattern(EDGES, NODES, BATCH)
    assert "need not have a path" in module.report(pattern).reason


def test_paths_instead_of_dense_layers() -> None:
    module = layer(path=True, layers=2, layer=1)
    pattern = module.pattern(EDGES, NODES, BATCH, GRAPHS, token=True)
    for graph, answers in enumerate(pattern.conditions(2)):
        assert answers.hold, (graph, answers)
    report = module.report(pattern)
    assert not any(report.dense) and report.reason.endswith("consecutive nodes, and the token all")
    alone = module.report(module.pattern(EDGES, NODES, BATCH))
    assert "without a token not all reach" in alone.reason


def test_dropout_in_both_turns() -> None:
    """Of weights, in training mode: means over many seeds are those without dropout."""
    for schedule in (DENSE, Schedule("layer", 1, evaluation="sparse")):
        module, x = layer(schedule=schedule, dropout=0.4), inputs(False)[0].detach()
        if schedule is not DENSE:
            module.schedule = Schedule("step", 2, evaluation="sparse")
            module.schedule.step()
        torch.manual_seed(0)
        drawn = torch.stack([module(x, EDGES, BATCH) for _ in range(400)])
        plain = module.eval()(x, EDGES, BATCH)
        assert (drawn[0] != drawn[1]).any() and not torch.allclose(drawn[0], plain)
        deviation = drawn.std(0) / len(drawn) ** 0.5
        assert ((drawn.mean(0) - plain).abs() <= 6 * deviation + 1e-9).all()


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_with_dropout(reentrant: bool, is_dense: bool) -> None:
    """A second computation drops the same weights, in the same turn."""
    schedule = Schedule("step", 2, evaluation="sparse")
    if not is_dense:
        schedule.step()
    module, (x, token) = layer(schedule=schedule, dropout=0.5), inputs(True)
    grads = []
    for is_kept in (True, False):
        torch.manual_seed(3)
        if is_kept:
            out = joined(module(x, EDGES, BATCH, token))
        else:
            out = joined(checkpoint(module, x, EDGES, BATCH, token, use_reentrant=reentrant))
        grads.append(torch.autograd.grad(out.square().sum(), x) if not reentrant else leaf(out, x))
    assert torch.equal(grads[0][0], grads[1][0])


def leaf(out: Tensor, x: Tensor) -> tuple[Tensor]:
    """The gradient by ``backward``, which a reentrant checkpoint needs."""
    x.grad = None
    out.square().sum().backward()
    assert x.grad is not None
    return (x.grad.clone(),)


@pytest.mark.parametrize("is_dense", [False, True])
def test_autocast(is_dense: bool) -> None:
    schedule = Schedule("layer", 1, evaluation="dense" if is_dense else "sparse")
    module = layer(schedule=schedule, type_bias=True).eval()
    x, token = inputs(True)
    truth = joined(module(x, EDGES, BATCH, token))
    single = copy.deepcopy(module).float()
    assert token is not None
    with torch.autocast("cpu", torch.bfloat16):
        out = joined(single(x.float(), EDGES, BATCH, token.float()))
    assert out.dtype == torch.bfloat16
    # Half precision has 8 bits; outputs are sums of a few products of about 1.
    torch.testing.assert_close(out.double(), truth, rtol=0.05, atol=0.05)
    grads = torch.autograd.grad(out.float().square().sum(), [*single.parameters()])
    assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in grads)


def test_compiled_code_has_two_graphs() -> None:
    """One for dense steps and one for sparse ones, however many steps are taken."""
    schedule = Schedule("step", 3, evaluation="sparse")
    module, (x, token) = layer(schedule=schedule), inputs(True)
    pattern = module.pattern(EDGES, NODES, BATCH, GRAPHS, token=True)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    for _ in range(7):
        torch.testing.assert_close(
            compiled(x, pattern, None, token), module(x, pattern, None, token)
        )
        schedule.step()
    assert len(graphs) == 2
    torch._dynamo.reset()


def test_rows_that_are_hidden_are_zero_and_not_nan() -> None:
    for evaluation in ("dense", "sparse"):
        module = layer(type_bias=True, schedule=Schedule("layer", 1, evaluation)).eval()
        assert module.type_bias is not None
        with torch.no_grad():
            module.type_bias.fill_(-torch.inf)
        x, token = inputs(True)
        out = joined(module(x, EDGES, BATCH, token))
        assert torch.equal(out, module.out_proj.bias.expand_as(out))
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert not grad.isnan().any()


def test_dense_turns_that_hide_other_pairs_are_sparse_ones() -> None:
    x, token = inputs(True)
    outs = []
    for evaluation in ("dense", "sparse"):
        module = layer(type_bias=True, schedule=Schedule("layer", 1, evaluation)).eval()
        assert module.type_bias is not None
        with torch.no_grad():
            module.type_bias[OTHER] = -torch.inf
        outs.append(joined(module(x, EDGES, BATCH, token)))
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize("hops", [0, 1, 3])
def test_probes_measure_what_sparse_turns_miss(hops: int) -> None:
    biases = {"type_bias": True, "hops": hops} if hops else {}
    module, (x, token) = layer(**biases), inputs(True)
    found = module.probe(x, EDGES, BATCH, token, queries=1000)
    assert token is not None
    assert found.queries == NODES + GRAPHS
    outside, errors = [], []
    for graph, size in enumerate(SIZES):
        first = STARTS[graph]
        rows = torch.cat([x[first : first + size], token[graph : graph + 1]])
        own = (EDGES[0] >= first) & (EDGES[0] < first + size)
        types = types_of_pairs(EDGES[:, own] - first, size, True, False, module.hops)
        is_other = types_of_pairs(EDGES[:, own] - first, size, True, False) == OTHER
        q, k, v = (t.transpose(0, 1) for t in module._projected(rows))
        scores = q @ k.transpose(1, 2) / (CHANNELS / HEADS) ** 0.5
        if module.type_bias is not None:
            scores = scores + module.type_bias[types].permute(2, 0, 1)
        weights = scores.softmax(-1)
        outside.append((weights * is_other).sum(-1).T)
        sparse = scores.masked_fill(is_other, -torch.inf).softmax(-1)
        dense, other = ((w @ v).transpose(0, 1).flatten(1) for w in (weights, sparse))
        errors.append((other - dense).norm(dim=1) / dense.norm(dim=1))
    mass = torch.cat(outside)
    assert found.mass == pytest.approx(float(mass.detach().mean()), rel=1e-9)
    assert found.largest_mass == pytest.approx(float(mass.detach().max()), rel=1e-9)
    assert found.error == pytest.approx(float(torch.cat(errors).detach().mean()), rel=1e-9)
    assert found.period == max(1, int(1 / found.mass)) and 0 < found.mass < 1
    some = module.probe(x, EDGES, BATCH, token, queries=6, seed=1)
    assert some.queries == 6 and some == module.probe(x, EDGES, BATCH, token, queries=6, seed=1)
    assert some.mass <= found.largest_mass


def test_a_complete_pattern_misses_nothing() -> None:
    edges = torch.combinations(torch.arange(6), with_replacement=False).T
    edges = torch.cat([edges, edges.flip(0)], dim=1)
    found = layer().probe(inputs(False)[0][:6], edges)
    assert found.mass < 1e-12 and found.error < 1e-12 and found.period == 64


@pytest.mark.parametrize("token", [False, True])
def test_no_nodes(token: bool) -> None:
    x, tokens = inputs(token)
    for schedule in (DENSE, Schedule("layer", 1, evaluation="sparse")):
        module = layer(schedule=schedule).eval()
        tokens = None if tokens is None else tokens[:1]
        out = module(x[:0], EDGES[:, :0], None, tokens)
        assert joined(out).shape == (int(token), CHANNELS)
        assert not joined(out).isnan().any()


def test_patterns_are_made_once() -> None:
    module, other = layer(), layer()
    edges = EDGES.clone()
    pattern = module.pattern(edges, NODES, BATCH)
    assert other.pattern(edges, NODES, BATCH) is pattern
    assert str(pattern).startswith(f"DualPattern({NODES} nodes in {GRAPHS} graphs, ")
    assert layer(path=True).pattern(edges, NODES, BATCH) is not pattern
    edges[0, 0] = edges[1, 0]  # an edit is another graph
    assert module.pattern(edges, NODES, BATCH) is not pattern


def test_int32_edges() -> None:
    x, token = inputs(True)
    module = layer(layers=2, layer=1)
    outs = [joined(module(x, edges, BATCH, token)) for edges in (EDGES, EDGES.int())]
    assert torch.equal(*outs)


@pytest.mark.parametrize(
    ("share", "dense", "sparse", "period"),
    [(1.0, 5.0, 1.0, 1), (0.5, 8.0, 1.0, 9), (0.25, 1.0, 1.0, 4), (0.1, 3.0, 2.0, 15)],
)
def test_a_period_of_a_share_of_time(
    share: float, dense: float, sparse: float, period: int
) -> None:
    assert period_of_share(share, dense, sparse) == period
    taken = [dense / (dense + (p - 1) * sparse) for p in (period, period - 1) if p]
    assert taken[0] <= share + 1e-12 and all(more > share for more in taken[1:])


def test_periods_are_not_too_long_by_rounding() -> None:
    for hundredths, dense, sparse in itertools.product(range(1, 101), range(1, 30), (1, 2, 3, 5)):
        exact = 1 + Fraction(dense * (100 - hundredths), sparse * hundredths)
        assert period_of_share(hundredths / 100, dense, sparse) == math.ceil(exact)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: DualInterleavedAttention(10, 3), "channels: expected a multiple of heads, 3, got"),
        (lambda: layer(policy="dense"), "policy: expected one of 'union', 'paper', got 'dense'"),
        (lambda: layer(layers=0), "layers: expected an integer of at least 1, got 0"),
        (lambda: layer(layers=2, layer=2), "layer: expected an integer of 0 to 1, got 2"),
        (lambda: layer(hops=2), "hops: expected 1 without type_bias, got 2"),
        (lambda: layer(hops=251, type_bias=True), "hops: expected an integer of 1 to 250, got 251"),
        (lambda: layer(dropout=1.0), "dropout: expected a rate"),
        (lambda: layer(max_pairs=-1), "max_pairs: expected an integer of at least 0, got -1"),
        (lambda: Schedule("layer", 2).load_state_dict({"steps": -1}),
         "steps: expected an integer of at least 0, got -1"),
        (lambda: Schedule("epoch", 2), "by: expected one of 'step', 'layer', got 'epoch'"),
        (lambda: Schedule("layer", 0), "period: expected an integer of at least 1 or None, got 0"),
        (lambda: Schedule("step", 2), "evaluation: expected one of .*sparse'.* by step, got None"),
        (lambda: Schedule("step", 2, "same"), "evaluation: expected one of"),
        (lambda: period_of_share(0.0, 1.0, 1.0), "share: expected a number above 0 and at most 1"),
        (lambda: period_of_share(0.5, 1.0, 0.0), "sparse: expected a number above 0, got 0.0"),
    ],
)  # fmt: skip
def test_bad_options(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def some_pattern(**options: Any) -> DualPattern:
    return dual_pattern(EDGES, NODES, BATCH, **options)


ACROSS = torch.tensor([[0], [1]])


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"x": torch.zeros(NODES, 5)}, ValueError, r"x: expected \[nodes, 12\], got \[25, 5\]"),
        ({"edges": EDGES.double()}, ValueError, "edge_index: expected int64 or int32"),
        ({"edges": EDGES[:1]}, ValueError, r"edge_index: expected .*\[2, E\]"),
        ({"edges": EDGES + NODES}, IndexError, "edge_index: expected nodes of 0 to 24, got"),
        ({"edges": ACROSS}, ValueError, "edge_index: edge 0 joins two graphs of batch"),
        ({"batch": BATCH.flip(0)}, ValueError, "batch: expected graphs in ascending order"),
        ({"batch": BATCH[1:]}, ValueError, r"batch: expected int64 \[25\]"),
        ({"token": torch.zeros(GRAPHS, 3)}, ValueError, r"token: expected \[graphs, 12\]"),
        ({"token": torch.zeros(2, 12)}, ValueError,
         "token: expected one for each of 5 graphs, got 2"),
        ({"token": torch.zeros(2, 12), "batch": None, "edges": EDGES[:, :0]}, ValueError,
         "token: expected one for each of 1 graphs, got 2"),
        ({"edges": some_pattern()}, ValueError, "batch: expected None beside a pattern"),
        ({"edges": some_pattern(path=True), "batch": None}, ValueError,
         "edges: expected a pattern of path=False, as the layer has, .* got a pattern with one"),
        ({"edges": some_pattern(token=True), "batch": None}, ValueError,
         "token: expected one for each graph, as the pattern has, got None"),
        ({"edges": some_pattern(), "batch": None, "x": torch.zeros(3, 12)}, ValueError,
         "edges: expected a pattern of 3 nodes, got 25"),
    ],
)  # fmt: skip
def test_bad_input(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    given = {"x": inputs(False)[0], "edges": EDGES, "batch": BATCH} | arguments
    with pytest.raises(error, match=text):
        layer()(**given)


def test_paths_are_asked_for() -> None:
    x = inputs(False)[0]
    with pytest.raises(ValueError, match=r"edges: expected a pattern of path=True.* none"):
        layer(path=True)(x, some_pattern())
    with pytest.raises(TypeError, match="schedule: expected a Schedule or None, got 'layer'"):
        layer(schedule="layer")


def test_bad_probes() -> None:
    with pytest.raises(ValueError, match="queries: expected at least 1, got 0"):
        layer().probe(inputs(False)[0], EDGES, BATCH, queries=0)
    with pytest.raises(ValueError, match="x: expected at least one node"):
        layer().probe(inputs(False)[0][:0], EDGES[:, :0])
