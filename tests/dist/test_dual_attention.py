"""Attention that takes turns on sharded tensors, in every mode, beside one process."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data

import fastgraph.dist as fgd
from fastgraph import ops
from fastgraph.dist.graphs import partition
from fastgraph.dist.operators.modes import BY_NAME
from fastgraph.dist.ranks.world import WORLD
from fastgraph.nn import (
    DualInterleavedAttention,
    Graphormer,
    GraphTransformer,
    Reformation,
    Schedule,
    clusters,
    dual_pattern,
)
from fastgraph.transforms.cluster_order import ORIGINAL, ClusterOrder
from tests.dist.graphs import NUM_EDGES, NUM_NODES, PARTITIONS
from tests.dist.test_fused import difference

SEED = torch.tensor([11])
CHANNELS, HEADS = 8, 4
SIZES = 25, 1, NUM_NODES - 26
TYPES = (torch.arange(NUM_EDGES) % 5).to(torch.uint8)


class Case(NamedTuple):
    """A module, and a call of it that is given a graph."""

    make: Callable[[], nn.Module]
    call: Callable[[Any, Any], Tensor]


def graphs() -> Data:
    """Three graphs, one of a single node, with duplicates and loops."""
    g = torch.Generator().manual_seed(0)
    size = torch.tensor(SIZES)
    batch = torch.arange(3).repeat_interleave(size)
    source = torch.randint(NUM_NODES, (NUM_EDGES,), generator=g)
    first = (size.cumsum(0) - size)[batch[source]]
    target = first + (torch.rand(NUM_EDGES, generator=g) * size[batch[source]]).long()
    return Data(
        x=torch.randn(NUM_NODES, CHANNELS, generator=g),
        edge_index=torch.stack([source, target]),
        batch=batch,
    )


def operator(call: Callable[..., Tensor]) -> Case:
    """A call that takes queries, keys and values, and a table of biases."""

    def prepared(model: nn.Linear, d: Any) -> Tensor:
        query, key, value = model(d.x).view(-1, 3, HEADS, 2).unbind(1)
        return call(query, key, value, model.weight[:5, :HEADS])

    return Case(lambda: nn.Linear(CHANNELS, 3 * CHANNELS), prepared)


def by_groups(numbers: bool, kernel: Any = ops.attention, **options: Any) -> Case:
    """Edges by groups, which may be in another order than their numbers."""

    def call(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Tensor:
        out, *_, stats = kernel(query, key, value, INDEX[numbers], **given, bias=table, **options)
        return out + stats.square().mean()

    given = {"ptr": PTR, "bias_index": TYPES}
    return operator(call)


def groups() -> tuple[dict[bool, Tensor], Tensor]:
    source, target = graphs().edge_index
    order = target.argsort(stable=True)
    ptr = torch.cat([torch.zeros(1), torch.bincount(target, minlength=NUM_NODES).cumsum(0)])
    return {False: source[order], True: torch.stack([source[order], order])}, ptr.long()


INDEX, PTR = groups()


def dense(**options: Any) -> Case:
    """Attention within graphs of other sizes than those of edges, with keys of other ones."""

    def call(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Tensor:
        ptr, key_ptr = torch.tensor([0, 9, 9, NUM_NODES]), torch.tensor([0, 5, 40, NUM_NODES])
        types = torch.arange(int((ptr.diff() * key_ptr.diff()).sum())) % 5
        given = {"key_ptr": key_ptr, "bias": table, "pair_type": types}
        out, stats = ops.dense_attention(query, key, value, ptr, **given, **options)
        return out + stats[..., 1].square().mean()

    return operator(call)


class Turns(nn.Module):
    """Two layers with a token for each graph."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        options = {"layers": 2, "type_bias": True, "hops": 2, "dropout": 0.3} | options
        self.layers = nn.ModuleList(
            DualInterleavedAttention(CHANNELS, HEADS, layer=i, **options) for i in range(2)
        )
        for layer in self.layers:
            nn.init.normal_(layer.type_bias)
        self.token = nn.Parameter(torch.randn(3, CHANNELS))

    def forward(self, d: Any) -> Tensor:
        x, token = d.x, self.token
        for layer in self.layers:
            near, far = layer(x, d.edge_index, d.batch, token)
            x, token = x + near, token + far
        return torch.cat([x, token])


