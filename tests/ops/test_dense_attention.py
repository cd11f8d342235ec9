"""dense_attention against the dense formula in float64, graph by graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgraph import ops
from fastgraph.backends.dropout import dropout_factors
from fastgraph.ops.dense_attention import DENSE_ATTENTION
from fastgraph.ops.score_bias import ENTRY_TYPES
from fastgraph.plugins.backend import FLOATING
from tests.conftest import selected

# Without nodes, of one, odd ones, of one block of keys and more, of several parts backward.
BATCHES = {
    "none": [],
    "empty": [0, 0],
    "small": [3, 0, 1, 7, 16, 0],
    "blocks": [129, 1, 64, 65],
    "parts": [5, 515],
}
SEED = torch.tensor([7 << 40 | 11])
TABLE = {"bias": torch.ones(4, 1), "pair_type": torch.zeros(9, dtype=torch.uint8)}


@pytest.fixture(params=["cpu", "blocks", "reference"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each backend that has the kernel."""
    yield from selected(request.param)


def offsets(sizes: Sequence[int]) -> Tensor:
    return torch.tensor([0, *sizes]).cumsum(0)


def features(nodes: int, heads: int, channels: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(nodes, heads, channels, dtype=dtype, requires_grad=True)


def expected(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ptr: Tensor,
    key_ptr: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The output, and the logarithm of the sum of exponentials, 0 without keys."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    outs, sums, pairs = [query[:0]], [query[:0, :, 0]], 0
    key_ptr = ptr if key_ptr is None else key_ptr
    spans = zip(ptr[:-1], ptr[1:], key_ptr[:-1], key_ptr[1:], strict=True)
    for begin, end, key_begin, key_end in spans:
        q = query[begin:end].transpose(0, 1)
        k, v = (x[key_begin:key_end].transpose(0, 1) for x in (key, value))
        score = scale * (q @ k.transpose(1, 2))
        heads, rows, cols = score.shape
        if bias is not None:
            own = bias[pairs : pairs + rows * cols]
            score = score + own.view(rows, cols, heads).permute(2, 0, 1)
        keep = dropout_factors(query.new_empty(rows * cols, heads), dropout, int(SEED), pairs)
        keep = keep.view(rows, cols, heads).permute(2, 0, 1)
        outs.append(((score.softmax(-1) * keep) @ v).transpose(0, 1))
        sums.append(score.logsumexp(-1).t() if cols else q[..., 0].t() * 0)
        pairs += rows * cols
    return torch.cat(outs), torch.cat(sums)


def logsum(stats: Tensor) -> Tensor:
    """The logarithm of the sum of exponentials, 0 for none."""
    is_empty = stats[..., 1] == 0
    return stats[..., 0].detach() - torch.where(is_empty, 1, stats[..., 1]).log()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("channels", [1, 8, 19, 64])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("batch", BATCHES)
def test_values_and_gradients(
    batch: str, heads: int, channels: int, dropout: float, backend: str
) -> None:
    ptr = offsets(BATCHES[batch])
    inputs = [features(int(ptr[-1]), heads, channels) for _ in range(3)]
    out, stats = ops.dense_attention(*inputs, ptr, dropout=dropout, seed=SEED)
    truth, sums = expected(*inputs, ptr, dropout=dropout)
    torch.testing.assert_close(out, truth)
    torch.testing.assert_close(logsum(stats), sums)
    grad, of_sum = torch.randn_like(out), torch.randn_like(sums)
    for ours, theirs, grads in (
        ([out], [truth], [grad]),
        ([out, logsum(stats)], [truth, sums], [grad, of_sum]),
    ):
        found = torch.autograd.grad(ours, inputs, grads, retain_graph=True)
        wanted = torch.autograd.grad(theirs, inputs, grads, retain_graph=True, allow_unused=True)
        for gradient, exact, x in zip(found, wanted, inputs, strict=True):
            torch.testing.assert_close(gradient, torch.zeros_like(x) if exact is None else exact)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_keys_of_other_nodes(dropout: float, backend: str) -> None:
    """Queries without keys get 0, and keys without queries no gradient."""
    ptr, key_ptr = offsets([2, 3, 0, 65, 1]), offsets([140, 0, 4, 3, 1])
    query, key, value = features(71, 2, 5), features(148, 2, 5), features(148, 2, 5)
    options: dict[str, Any] = {"key_ptr": key_ptr, "dropout": dropout}
    out, stats = ops.dense_attention(query, key, value, ptr, seed=SEED, **options)
    truth, _ = expected(query, key, value, ptr, **options)
    torch.testing.assert_close(out, truth)
    assert not out[2:5].any() and not stats[2:5].any()
    grad = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad(x, (query, key, value), grad) for x in (out, truth))
    for gradient, exact in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, exact)
    assert not ours[1][140:144].any() and not ours[0][2:5].any()


