"""LargeGT beside equations 3 to 6 with whole matrices in float64, and beside its release."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastgraph.nn import LargeGT
from fastgraph.nn.batch_norm import BatchNorm

NODES, IN, HIDDEN, OUT, HEADS, CENTROIDS, POSITION, K = 50, 5, 8, 3, 2, 6, 4, 3
MODULES, VARIANTS = ("local", "global", "full"), ("paper", "release")


def make(module: str = "full", variant: str = "paper", **options: Any) -> LargeGT:
    torch.manual_seed(0)
    sizes = {"heads": HEADS, "num_centroids": CENTROIDS, "position_channels": POSITION}
    plain = {"dropout": 0.0, "encoder_dropout": 0.0}
    given = {"module": module, "variant": variant, **sizes, **plain, **options}
    return LargeGT(IN, HIDDEN, OUT, NODES, **given).double()


def batch(rows: int = 12, seed: int = 1, tokens: int = 3 * K) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = {"generator": generator, "dtype": torch.float64}
    n_id = torch.randperm(NODES, generator=generator)[:rows]
    return torch.randn(rows, tokens, IN, **drawn), torch.randn(rows, POSITION, **drawn), n_id


class Dense:
    """The model as functions of a ``state_dict``, a row and a head at a time."""

    def __init__(self, parameters: dict[str, Tensor], norm: str, training: bool) -> None:
        self.parameters, self.norm_kind, self.training = parameters, norm, training

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.parameters[f"{name}.weight"].T + self.parameters[f"{name}.bias"]

    def layer_norm(self, name: str, x: Tensor) -> Tensor:
        off = x - x.mean(-1, keepdim=True)
        scaled = off / (off.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * self.parameters[f"{name}.weight"] + self.parameters[f"{name}.bias"]

    def norm(self, name: str, x: Tensor) -> Tensor:
        if self.norm_kind == "layer":
            return self.layer_norm(name, x)
        mean, variance = x.mean(0), x.var(0, correction=0)
        if not self.training:
            mean = self.parameters[f"{name}.running_mean"]
            variance = self.parameters[f"{name}.running_var"]
        scaled = (x - mean) / (variance + 1e-5).sqrt()
        return scaled * self.parameters[f"{name}.weight"] + self.parameters[f"{name}.bias"]

    def mlp(self, name: str, x: Tensor) -> Tensor:
        return self.linear(f"{name}.2", self.linear(f"{name}.0", x).relu())

    def attention(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float = 0.0) -> Tensor:
        heads = []
        width = q.shape[1] // HEADS
        for head in range(HEADS):
            part = slice(head * width, (head + 1) * width)
            scores = q[:, part] @ k[:, part].T / math.sqrt(width) + bias
            heads.append(scores.softmax(1) @ v[:, part])
        return torch.cat(heads, 1)

    def readout(self, name: str, x: Tensor) -> Tensor:
        pairs = torch.cat([x[:1].expand(len(x) - 1, -1), x[1:]], 1)
        return x[0] + (self.linear(name, pairs).softmax(0) * x[1:]).sum(0)

    def over_centroids(self, names: dict[str, str], x: Tensor, counts: Tensor) -> Tensor:
        rows = self.parameters[names["rows"]]
        q, k = self.linear(names["query"], x), self.linear(names["key"], rows)
        v = self.linear(names["value"], rows[:, :POSITION])
        return self.attention(q, k, v, counts.double().log())


class DensePaper(Dense):
    def encoder(self, x: Tensor) -> Tensor:
        place = "local_module.layers.0"
        y = self.layer_norm(f"{place}.attention_norm", x)
        q, k, v = self.linear(f"{place}.query_key_value", y).split(HIDDEN, 1)
        x = x + self.linear(f"{place}.out", self.attention(q, k, v))
        y = self.linear(f"{place}.ffn.1", self.layer_norm(f"{place}.ffn.0", x))
        return x + self.linear(f"{place}.ffn.3", nn.functional.gelu(y))

    def __call__(self, module: str, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.linear("projection", tokens)
        h, parts = x[:, 0], []
        if module != "global":
            encoded = [self.layer_norm("local_module.norm", self.encoder(row)) for row in x]
            parts.append(
                torch.stack([self.readout("local_module.readout.score", e) for e in encoded])
            )
        if module != "local":
            place = "global_module"
            names = {name: f"{place}.{name}" for name in ("query", "key", "value")}
            names["rows"] = f"{place}.codebook.rows"
            both = torch.cat([self.mlp(f"{place}.features", h), positions], 1)
            counts = self.parameters[f"{place}.codebook.counts"]
            parts.append(self.mlp(f"{place}.out", self.over_centroids(names, both, counts)))
        hidden = self.linear("ffn.0", torch.cat(parts, 1)).relu()
        return self.linear("head", h + self.norm("norm", self.linear("ffn.3", hidden)))


class DenseRelease(Dense):
    """With the names of the release."""

    def encoder(self, x: Tensor) -> Tensor:
        place = "convs.0.local_module.layers.0"
        y = self.layer_norm(f"{place}.self_attention_norm", x)
        q, k, v = (self.linear(f"{place}.self_attention.linear_{name}", y) for name in "qkv")
        found = self.linear(f"{place}.self_attention.output_layer", self.attention(q, k, v))
        return self.linear(f"{place}.res_proj", x) + found

    def __call__(self, module: str, tokens: Tensor, positions: Tensor) -> Tensor:
        parts, place = [], "convs.0.local_module"
        if module != "global":
            hidden = self.linear("fc_in_seq.0", tokens).relu()
            x = self.linear(f"{place}.att_embeddings_nope", self.linear("fc_in_seq.3", hidden))
            encoded = [self.layer_norm(f"{place}.final_ln", self.encoder(row)) for row in x]
            parts.append(torch.stack([self.readout(f"{place}.attn_layer", e) for e in encoded]))
        if module != "local":
            hidden = self.norm("fc_in.1", self.linear("fc_in.0", tokens[:, 0])).relu()
            features = self.linear("convs.0.lin_proj_g", self.linear("fc_in.4", hidden))
            names = {name: f"convs.0.lin_{name}_g" for name in ("query", "key", "value")}
            names["rows"] = "convs.0.vq._embedding_output"
            counts = torch.bincount(self.parameters["convs.0.c_idx"].int(), minlength=CENTROIDS)
            both = torch.cat([features, positions], 1)
            parts.append(self.over_centroids(names, both, counts))
        out = self.norm("ffs.0.1", self.linear("ffs.0.0", torch.cat(parts, 1))).relu()
        return self.linear("fc_out", self.norm("ffs.0.5", self.linear("ffs.0.4", out)).relu())


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_the_equations_of_the_paper(module: str, norm: str) -> None:
    """Values and gradients of operands and parameters, training, with centroids that have nodes."""
    model = make(module, norm=norm)
    model(*batch(seed=2))
    tokens, positions, n_id = batch()
    parameters = {name: value.detach().clone() for name, value in model.state_dict().items()
                  if isinstance(value, Tensor)}  # fmt: skip
    leaves = {name: parameters[name].requires_grad_() for name, _ in model.named_parameters()}
    for operand in (tokens, positions):
        operand.requires_grad_()
    expected = DensePaper(parameters, norm, training=True)(module, tokens, positions)
    out = model(tokens, positions, n_id)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    grad = torch.randn_like(out)
    operands = [tokens] if module == "local" else [tokens, positions]
    found = torch.autograd.grad(out, [*operands, *model.parameters()], grad)
    wanted = torch.autograd.grad(expected, [*operands, *leaves.values()], grad)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)
    model.eval()
    trained = {**parameters, **dict(model.named_buffers())}
    expected = DensePaper(trained, norm, training=False)(module, tokens, positions)
    torch.testing.assert_close(model(tokens, positions), expected)


def release_state(module: str) -> dict[str, Tensor]:
    """A ``state_dict`` with all names, shapes and dtypes of the release, and random values."""
    wide, both, half = HEADS * HIDDEN, 2 * POSITION, POSITION
    place, attention = "convs.0.local_module", "convs.0.local_module.layers.0.self_attention"
    linear = {
        **{"fc_in.0": (HIDDEN, IN), "fc_in.4": (HIDDEN, HIDDEN)},
        **{"fc_in_seq.0": (HIDDEN, IN), "fc_in_seq.3": (HIDDEN, HIDDEN)},
        **{f"convs.0.lin_{name}": (wide, HIDDEN) for name in ("key", "query", "value", "skip")},
        f"{place}.att_embeddings_nope": (HIDDEN, HIDDEN),
        f"{place}.layers.0.res_proj": (wide, HIDDEN),
        **{f"{attention}.linear_{name}": (wide, HIDDEN) for name in "qkv"},
        f"{attention}.output_layer": (wide, wide),
        f"{place}.out_proj": (HIDDEN, wide),
        f"{place}.attn_layer": (1, 2 * wide),
        "ffs.0.0": (wide, 2 * wide if module == "full" else wide),
        **{"ffs.0.4": (HIDDEN, wide), "fc_out": (OUT, HIDDEN)},
    }
    if module != "local":
        linear |= {"convs.0.lin_proj_g": (half, HIDDEN), "convs.0.lin_value_g": (wide, half)}
        linear |= {f"convs.0.lin_{name}_g": (wide, both) for name in ("key", "query")}
    norms = {"fc_in.1": HIDDEN, "ffs.0.1": wide, "ffs.0.5": HIDDEN}
    plain = {f"{place}.layers.0.self_attention_norm": HIDDEN, f"{place}.final_ln": wide}
    draw = torch.Generator().manual_seed(5)
    state = {}
    for name, shape in linear.items():
        state[f"{name}.weight"] = torch.randn(shape, generator=draw) / shape[1] ** 0.5
        state[f"{name}.bias"] = torch.randn(shape[0], generator=draw)
    for name, channels in (norms | plain).items():
        state[f"{name}.weight"] = torch.rand(channels, generator=draw) + 0.5
        state[f"{name}.bias"] = torch.randn(channels, generator=draw)
    batch_norms = dict(norms)
    if module != "local":
        batch_norms["convs.0.vq.bn"] = both
        for name in ("_embedding", "_embedding_output", "_ema_w"):
            state[f"convs.0.vq.{name}"] = torch.randn(CENTROIDS, both, generator=draw)
        state["convs.0.vq._ema_cluster_size"] = torch.rand(CENTROIDS, generator=draw)
        # Not all centroids have nodes.
        indices = torch.randint(1, CENTROIDS, (NODES,), generator=draw)
        state["convs.0.c_idx"] = indices.to(torch.int16)
    for name, channels in batch_norms.items():
        state[f"{name}.running_mean"] = torch.randn(channels, generator=draw)
        state[f"{name}.running_var"] = torch.rand(channels, generator=draw) + 0.5
        state[f"{name}.num_batches_tracked"] = torch.tensor(7)
    return state


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_state_dict_of_the_release(module: str, prefix: str) -> None:
    model = make(module, "release").float()
    holder = nn.ModuleDict({"module": model}) if prefix else model
    state = release_state(module)
    holder.load_state_dict({prefix + name: value for name, value in state.items()})
    tokens, positions, n_id = batch()
    double = {name: value.double() if value.is_floating_point() else value
              for name, value in state.items()}  # fmt: skip
    for training in (False, True):
        model.train(training)
        expected = DenseRelease(double, "batch", training)(module, tokens, positions)
        out = model(tokens.float(), positions.float(), n_id)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-5)


def test_a_state_dict_of_the_release_must_fit() -> None:
    state = release_state("full")
    del state["convs.0.lin_key_g.bias"]
    state["convs.0.nobody"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"global_module\.key\.bias[\s\S]*convs\.0\.nobody"):
        make("full", "release").load_state_dict(state)
    with pytest.raises(ValueError, match="state_dict: expected assignments of 50 nodes, got 49"):
        make("full", "release").load_state_dict(
            {**release_state("full"), "convs.0.c_idx": torch.zeros(49, dtype=torch.int16)}
        )


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_is_used_with_any_number_of_rows(module: str, variant: str) -> None:
    model = make(module, variant, dropout=0.5)
    for step, (rows, tokens) in enumerate([(12, 9), (1, 9), (0, 9), (5, 3), (5, 1), (1, 1)]):
        model.zero_grad()
        out = model(*batch(rows, step, tokens))
        assert out.shape == (rows, OUT)
        out.sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), name
    assert all(bool(value.isfinite().all()) for value in model.buffers())


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_that_was_not_trained_yet(variant: str) -> None:
    tokens, positions, _ = batch()
    assert bool(make(variant=variant).eval()(tokens, positions).isfinite().all())


def test_one_row_is_normalised_by_the_running_statistics() -> None:
    norm, x = BatchNorm(3).double(), torch.randn(9, 3, dtype=torch.float64)
    norm(x)
    state = copy.deepcopy(norm.state_dict())
    torch.testing.assert_close(norm(x[:1]), norm.eval()(x[:1]))
    assert all(torch.equal(value, state[name]) for name, value in norm.state_dict().items())


def test_tokens_of_another_dtype_and_strides() -> None:
    model = make().eval()
    tokens, positions, _ = batch()
    rounded = tokens.bfloat16()
    apart = rounded.transpose(0, 1).contiguous().transpose(0, 1)
    expected = model(rounded.double(), positions)
    assert torch.equal(model(rounded, positions), expected)
    torch.testing.assert_close(model(apart, positions.T.contiguous().T), expected)
    torch.testing.assert_close(make("global").eval()(tokens[:, 0], positions),
                               make("global").eval()(tokens, positions))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("module", ["local", "global", "full"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_half_precision_is_finite_or_refused(
    variant: str, module: str, autocast: bool, dtype: torch.dtype
) -> None:
    model = make(module, variant).float() if autocast else make(module, variant).to(dtype)
    tokens, positions, n_id = batch()
    given = (tokens.float(), positions.float(), n_id)
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        if variant == "release" and module != "local" and dtype == torch.float16:
            # The authors' code ends in a product of two dtypes.
            for mode in (True, False):
                with pytest.raises(ValueError, match=r'variant: expected "paper" in float16'):
                    model.train(mode)(*given)
            return
        for _ in range(4):
            out = model(*given)
            out.float().square().mean().backward()
            assert bool(out.isfinite().all())
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_but_the_first_have_no_place(variant: str) -> None:
    """A token does not say how far its node is from the seed, unless its channels do."""
    model = make("local", variant).eval()
    tokens, _, _ = batch(tokens=9)
    order = torch.tensor([0, 5, 3, 8, 1, 7, 2, 6, 4])
    torch.testing.assert_close(model(tokens[:, order]), model(tokens))
    swapped = tokens[:, [1, 0, *range(2, 9)]]
    assert float((model(swapped) - model(tokens)).detach().abs().min()) > 1e-6


@pytest.mark.parametrize("variant", VARIANTS)
def test_scores_of_pairs_of_tokens_are_not_kept(variant: str) -> None:
    model, kept = make("local", variant).float(), []
    tokens = torch.randn(4, 120, IN)
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x.numel()) or x, lambda x: x
    )
    with hooks:
        model(tokens)
    assert max(kept) < 4 * HEADS * 120 * 120


def test_compiled_and_for_a_batch_of_batches() -> None:
    model, tokens = make("local").eval(), torch.stack([batch(seed=seed)[0] for seed in (1, 2)])
    expected = torch.stack([model(each) for each in tokens])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens[0]), expected[0])
    torch.testing.assert_close(torch.func.vmap(model)(tokens), expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_goes_on_from_a_state_dict(variant: str) -> None:
    first, second = make(variant=variant), make(variant=variant)
    for step in range(3):
        first(*batch(seed=step))
    second.load_state_dict(first.full_state_dict())
    third = copy.deepcopy(first)
    for model in (first, second, third):
        for step in range(3, 6):
            model(*batch(seed=step))
    for other in (second, third):
        for name, value in first.state_dict().items():
            same = other.state_dict()[name]
            if isinstance(value, Tensor):
                assert torch.equal(value, same), name
            else:
                assert torch.equal(value["assigned"], same["assigned"])


BAD_MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "module": ({"module": "both"}, "module: expected one of 'local', 'global', 'full', got 'both'"),
    "variant": ({"variant": "v2"}, "variant: expected one of 'paper', 'release', got 'v2'"),
    "norm": ({"norm": "none"}, "norm: expected one of 'batch', 'layer', got 'none'"),
    "heads": ({"heads": 3}, r"hidden_channels: expected a multiple of heads \(3\), got 8"),
    "no heads": ({"heads": 0}, "heads: expected an integer of at least 1, got 0"),
    "centroids": ({"num_centroids": 0}, "num_centroids: expected an integer of at least 1, got 0"),
    "layers": ({"variant": "release", "num_layers": 2}, "num_layers: expected 1 with"),
    "decay of one": ({"decay": 1.0}, "decay: expected a rate from 0 to below 1, got 1.0"),
    "decay": ({"decay": -0.5}, "decay: expected a rate from 0 to below 1, got -0.5"),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_models_that_cannot_be(name: str) -> None:
    options, message = BAD_MODELS[name]
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_the_codebook_needs_the_number_of_nodes() -> None:
    with pytest.raises(ValueError, match=r"num_nodes: expected an integer.* got None"):
        LargeGT(IN, HIDDEN, OUT)
    with pytest.raises(ValueError, match="num_nodes: expected an integer of at least 1, got 0"):
        LargeGT(IN, HIDDEN, OUT, 0)
    with pytest.raises(ValueError, match=r"hidden_channels: expected an integer .* got 8\.0"):
        LargeGT(IN, 8.0, OUT, 5)  # type: ignore[arg-type]
    LargeGT(IN, HIDDEN, OUT, module="local")


BAD_CALLS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "two": ({"tokens": torch.zeros(12, IN)}, ValueError, r"tokens: expected \[M, 3K, 5\]"),
    "channels": ({"tokens": torch.zeros(12, 9, 4)}, ValueError, r"got \[12, 9, 4\]"),
    "no tokens": ({"tokens": torch.zeros(12, 0, IN)}, ValueError, r"got \[12, 0, 5\]"),
    "int": ({"tokens": torch.zeros(12, 9, IN).int()}, ValueError, "expected a floating dtype"),
    "positions": ({"positions": None}, ValueError, r"positions: expected \[12, 4\], got None"),
    "rows": ({"positions": torch.zeros(11, 4)}, ValueError, r"expected \[12, 4\], got \[11, 4\]"),
    "n_id": ({"n_id": None}, ValueError, r"n_id: expected \[12\] in training mode, got None"),
    "ids": ({"n_id": torch.arange(11)}, ValueError, r"n_id: expected \[12\].*got \[11\]"),
    "float": ({"n_id": torch.zeros(12)}, TypeError, "n_id: expected int64, got torch.float32"),
    "below": (
        {"n_id": torch.arange(12) - 1},
        IndexError,
        "n_id: expected nodes of 0 to 49, got -1",
    ),
    "above": ({"n_id": torch.arange(12) + 39}, IndexError, "nodes of 0 to 49, got 50"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_calls_that_cannot_be(name: str, variant: str) -> None:
    changes, error, message = BAD_CALLS[name]
    model = make(variant=variant)
    tokens, positions, n_id = batch()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        model(**{"tokens": tokens, "positions": positions, "n_id": n_id, **changes})
    for key, value in model.state_dict().items():
        assert not isinstance(value, Tensor) or torch.equal(value, before[key])