def turns(**options: Any) -> Case:
    return Case(lambda: Turns(**options), lambda model, d: model(d))


def reformed(select: str, **options: Any) -> Case:

    def make() -> nn.Module:
        of_nodes = torch.arange(NUM_NODES) // 20
        how = Reformation(select, clusters=of_nodes, block=4, **options)
        sparse = Schedule("layer", None)
        return DualInterleavedAttention(
            CHANNELS, HEADS, reformation=how, schedule=sparse, type_bias=True, dropout=0.2
        )

    def call(model: Any, d: Any) -> Tensor:
        pattern = dual_pattern(d.edge_index, NUM_NODES)
        if select == "mass":
            with model.reformation.measuring():
                model(d.x, pattern)
        found = model.report(pattern).reformation
        assert ("0 dropped" in found) == (select == "exact"), found
        return model(d.x, pattern)

    return Case(make, call)


def alone(**options: Any) -> Case:
    """A single head, of which ranks compute rows."""

    def call(model: nn.Linear, d: Any) -> Tensor:
        given, ptr = model(d.x).view(-1, 3, 1, 8).unbind(1), torch.tensor([0, 9, 9, NUM_NODES])
        bias = {"bias": model.weight[:5, :1]} if "pair_type" in options else {}
        out, stats = ops.dense_attention(*given, ptr, **options, **bias)
        return out + stats[..., 1:].square().mean()

    return Case(lambda: nn.Linear(CHANNELS, 3 * CHANNELS), call)


def multihead(model: nn.Module, d: Any) -> Tensor:
    """As ranks compute it by rows, beside the operator on one process."""
    before, WORLD.random = WORLD.random, "rows"
    if fgd.is_sharded(d.x):
        out, _ = model(d.x, d.x, d.x, need_weights=False)
    else:
        projected = F.linear(d.x, model.in_proj_weight, model.in_proj_bias)
        by_head = projected.view(-1, 3, HEADS, 2).unbind(1)
        ptr = torch.tensor([0, NUM_NODES])
        out = model.out_proj(ops.dense_attention(*by_head, ptr, dropout=0.3)[0].flatten(1))
    WORLD.random = before
    return out


def wide_values(model: nn.Module, d: Any) -> Tensor:
    """With numbers as ranks draw them by rows, and so little dropout that all weights stay."""
    before, WORLD.random = WORLD.random, "rows"
    x = model(d.x).view(-1, HEADS, 2).transpose(0, 1)
    out = F.scaled_dot_product_attention(x, x, torch.cat([x, x.sin()], -1), dropout_p=1e-15)
    WORLD.random = before
    return out


def probed(model: nn.Module, d: Any) -> Tensor:
    found = model.probe(d.x, d.edge_index, d.batch, queries=9)
    return model(d.x, d.edge_index, d.batch) * (found.mass + found.largest_mass + found.error)