def test_it_is_attention_on_complete_graphs() -> None:
    """The same weights are dropped, where edges are numbered as pairs are."""
    sizes = [3, 0, 1, 20]
    ptr = offsets(sizes)
    blocks = [torch.cartesian_prod(torch.arange(n), torch.arange(n)) for n in sizes if n]
    firsts = [int(first) for first, n in zip(ptr, sizes, strict=False) if n]
    edges = torch.cat([block + first for block, first in zip(blocks, firsts, strict=True)])
    inputs = [features(24, 2, 6) for _ in range(3)]
    options: dict[str, Any] = {"dropout": 0.5, "seed": SEED, "scale": 0.7}
    out, stats = ops.dense_attention(*inputs, ptr, **options)
    same, _, other_stats = ops.attention(*inputs, edges.t().flip(0), **options)
    torch.testing.assert_close(out, same)
    torch.testing.assert_close(stats, other_stats)


def assert_of_the_size_of_roundings(
    ours: Sequence[Tensor], theirs: Sequence[Tensor], exact: Sequence[Tensor]
) -> None:
    """No error is above twice torch's own and a few roundings of the largest value."""
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert a.dtype == b.dtype
        error, own = ((x.double() - c).abs().max() for x in (a, b))
        assert error <= 2 * own + 4 * torch.finfo(a.dtype).eps * c.abs().max()


@pytest.mark.parametrize("dtype", [d for d in FLOATING if d != torch.float64])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_errors_are_of_the_size_of_roundings(
    dtype: torch.dtype, dropout: float, backend: str
) -> None:
    ptr = offsets([30, 1, 300])
    inputs = [features(331, 2, 24, dtype) for _ in range(3)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    out, _ = ops.dense_attention(*inputs, ptr, dropout=dropout, seed=SEED)
    truth, _ = expected(*wide, ptr, dropout=dropout)
    upstream, _ = expected(*inputs, ptr, dropout=dropout)
    grad = torch.randn_like(out)
    ours = (out, *torch.autograd.grad(out, inputs, grad))
    exact = (truth, *torch.autograd.grad(truth, wide, grad.double()))
    theirs = (upstream, *torch.autograd.grad(upstream, inputs, grad))
    assert_of_the_size_of_roundings(ours, theirs, exact)


def test_strides_and_integers_of_either_size(backend: str) -> None:
    ptr = offsets([4, 9])
    projected = torch.randn(13, 3, 2, 5, dtype=torch.float64, requires_grad=True)
    strided = torch.stack([ptr, ptr], 1).int()[:, 0]
    out, _ = ops.dense_attention(*projected.unbind(1), strided)
    truth, _ = expected(*projected.unbind(1), ptr)
    torch.testing.assert_close(out, truth)
    ours, theirs = (torch.autograd.grad(x.sum(), projected)[0] for x in (out, truth))
    torch.testing.assert_close(ours, theirs)  # of a gradient of stride 0


def test_large_scores_and_what_is_no_number(backend: str) -> None:
    query, key, value = (torch.ones(8, 1, 2) for _ in range(3))
    query[0], key[1] = 1e18, 1e18
    query[3:5] = torch.tensor([float("nan"), float("inf")])[:, None, None]
    value[7] = float("inf")
    out, _ = ops.dense_attention(query, key, value, offsets([3, 2, 1, 2]))
    assert torch.equal(out[:3], torch.ones(3, 1, 2))
    assert out[3:5].isnan().all()
    assert torch.equal(out[5], torch.ones(1, 2)) and out[6:].isinf().all()


def test_every_weight_may_be_dropped(backend: str) -> None:
    inputs = [features(5, 2, 3) for _ in range(3)]
    out, _ = ops.dense_attention(*inputs, offsets([5]), dropout=1.0)
    assert not out.any()
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), inputs))


