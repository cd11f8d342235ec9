"""Transformers on graphs beside torch's layers, and their parts beside plain formulas."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastgraph.nn import (
    Graphormer,
    GraphTransformer,
    Schedule,
    TransformerLayer,
    dual_pattern,
)
from fastgraph.nn.graph_model import degrees

SIZES = [6, 1, 9]
NODES, GRAPHS = sum(SIZES), len(SIZES)
BATCH = torch.repeat_interleave(torch.arange(GRAPHS), torch.tensor(SIZES))
STARTS = [0, 6, 7]
EDGES = torch.tensor([[0, 1, 2, 2, 4, 7, 8, 9, 9, 15, 15], [1, 2, 0, 3, 5, 8, 9, 7, 10, 14, 14]])
IN, OUT = 5, 3


def inputs() -> Tensor:
    torch.manual_seed(2)
    return torch.randn(NODES, IN, dtype=torch.float64, requires_grad=True)


def own_edges(graph: int) -> Tensor:
    first, size = STARTS[graph], SIZES[graph]
    return EDGES[:, (EDGES[0] >= first) & (EDGES[0] < first + size)] - first


def drawn_anew(module: nn.Module) -> nn.Module:
    """Weights that show where they are missing: at first many are 0."""
    torch.manual_seed(7)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.double()


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("with_token", [False, True])
def test_a_dense_layer_is_torchs(activation: str, norm_first: bool, with_token: bool) -> None:
    options: dict[str, Any] = {"norm_first": norm_first, "activation": activation}
    theirs = nn.TransformerEncoderLayer(12, 3, 20, dropout=0.0, batch_first=True, **options)
    own = TransformerLayer(12, 3, 20, dropout=0.0, attention_dropout=0.0, **options)
    drawn_anew(theirs)
    own.double().load_state_dict(theirs.state_dict())
    x = torch.randn(7, 12, dtype=torch.float64, requires_grad=True)
    pattern = dual_pattern(EDGES[:, :4], 6 if with_token else 7, token=with_token)
    if with_token:  # which is the last of a sequence
        out = torch.cat(own(x[:6], pattern, x[6:]))  # type: ignore[arg-type]
    else:
        out, none = own(x, pattern)
        assert none is None
    truth = theirs(x[None])[0]
    torch.testing.assert_close(out, truth)
    grad = torch.randn_like(out)
    ours, exact = (torch.autograd.grad(y, x, grad) for y in (out, truth))
    torch.testing.assert_close(ours, exact)


def models(level: str, **options: Any) -> list[nn.Module]:
    own: dict[str, Any] = {"layers": 3, "heads": 2, "level": level} | options
    gt = GraphTransformer(IN, OUT, 8, **own)
    return [drawn_anew(Graphormer(IN, OUT, 8, hops=3, **own)), drawn_anew(gt)]


@pytest.mark.parametrize("level", ["node", "graph"])
@pytest.mark.parametrize("policy", ["union", "paper"])
def test_a_batch_is_its_graphs_one_by_one(policy: str, level: str) -> None:
    for model in models(level, policy=policy):
        model.eval()
        x = inputs()
        together = model(x, EDGES, BATCH)
        alone = [
            model(x[STARTS[graph] : STARTS[graph] + SIZES[graph]], own_edges(graph))
            for graph in range(GRAPHS)
        ]
        torch.testing.assert_close(together, torch.cat(alone))
        assert together.shape == (NODES if level == "node" else GRAPHS, OUT)
        more = model(x, EDGES, BATCH, GRAPHS + 2)  # two graphs without nodes
        torch.testing.assert_close(more[: len(together)], together)
        assert more.isfinite().all() and len(more) == len(together) + 2 * (level == "graph")


@pytest.mark.parametrize("level", ["node", "graph"])
def test_graphormer_reads_degrees_and_the_token(level: str) -> None:
    """A model of one layer beside its formula: embeddings, normalisation, readout."""
    model = drawn_anew(Graphormer(IN, OUT, 8, 1, 2, level=level, max_degree=2, hops=2)).eval()
    x = inputs()
    into, out_of = torch.zeros(NODES).long(), torch.zeros(NODES).long()
    for source, destination in {tuple(edge) for edge in EDGES.T.tolist()}:
        into[destination] += 1
        out_of[source] += 1
    pattern = model.pattern(EDGES, NODES, BATCH)
    assert all(map(torch.equal, degrees(pattern), (into, out_of)))
    assert int(out_of.max()) == 2 and model.max_degree == 2
    h = model.features(x) + model.in_degrees(into) + model.out_degrees(out_of)
    h, token = model.layers[0](h, pattern, model.token.expand(GRAPHS, -1))
    truth = model.out(model.norm(h if level == "node" else token))
    torch.testing.assert_close(model(x, EDGES, BATCH), truth)
    crowded = torch.tensor([[0, 1, 2, 3], [4, 4, 4, 4]])  # a degree of 4 counts as 2
    twice = torch.tensor([[0, 1], [4, 4]])
    assert degrees(model.pattern(crowded, 5))[0][4] == 4
    same = copy.deepcopy(model)
    with torch.no_grad():
        same.in_degrees.weight[2] *= 3
    assert not torch.allclose(model(x[:5], crowded), same(x[:5], crowded))
    assert not torch.allclose(model(x[:5], twice), same(x[:5], twice))


def test_initialisation_and_shared_biases() -> None:
    torch.manual_seed(0)
    model = Graphormer(40, OUT, 64, 4, 8)
    weight = model.layers[1].linear1.weight.detach()
    assert 0.95 < float(weight.std()) / (0.02 / 4**0.5) < 1.05
    assert 0.95 < float(model.in_degrees.weight.detach().std()) / 0.02 < 1.05
    assert not model.layers[2].linear2.bias.any() and bool((model.norm.weight == 1).all())
    biases = {id(layer.self_attn.type_bias) for layer in model.layers}
    assert len(biases) == 1 and model.layers[0].self_attn.type_bias.any()
    other = Graphormer(40, OUT, 64, 4, 8)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.layers[3].self_attn.type_bias, model.layers[0].self_attn.type_bias)
    assert len({id(layer.self_attn.type_bias) for layer in copy.deepcopy(model).layers}) == 1


@pytest.mark.parametrize(
    ("make", "channels", "layers", "heads", "wide"),
    [
        (Graphormer.slim, 64, 4, 8, 64),
        (Graphormer.large, 768, 12, 32, 768),
        (Graphormer.zinc, 80, 12, 8, 80),
        (GraphTransformer, 128, 4, 8, 256),
    ],
)
def test_presets(make: Any, channels: int, layers: int, heads: int, wide: int) -> None:
    with torch.device("meta"):
        model = make(IN, OUT)
    layer = model.layers[-1]
    found = (layer.self_attn.channels, len(model.layers), layer.self_attn.heads)
    assert found == (channels, layers, heads) and layer.linear1.out_features == wide
    assert layer.norm_first == isinstance(layer.activation, nn.GELU) == hasattr(model, "token")


def test_signs_of_positions() -> None:
    model = drawn_anew(
        GraphTransformer(IN, OUT, 8, 2, 2, position_channels=1, dropout=0, attention_dropout=0)
    )
    x, positions = inputs(), torch.randn(NODES, 1).double()
    truths = [model.eval()(x, EDGES, BATCH, positions=sign * positions) for sign in (1, -1)]
    torch.manual_seed(0)
    found = set()
    for _ in range(12):
        out = model.train()(x, EDGES, BATCH, positions=positions)
        found.add([torch.allclose(out, truth) for truth in truths].index(True))
    assert found == {0, 1}


def test_training_with_checkpoints_and_turns_by_step() -> None:
    """Layers that are computed again in backward passes give the same gradients."""
    schedule = Schedule("step", 2, evaluation="sparse")
    for model in models("node", schedule=schedule, dropout=0.3, attention_dropout=0.3):
        for _ in range(2):
            grads = []
            for is_kept in (True, False):
                torch.manual_seed(1)
                x = inputs()
                call = (
                    model
                    if is_kept
                    else lambda *given, m=model: checkpoint(m, *given, use_reentrant=False)
                )
                out = call(x, EDGES, BATCH)
                grads.append(torch.autograd.grad(out.square().sum(), x)[0])
            assert torch.equal(*grads)
            schedule.step()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: Graphormer(IN, OUT, level="edge"),
            "level: expected one of 'node', 'graph', got 'edge'",
        ),
        (lambda: GraphTransformer(IN, OUT, level="edge"), "level: expected one of 'node', 'graph'"),
        (lambda: Graphormer(IN, OUT, layers=0), "layers: expected an integer.* got 0"),
        (
            lambda: GraphTransformer(IN, OUT, layers=0),
            "layers: expected an integer.* got 0",
        ),
        (
            lambda: Graphormer(IN, OUT, max_degree=0),
            "max_degree: expected an integer.* or None",
        ),
        (lambda: Graphormer(IN, OUT, heads=7), "channels: expected a multiple of heads, 7, got 64"),
        (
            lambda: layer(activation="tanh"),
            "activation: expected one of 'relu', 'gelu'",
        ),
    ],
)
def test_bad_options(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def layer(**options: Any) -> TransformerLayer:
    given: dict[str, Any] = {"norm_first": True, "dropout": 0.0, "attention_dropout": 0.0}
    return TransformerLayer(8, 2, 8, **(given | options))


def test_bad_input() -> None:
    x, positions = inputs().float(), torch.zeros(NODES, 2)
    plain, placed = GraphTransformer(IN, OUT), GraphTransformer(IN, OUT, position_channels=2)
    with pytest.raises(ValueError, match="positions: expected None without position_channels"):
        plain(x, EDGES, positions=positions)
    for given, got in ((None, "None"), (positions[:3], r"\[3, 2\]")):
        with pytest.raises(ValueError, match=rf"positions: expected \[16, 2\], got {got}"):
            placed(x, EDGES, positions=given)
    with pytest.raises(ValueError, match="token: expected None, as the pattern has, got tokens"):
        Graphormer.slim(IN, OUT)(x, dual_pattern(EDGES, NODES))
    with pytest.raises(ValueError, match="num_graphs: expected at least 3, as batch has, got 2"):
        plain(x, EDGES, BATCH, 2)


@pytest.mark.parametrize("make", [Graphormer.slim, GraphTransformer])
def test_a_pattern_has_the_batch(make: Any) -> None:
    model, x = make(IN, OUT), inputs().float()
    pattern = model.layers[0].self_attn.pattern(
        EDGES, NODES, BATCH, token=isinstance(model, Graphormer)
    )
    for name, value, got in (("batch", BATCH, "a tensor"), ("num_graphs", GRAPHS, GRAPHS)):
        with pytest.raises(ValueError, match=f"{name}: expected None beside a pattern.* {got}"):
            model(x, pattern, **{name: value})


def test_parameters_are_drawn_anew() -> None:
    model = GraphTransformer(IN, OUT, position_channels=2, type_bias=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    model.reset_parameters()
    assert not any(bool((parameter == 7).any()) for parameter in model.parameters())
    assert bool((model.layers[3].norm2.weight == 1).all())