OPERATORS = {
    "groups": by_groups(False),
    "numbered groups": by_groups(True),
    "groups, blocks": by_groups(False, ops.block_attention),
    "groups, turned round": by_groups(False, transpose=True),
    "a seed": by_groups(False, dropout=0.4, seed=SEED),
    "a seed, numbered groups": by_groups(True, dropout=0.4, seed=SEED),
    "dense": dense(),
    "dense, a seed": dense(dropout=0.4, seed=SEED),
    "dense, dropout": dense(dropout=0.4),
    "dense, one head": alone(dropout=0.4),
    "dense, one head, other keys": alone(key_ptr=torch.tensor([0, 30, 41, NUM_NODES])),
    "dense, one head, types": alone(pair_type=torch.arange(81 + 51 * 51) % 5),
    "dense, a seed, one head": alone(dropout=0.4, seed=SEED),
    "multihead": Case(lambda: nn.MultiheadAttention(CHANNELS, HEADS, dropout=0.3), multihead),
    "values of more channels": Case(lambda: nn.Linear(CHANNELS, CHANNELS), wide_values),
}
MODULES = {
    "dense and sparse": turns(),
    "sparse": turns(schedule=Schedule("layer", None), path=True),
    "dense alone": turns(schedule=Schedule("layer", 1)),
    "by conditions": turns(policy="paper"),
    "reformed": reformed("indolent"),
    "reformed, blocks": Case(
        lambda: reformed("indolent", kernel="blocks").make().eval(), reformed("indolent").call
    ),
    "reformed, exact": reformed("exact"),
    "reformed, mass": reformed("mass", mass=0.7),
    "probe": Case(
        lambda: DualInterleavedAttention(CHANNELS, HEADS, type_bias=True, dropout=0.3), probed
    ),
    "Graphormer": Case(
        lambda: Graphormer(CHANNELS, 3, CHANNELS, 2, HEADS, hops=2, attention_dropout=0.3),
        lambda model, d: model(d.x, d.edge_index, d.batch),
    ),
    "GraphTransformer": Case(
        lambda: GraphTransformer(CHANNELS, 3, CHANNELS, 2, HEADS, attention_dropout=0.3),
        lambda model, d: model(d.x, d.edge_index, d.batch),
    ),
}
CASES = OPERATORS | MODULES
ORDER = torch.randperm(NUM_NODES, generator=torch.Generator().manual_seed(2))
GATHERS = {"dense, one head, types": {"fastgraph::dense_attention": 1}}
BOTH_STATS = "probe, uneven, heads"  # those by heads and those by rows meet
# One of each kind: along edges, of all pairs, and in turns with tokens.
IN_ALL_LAYOUTS = {
    "a seed, numbered groups",
    "dense, a seed",
    "dense, a seed, one head",
    "dense and sparse",
}
KEYS = [
    f"{name}, {layout}, {mode}"
    for name, layout, mode in itertools.product(CASES, PARTITIONS, BY_NAME)
    if layout == "uneven" or name in IN_ALL_LAYOUTS
]


def outcome(case: Case, data: Data) -> list[Tensor | None]:
    """The result, then the gradients of parameters and features."""
    torch.manual_seed(3)
    model = case.make()
    data.x.requires_grad_()
    out = case.call(model, data)
    (out * out.cos()).sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters()), data.x.grad]


class Found(NamedTuple):
    """How far a case is off or what was raised, and what the second call has gathered."""

    error: str
    gathers: dict[str, int]


def compared(case: Case, shard: Callable[[Data], Data]) -> Found:
    expected = outcome(case, graphs())
    data = shard(graphs())
    try:
        found = outcome(case, data)
        error = difference(expected, [fgd.whole(x) for x in found])
        fgd.COUNTS.reset()
        outcome(case, data)
    except Exception:
        return Found(traceback.format_exc(), {})
    return Found(error, dict(fgd.COUNTS.gathers))


def types_of_this_rank() -> list[int]:
    """The pairs whose types a rank keeps of a dense turn, and all pairs."""
    data = fgd.shard(graphs(), method="even")
    layer = DualInterleavedAttention(CHANNELS, HEADS, type_bias=True, hops=2)
    pattern = layer.pattern(data.edge_index, NUM_NODES, data.batch)
    layer(data.x, pattern)
    return [*map(len, pattern._pair_types.values()), pattern.pairs]