def test_a_seed_is_drawn_from_torch() -> None:
    inputs = [features(40, 1, 3) for _ in range(3)]
    torch.manual_seed(5)
    first, other = (ops.dense_attention(*inputs, offsets([40]), dropout=0.5)[0] for _ in range(2))
    torch.manual_seed(5)
    again, _ = ops.dense_attention(*inputs, offsets([40]), dropout=0.5)
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_derivatives_of_every_order(dropout: float, backend: str) -> None:
    ptr = offsets([2, 0, 3])
    inputs = [features(5, 2, 2) for _ in range(3)]

    def attend(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        out, stats = ops.dense_attention(*inputs, ptr, dropout=dropout, seed=SEED)
        return out, logsum(stats)

    assert torch.autograd.gradcheck(attend, inputs)
    assert torch.autograd.gradgradcheck(attend, inputs)


def test_only_wanted_gradients() -> None:
    query, key, value = (features(6, 2, 3) for _ in range(3))
    frozen = key.detach()
    out, _ = ops.dense_attention(query, frozen, value, offsets([2, 4]))
    truth, _ = expected(query, frozen, value, offsets([2, 4]))
    ours, theirs = (torch.autograd.grad(x.sum(), (query, value)) for x in (out, truth))
    for gradient, exact in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, exact)


def test_parts_of_the_keys_are_merged(backend: str) -> None:
    ptr = offsets([6])
    query, key, value = (features(6, 2, 3) for _ in range(3))
    halves = [
        ops.dense_attention(query, key[part], value[part], ptr, key_ptr=offsets([3]))
        for part in (slice(0, 3), slice(3, 6))
    ]
    out, _ = ops.merge(*halves[0], *halves[1])
    truth, _ = expected(query, key, value, ptr)
    torch.testing.assert_close(out, truth)
    ours, theirs = (
        torch.autograd.grad(x.square().sum(), (query, key, value)) for x in (out, truth)
    )
    for gradient, exact in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, exact)


def test_opcheck_and_compile() -> None:
    ptr = offsets([4, 5])
    inputs = [torch.randn(9, 2, 3, requires_grad=True) for _ in range(3)]
    operator = torch.ops.fastgraph.dense_attention.default
    torch.library.opcheck(operator, (*inputs, None, ptr, None, None, SEED, 0.5, 0.3, 4, 6))
    torch.library.opcheck(operator, (*inputs, None, ptr, ptr.int(), None, None, 0.5, 0.0, 0, 0))

    def step(*inputs: Tensor) -> Tensor:
        return ops.dense_attention(*inputs, ptr)[0].relu()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for ours, eager in zip(
        torch.autograd.grad(compiled(*inputs).sum(), inputs),
        torch.autograd.grad(step(*inputs).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, eager)


def test_heads_alone_are_dropped_as_among_all(backend: str) -> None:
    """Whoever has some of the heads numbers them as they are among all."""
    ptr = offsets([4, 60])
    inputs = [features(64, 5, 3) for _ in range(3)]
    table, types = features(6, 5, 1)[..., 0], torch.arange(16 + 3600) % 6
    given = ptr, None, types, SEED, 0.5, 0.4

    def own(first: int, last: int) -> list[Tensor]:
        leaves = [x.detach()[:, first:last].requires_grad_() for x in (*inputs, table)]
        out, stats = DENSE_ATTENTION(*leaves, *given, first, 0)
        return [out, stats, *torch.autograd.grad(out.sin().sum(), leaves)]

    for every, left, right in zip(own(0, 5), own(0, 2), own(2, 5), strict=True):
        torch.testing.assert_close(torch.cat([left, right], 1), every)


@pytest.mark.parametrize("before", [0, 2**32 - 100])
def test_rows_alone_are_dropped_as_among_all(backend: str, before: int) -> None:
    """Whoever has some of the queries numbers their pairs as they are among all."""
    sizes, head = torch.tensor([4, 60]), 5
    ptr, query, key, value = offsets([4, 60]), *(features(64, 3, 3) for _ in range(3))

    def own(queries: list[int], graphs: slice, first_pair: int) -> Tensor:
        rows, keys = (
            slice(queries[0], queries[-1]),
            slice(*ptr[[graphs.start, graphs.stop]].tolist()),
        )
        of_keys = offsets(sizes[graphs].tolist())
        given = torch.tensor(queries) - queries[0], of_keys, None, SEED, 0.5, 0.4, head
        return DENSE_ATTENTION(query[rows], key[keys], value[keys], None, *given, first_pair)[0]

    every = own([0, 4, 64], slice(0, 2), before)
    parts = own([0, 4, 21], slice(0, 2), before), own([21, 64], slice(1, 2), before + 16 + 17 * 60)
    torch.testing.assert_close(torch.cat(parts), every)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_threads_or_other_graphs(
    dtype: torch.dtype, restore_threads: None
) -> None:
    sizes = [700, 3, 0, 300, *range(40)]
    ptr = offsets(sizes)
    torch.manual_seed(0)
    inputs = [features(int(ptr[-1]), 3, 10, dtype) for _ in range(3)]
    grad = torch.randn_like(inputs[0])

    def run(ptr: Tensor, *tensors: Tensor, dropout: float = 0.25) -> list[Tensor]:
        *inputs, grad = tensors
        out, stats = ops.dense_attention(*inputs, ptr, dropout=dropout, seed=SEED)
        return [out, stats, *torch.autograd.grad(out, inputs, grad)]

    results = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        results.append(run(ptr, *inputs, grad))
    for first, again in zip(results[0] * 2, results[1] + results[2], strict=True):
        assert torch.equal(first, again)
    alone = [x[703:1003].detach().requires_grad_() for x in (*inputs, grad)]
    batch = run(ptr, *inputs, grad, dropout=0.0)
    for own, all_graphs in zip(run(offsets([300]), *alone, dropout=0.0), batch, strict=True):
        assert torch.equal(own, all_graphs[703:1003])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"query": torch.ones(3, 2).int()}, "query must be one of"),
        ({"query": torch.ones(3, 2)}, r"query must have shape \[nodes, heads, channels\], got"),
        ({"key": torch.ones(4, 1, 2)}, r"key must have shape \[3, 1, 2\], got \[4, 1, 2\]"),
        ({"value": torch.ones(3, 1, 3)}, r"value must have shape \[3, 1, 2\], got \[3, 1, 3\]"),
        ({"key": torch.ones(3, 1, 2).double()}, "key must have the dtype"),
        ({"ptr": torch.tensor([0.0, 3.0])}, "ptr must be int64 or int32, got torch.float32"),
        ({"ptr": torch.tensor([[0, 3]])}, r"ptr must be dense \[graphs \+ 1\], got shape \[1, 2\]"),
        ({"ptr": torch.tensor([], dtype=torch.int64)}, r"ptr must be dense \[graphs \+ 1\]"),
        ({"ptr": torch.tensor([0, 2, 1, 3])}, "ptr must not decrease, got 1 at position 2"),
        ({"ptr": torch.tensor([0, 4, 3])}, "ptr must not decrease, got 3 at position 2"),
        ({"ptr": torch.tensor([0, 2])}, r"ptr must end with 3 \(the size of query\), got 2"),
        ({"ptr": torch.tensor([0, 4])}, r"ptr must end with 3 \(the size of query\), got 4"),
        ({"ptr": torch.tensor([1, 3])}, "ptr must start with 0, got 1"),
        ({"ptr": torch.tensor([-1, 3])}, "ptr must start with 0, got -1"),
        ({"key_ptr": torch.tensor([0, 1, 3])}, "key_ptr must have as many offsets as ptr, 2, got"),
        ({"key_ptr": torch.tensor([0, 2])}, r"key_ptr must end with 3 \(the size of key\), got 2"),
        ({"key_ptr": torch.tensor([False, True])}, "key_ptr must be int64 or int32, got"),
        ({"bias": torch.ones(8, 1)}, r"bias must have shape \[9, 1\], got \[8, 1\]"),
        ({"bias": torch.ones(9, 2)}, r"bias must have shape \[pairs, 1\], got \[9, 2\]"),
        ({"bias": torch.ones(9)}, r"bias must have shape \[pairs, 1\], got \[9\]"),
        ({"bias": torch.ones(9, 1).double()}, "bias must have the dtype and device"),
        ({"pair_type": torch.zeros(9).byte()}, "pair_type must be None without bias, got a tensor"),
        (TABLE | {"pair_type": torch.zeros(9)}, "pair_type must be uint8, int16, int32 or int"),
        (TABLE | {"pair_type": torch.zeros(9).bool()}, "pair_type must be uint8, int16, int32"),
        (
            TABLE | {"pair_type": torch.zeros(8).byte()},
            r"pair_type must have shape \[9\], got \[8\]",
        ),
        (
            TABLE | {"pair_type": torch.zeros(3, 3).byte()},
            r"pair_type must be dense \[pairs\], got",
        ),
        (TABLE | {"bias": torch.ones(4, 2)}, r"bias must have shape \[types, 1\], got \[4, 2\]"),
        ({"dropout": 1.5}, r"dropout must be in \[0, 1\], got 1.5"),
        ({"dropout": 0.5, "seed": torch.tensor([1, 2])}, "seed must be a tensor of one int64"),
    ],
)
def test_bad_input(change: dict[str, Any], text: str, backend: str) -> None:
    arguments: dict[str, Any] = {name: torch.ones(3, 1, 2) for name in ("query", "key", "value")}
    with pytest.raises(ValueError, match=text):
        ops.dense_attention(**({"ptr": torch.tensor([0, 3])} | arguments | change))