def sent_for_a_token() -> int:
    """The bytes that a rank sends in a sparse turn of a ring with a token, by halo."""
    node = torch.arange(NUM_NODES)
    ring = torch.stack([torch.cat([node, node.roll(1)]), torch.cat([node.roll(1), node])])
    data = fgd.shard(Data(torch.randn(NUM_NODES, CHANNELS), ring), method="even", mode="halo")
    layer = DualInterleavedAttention(CHANNELS, HEADS, schedule=Schedule("layer", None))
    token = torch.zeros(1, CHANNELS)
    for _ in range(2):  # plans are made in the first
        fgd.COUNTS.reset()
        layer(data.x, data.edge_index, token=token)
    assert fgd.COUNTS.attention["parts (few rows)"] == 1
    return sum(fgd.COUNTS.sent.values())


def on_this_rank() -> tuple[dict[str, Found], list[int], list[int]]:
    torch.set_default_dtype(torch.float64)
    WORLD.random = "exact"
    found = {}
    for key in KEYS:
        name, layout, mode = key.rsplit(", ", 2)
        parts = PARTITIONS[layout](WORLD.size)
        order = ORDER if layout == "uneven" else None
        shard = partial(fgd.shard, parts=parts, mode=mode, order=order)
        found[key] = compared(CASES[name], shard)
    return found, [*types_of_this_rank(), sent_for_a_token()], clusters_of_ranks()


def clusters_of_ranks() -> list[int]:
    """How many clusters each rank has, what they are, and the order of nodes by them.

    By itself each would have others: their caches differ, and so does what METIS gives.
    """
    clusters.second_cache = lambda: 1024 * (WORLD.rank + 1)
    data = fgd.shard(graphs(), method="even")
    pattern = dual_pattern(data.edge_index, NUM_NODES)
    Reformation().entries(pattern, 16)
    made = pattern.reformed["clusters", ("cache", 16)]
    partition.partition = lambda _, nodes, parts: torch.arange(nodes) % (WORLD.rank + 2)  # type: ignore[assignment]
    order = fgd.whole(ClusterOrder(3)(data)[ORIGINAL])
    return [len(made.offsets) - 1, *made.cluster.tolist(), *order.tolist()]


@pytest.fixture(scope="module")
def found(
    world_size: int, once_on_ranks: Any
) -> list[tuple[dict[str, Found], list[int], list[int]]]:
    results: list[tuple[dict[str, Found], list[int], list[int]]] = once_on_ranks(
        on_this_rank, world_size
    )
    return results


@pytest.mark.parametrize("key", KEYS)
def test_ranks_have_what_one_process_has(
    found: list[tuple[dict[str, Found], list[int], list[int]]], key: str
) -> None:
    for rank, (of_rank, _, _) in enumerate(found):
        assert not of_rank[key].error, f"rank {rank}: {of_rank[key].error}"
        assert of_rank[key].gathers == GATHERS.get(key.rsplit(", ", 2)[0], {}) or key == BOTH_STATS


def test_a_rank_has_the_types_of_its_pairs(
    found: list[tuple[dict[str, Found], list[int], list[int]]],
) -> None:
    kept = [of_rank[:-2] for _, of_rank, _ in found]
    pairs = {of_rank[-2] for _, of_rank, _ in found}
    assert pairs == {sum(map(sum, kept))}
    assert max(map(sum, kept)) - min(map(sum, kept)) <= 2 * max(SIZES)  # the cuts are between rows


def test_a_token_takes_no_rows_of_nodes(
    found: list[tuple[dict[str, Found], list[int], list[int]]],
) -> None:
    """They would be keys and values, of CHANNELS float64 each."""
    most = max(of_rank[-1] for _, of_rank, _ in found)
    assert most < NUM_NODES // len(found) * 2 * CHANNELS * 8 // 2


def test_clusters_are_those_of_the_first_rank(
    found: list[tuple[dict[str, Found], list[int], list[int]]],
) -> None:
    clusters_of_first, *others = (of_rank for _, _, of_rank in found)
    assert clusters_of_first[0] == 3  # of 60 nodes, of which 25 fit
    assert clusters_of_first[-30:] == list(range(1, 60, 2))
    assert others == [clusters_of_first] * (len(found) - 1)