@pytest.mark.parametrize("dtype", ENTRY_TYPES)
@pytest.mark.parametrize("bad", [-1, 4, 99])
def test_types_beyond_the_table(dtype: torch.dtype, bad: int, backend: str) -> None:
    inputs = [features(3, 1, 2) for _ in range(3)]
    types = torch.zeros(9, dtype=dtype)
    types[5] = bad
    table = torch.ones(4, 1, dtype=torch.float64)
    with pytest.raises(
        IndexError, match=rf"pair_type holds {int(types[5])}, expected 0 <= type < 4"
    ):
        ops.dense_attention(*inputs, offsets([3]), bias=table, pair_type=types)


class Bias:
    """A bias of all pairs of a batch, as its own numbers or as a table.

    Attributes:
        given: the arguments of the operator.
        values: what is learned.
        of_pairs: the number that each pair gets, of these values.
    """

    def __init__(self, kind: str, sizes: Tensor, heads: int, dtype: torch.dtype) -> None:
        pairs = int(sizes.sum())
        if kind == "pairs":
            self.values = torch.randn(pairs, heads, dtype=dtype, requires_grad=True)
            self.given: dict[str, Any] = {"bias": self.values}
            return
        # So many types that sums of them have lanes, or are too many for these.
        types, integer = {"few": (5, torch.uint8), "many": (9000, torch.int16)}[kind]
        self.values = torch.randn(types, heads, dtype=dtype, requires_grad=True)
        pair_type = torch.randint(0, types, (pairs,)).to(integer)
        self.given = {"bias": self.values, "pair_type": pair_type}

    @property
    def of_pairs(self) -> Tensor:
        return self.of(self.values)

    def of(self, values: Tensor) -> Tensor:
        types = self.given.get("pair_type")
        return values if types is None else values[types.long()]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("kind", ["pairs", "few", "many"])
@pytest.mark.parametrize("batch", BATCHES)
def test_a_bias(batch: str, kind: str, heads: int, dropout: float, backend: str) -> None:
    torch.manual_seed(0)
    ptr = offsets(BATCHES[batch])
    inputs = [features(int(ptr[-1]), heads, 6) for _ in range(3)]
    bias = Bias(kind, ptr.diff().square(), heads, torch.float64)
    out, stats = ops.dense_attention(*inputs, ptr, dropout=dropout, seed=SEED, **bias.given)
    truth, sums = expected(*inputs, ptr, dropout=dropout, bias=bias.of_pairs)
    torch.testing.assert_close(out, truth)
    torch.testing.assert_close(logsum(stats), sums)
    grads = [torch.randn_like(out), torch.randn_like(sums)]
    inputs.append(bias.values)
    found = torch.autograd.grad([out, logsum(stats)], inputs, grads)
    wanted = torch.autograd.grad([truth, sums], inputs, grads, materialize_grads=True)
    for gradient, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, exact)


@pytest.mark.parametrize("integer", ENTRY_TYPES)
@pytest.mark.parametrize("types", [16, 30, 60, 120, 250, 300])
def test_tables_of_any_size(types: int, integer: torch.dtype, backend: str) -> None:
    """Two, four and eight vectors hold them, in float64 as in float32, or none do.

    Of more rows than a byte can number those that it can are types.
    """
    torch.manual_seed(0)
    ptr = offsets([3, 130, 21])
    used = min(types, torch.iinfo(integer).max)
    pair_type = torch.randint(0, used, (int(ptr.diff().square().sum()),)).to(integer)
    for dtype in (torch.float64, torch.float32):
        inputs = [features(154, 5, 3, dtype) for _ in range(3)]
        inputs.append(torch.randn(types, 5, dtype=dtype, requires_grad=True))
        wide = [x.detach().double().requires_grad_() for x in inputs]
        out, _ = ops.dense_attention(*inputs[:3], ptr, bias=inputs[3], pair_type=pair_type)
        truth, _ = expected(*wide[:3], ptr, bias=wide[3][pair_type.long()])
        torch.testing.assert_close(out, truth.to(dtype))
        grad = torch.randn_like(out)
        ours = torch.autograd.grad(out, inputs, grad)
        for found, exact in zip(ours, torch.autograd.grad(truth, wide, grad.double()), strict=True):
            torch.testing.assert_close(found, exact.to(dtype), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["pairs", "few"])
@pytest.mark.parametrize("heads", [2, 4, 7, 8, 13])
def test_a_bias_of_any_number_of_heads(heads: int, kind: str, backend: str) -> None:
    """Four heads are read and written as one vector, and up to eight are computed together."""
    torch.manual_seed(0)
    ptr = offsets([3, 131, 50])
    inputs = [features(184, heads, 2) for _ in range(3)]
    bias = Bias(kind, ptr.diff().square(), heads, torch.float64)
    out, _ = ops.dense_attention(*inputs, ptr, **bias.given)
    truth, _ = expected(*inputs, ptr, bias=bias.of_pairs)
    torch.testing.assert_close(out, truth)
    inputs.append(bias.values)
    ours, theirs = (torch.autograd.grad(x.sin().sum(), inputs) for x in (out, truth))
    for gradient, exact in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, exact)


def test_a_bias_of_keys_of_other_nodes(backend: str) -> None:
    ptr, key_ptr = offsets([2, 3, 0, 65]), offsets([140, 0, 4, 3])
    inputs = [features(70, 2, 5), features(147, 2, 5), features(147, 2, 5)]
    bias = Bias("few", ptr.diff() * key_ptr.diff(), 2, torch.float64)
    out, _ = ops.dense_attention(*inputs, ptr, key_ptr=key_ptr, scale=0.3, **bias.given)
    truth, _ = expected(*inputs, ptr, key_ptr, scale=0.3, bias=bias.of_pairs)
    torch.testing.assert_close(out, truth)
    inputs.append(bias.values)
    ours, theirs = (torch.autograd.grad(x.sin().sum(), inputs) for x in (out, truth))
    for gradient, exact in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, exact)


@pytest.mark.parametrize("kind", ["pairs", "few"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_derivatives_of_every_order_with_a_bias(kind: str, dropout: float, backend: str) -> None:
    ptr = offsets([2, 0, 3])
    inputs = [features(5, 2, 2) for _ in range(3)]
    bias = Bias(kind, ptr.diff().square(), 2, torch.float64)

    def attend(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        *inputs, values = inputs
        given = bias.given | {"bias": values}
        out, stats = ops.dense_attention(*inputs, ptr, dropout=dropout, seed=SEED, **given)
        return out, logsum(stats)

    assert torch.autograd.gradcheck(attend, (*inputs, bias.values), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(attend, (*inputs, bias.values))


def test_a_bias_may_leave_queries_few_keys_or_none(backend: str) -> None:
    """As in torch's operator, a query without keys gets 0, and nothing turns NaN."""
    ptr = offsets([200])
    inputs = [features(200, 1, 4) for _ in range(3)]
    bias = torch.randn(200, 200, dtype=torch.float64)
    bias[:60, :150] = -torch.inf
    bias[7] = -torch.inf
    bias[9, 3:] = -torch.inf
    bias.requires_grad_()
    out, stats = ops.dense_attention(*inputs, ptr, bias=bias.view(-1, 1))
    by_torch = [x.transpose(0, 1)[None] for x in inputs]
    truth = torch.nn.functional.scaled_dot_product_attention(*by_torch, attn_mask=bias)
    torch.testing.assert_close(out, truth[0].transpose(0, 1))
    assert not out[7].any() and not stats[7].any()
    inputs.append(bias)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, grad)
    assert not found[3][7].any()
    wanted = torch.autograd.grad(truth[0].transpose(0, 1), inputs, grad)
    for gradient, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, exact.nan_to_num())


@pytest.mark.parametrize("dtype", [d for d in FLOATING if d != torch.float64])
def test_errors_with_a_bias_are_of_the_size_of_roundings(dtype: torch.dtype, backend: str) -> None:
    ptr = offsets([30, 1, 300])
    inputs = [features(331, 2, 24, dtype) for _ in range(3)]
    bias = Bias("few", ptr.diff().square(), 2, dtype)
    inputs.append(bias.values)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    out, _ = ops.dense_attention(*inputs[:3], ptr, **bias.given)
    truth, _ = expected(*wide[:3], ptr, bias=bias.of(wide[3]))
    upstream, _ = expected(*inputs[:3], ptr, bias=bias.of_pairs)
    grad = torch.randn_like(out)
    ours = (out, *torch.autograd.grad(out, inputs, grad))
    exact = (truth, *torch.autograd.grad(truth, wide, grad.double()))
    theirs = (upstream, *torch.autograd.grad(upstream, inputs, grad))
    assert_of_the_size_of_roundings(ours, theirs, exact)


@pytest.mark.parametrize("kind", ["pairs", "few", "many"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_the_gradient_of_a_bias_do_not_depend_on_threads(
    kind: str, dtype: torch.dtype, restore_threads: None
) -> None:
    torch.manual_seed(0)
    ptr = offsets([600, 3, 0, 30, *range(40)])
    inputs = [features(int(ptr[-1]), 2, 4, dtype) for _ in range(3)]
    bias = Bias(kind, ptr.diff().square(), 2, dtype)
    grad, results = torch.randn_like(inputs[0]), []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        out, _ = ops.dense_attention(*inputs, ptr, dropout=0.25, seed=SEED, **bias.given)
        results.append([out, *torch.autograd.grad(out, (*inputs, bias.values), grad)])
    for first, again in zip(results[0] * 2, results[1] + results[2], strict=True):
        assert torch.equal(first, again)


def test_a_bias_that_is_not_learned_has_no_gradient() -> None:
    """Nor is there one where another's is asked for alone."""
    query, key, value = (features(6, 2, 3) for _ in range(3))
    bias = torch.randn(20, 2, dtype=torch.float64)
    out, _ = ops.dense_attention(query, key, value, offsets([2, 4]), bias=bias)
    truth, _ = expected(query, key, value, offsets([2, 4]), bias=bias)
    ours, theirs = (torch.autograd.grad(x.sin().sum(), query)[0] for x in (out, truth))
    torch.testing.assert_close(ours, theirs)
    bias.requires_grad_()
    out, _ = ops.dense_attention(query, key, value, offsets([2, 4]), bias=bias)
    torch.testing.assert_close(torch.autograd.grad(out.sin().sum(), query)[0], theirs)


def test_opcheck_and_compile_with_a_bias() -> None:
    ptr = offsets([4, 5])
    inputs = [torch.randn(9, 2, 3, requires_grad=True) for _ in range(3)]
    table, own = (torch.randn(rows, 2, requires_grad=True) for rows in (3, 41))
    types = torch.randint(0, 3, (41,)).to(torch.int16)
    operator = torch.ops.fastgraph.dense_attention.default
    torch.library.opcheck(operator, (*inputs, table, ptr, None, types, SEED, 0.5, 0.3, 0, 0))
    torch.library.opcheck(operator, (*inputs, own, ptr, None, None, None, 0.5, 0.0, 0, 0))
    torch.library.opcheck(operator, (*inputs, own.detach(), ptr, None, None, None, 0.5, 0.0, 0, 0))

    def step(*inputs: Tensor) -> Tensor:
        *inputs, table = inputs
        return ops.dense_attention(*inputs, ptr, bias=table, pair_type=types)[0].relu()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    inputs.append(table)
    for ours, eager in zip(
        torch.autograd.grad(compiled(*inputs).sum(), inputs),
        torch.autograd.grad(step(*inputs).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, eager)
