"""Reformed patterns beside a slow account of them, and attention along these in float64."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgraph.nn import (
    AutoTuner,
    DualInterleavedAttention,
    DualPattern,
    Graphormer,
    Reformation,
    Schedule,
    dual_pattern,
    fastest_block,
)
from fastgraph.nn.block_profile import BLOCKS
from fastgraph.nn.dual_pattern import EDGE, LOOP, OTHER
from fastgraph.nn.sub_blocks import Reformed

CHANNELS, HEADS = 12, 3
SIZES = [23, 1, 30, 0, 7]
NODES, GRAPHS = sum(SIZES), len(SIZES)
BATCH = torch.repeat_interleave(torch.arange(GRAPHS), torch.tensor(SIZES))
STARTS = [0, *itertools.accumulate(SIZES)]
COUNTS = [4, 1, 3, 1, 2]
NEVER = Schedule("layer", None)


def edges_of(sizes: list[int]) -> Tensor:
    """Within each graph, denser among its first nodes, with duplicates and loops."""
    draw, parts, first = torch.Generator().manual_seed(0), [], 0
    for size in sizes:
        edges = size * torch.rand(2, 4 * size, generator=draw) ** 2
        parts.append(edges.long() + first)
        first += size
    return torch.cat(parts, dim=1)


def given_clusters() -> Tensor:
    """Of several sizes, in no order; one of them is empty."""
    draw, parts = torch.Generator().manual_seed(3), []
    for size, count in zip(SIZES, COUNTS, strict=True):
        number = (count * torch.rand(size, generator=draw) ** 1.5).long()
        if size:
            number[0] = count - 1
        parts.append(torch.where(number == 1, 0, number) if count > 2 else number)
    return torch.cat(parts)


EDGES, CLUSTERS = edges_of(SIZES), given_clusters()


def pattern_of(token: bool = False, path: bool = False) -> DualPattern:
    return dual_pattern(EDGES, NODES, BATCH, num_graphs=GRAPHS, token=token, path=path)


def pairs_of(entries: DualPattern | Reformed) -> dict[tuple[int, int], int]:
    """The types of entries, by query and key."""
    queries = torch.arange(len(entries.ptr) - 1).repeat_interleave(entries.ptr.diff())
    assert len(entries.sources) == len(entries.types) == int(entries.ptr[-1])
    keys = zip(queries.tolist(), entries.sources.tolist(), strict=True)
    found = dict(zip(keys, entries.types.tolist(), strict=True))
    assert len(found) == len(entries.sources)  # each once
    return found


def slowly(
    pattern: DualPattern, block: int, factor: float | None
) -> tuple[dict[tuple[int, int], int], Counter[str]]:
    """The entries after pairs below a threshold became their fullest sub-blocks, and counts.

    Args:
        pattern: of the graphs.
        block: rows of a sub-block.
        factor: of the density of each graph, infinite for a density of 1; ``None`` for indolent.
    """
    entries, counts = pairs_of(pattern), Counter[str]()
    edges = {pair for pair, kind in entries.items() if kind == EDGE}
    for graph, size in enumerate(SIZES):
        nodes = range(STARTS[graph], STARTS[graph] + size)
        if not size:
            continue
        labels = [int(CLUSTERS[node]) for node in nodes]
        number = max(labels) + 1
        members = [
            [n for n, own in zip(nodes, labels, strict=True) if own == c] for c in range(number)
        ]
        of_graph = sum(query in nodes for query, _ in edges) / size**2
        least = of_graph if factor is None else min(factor * of_graph * number / 8, 1)
        if factor == math.inf:
            least = 1
        for queries, keys in itertools.product(members, members):
            of_pair = [pair for pair in edges if pair[0] in queries and pair[1] in keys]
            counts["pairs"] += bool(of_pair)
            if not of_pair or not len(of_pair) / (len(queries) * len(keys)) < least:
                continue
            counts["transferred"] += 1
            cells: Counter[tuple[int, int]] = Counter()
            for query, key in of_pair:
                cells[queries.index(query) // block, keys.index(key) // block] += 1
            wanted = -(-len(of_pair) // block**2)
            chosen = sorted(cells, key=lambda cell: (-cells[cell], cell))[:wanted]
            counts["sub_blocks"] += wanted
            for pair in of_pair:
                del entries[pair]
            for row, column in chosen:
                rows = queries[row * block : (row + 1) * block]
                columns = keys[column * block : (column + 1) * block]
                for pair in itertools.product(rows, columns):
                    entries.setdefault(pair, EDGE if pair in edges else OTHER)
    kept = sum(entries.get(pair) == EDGE for pair in edges)
    counts.update(edges=len(edges), kept=kept, dropped=len(edges) - kept)
    counts["invented"] = sum(kind == OTHER for kind in entries.values())
    return entries, counts


def reformed(pattern: DualPattern, made: Reformation, **options: Any) -> Reformed:
    entries = made.entries(pattern, 8 * CHANNELS, **options)
    assert entries is not None
    return entries


@pytest.mark.parametrize(("token", "path"), [(False, False), (True, True)])
@pytest.mark.parametrize("block", [1, 3, 4, 16])
@pytest.mark.parametrize("index", [None, 0, 1, 3, 5, 6])
def test_entries_and_counts(index: int | None, block: int, token: bool, path: bool) -> None:
    pattern = pattern_of(token, path)
    made = Reformation("indolent" if index is None else "elastic", clusters=CLUSTERS, block=block)
    factor = None
    if index is not None:
        assert made.tuner is not None
        made.tuner.index, factor = index, (0, 1, 1.5, 5, 7, 10, math.inf)[index]
    found = reformed(pattern, made)
    expected, counts = slowly(pattern, block, factor)
    assert pairs_of(found) == expected
    for name in ("pairs", "transferred", "sub_blocks", "edges", "kept", "dropped", "invented"):
        assert getattr(found, name) == counts[name], name
    fixed = {pair: kind for pair, kind in pairs_of(pattern).items() if kind != EDGE}
    assert fixed.items() <= expected.items()  # loops, tokens and steps of the path
    assert len(found.sources) == len(fixed) + found.kept + found.invented
    if index == 0 or block == 1:
        assert found.dropped == found.invented == 0 and expected == pairs_of(pattern)
    elif index == 6:
        assert found.dropped > 0 and found.invented > 0


def test_exact_lays_out_all_edges() -> None:
    pattern = pattern_of(token=True)
    found = reformed(pattern, Reformation("exact", clusters=CLUSTERS, block=4))
    assert pairs_of(found) == pairs_of(pattern)
    assert (found.transferred, found.dropped, found.invented) == (0, 0, 0)
    each = reformed(pattern, Reformation("exact", clusters=CLUSTERS, block=1))
    assert each.sub_blocks == each.edges == found.kept > found.sub_blocks > found.edges / 16


def test_random_placement() -> None:
    """As many sub-blocks elsewhere: fewer edges are kept, and a seed repeats them."""
    pattern = pattern_of()
    options: dict[str, Any] = {"clusters": CLUSTERS, "block": 3}
    best = reformed(pattern, _at(6, **options))
    drawn = [
        reformed(pattern_of(), _at(6, placement="random", seed=seed, **options))
        for seed in (0, 0, 1)
    ]
    assert pairs_of(drawn[0]) == pairs_of(drawn[1]) != pairs_of(drawn[2])
    for found in drawn:
        assert (found.transferred, found.sub_blocks) == (best.transferred, best.sub_blocks)
        assert found.kept < best.kept and found.edges == found.kept + found.dropped
        kinds = Counter(pairs_of(found).values())
        assert kinds == {LOOP: NODES, EDGE: found.kept, OTHER: found.invented}


def _at(index: int, **options: Any) -> Reformation:
    tuner = AutoTuner()
    tuner.index = index
    return Reformation("elastic", tuner=tuner, **options)


@pytest.mark.parametrize("placement", ["edges", "random"])
def test_a_batch_is_its_graphs_one_by_one(placement: str) -> None:
    options: dict[str, Any] = {"block": 3, "placement": placement, "clusters": None}
    together = pairs_of(reformed(pattern_of(), _at(4, **options | {"clusters": CLUSTERS})))
    alone: dict[tuple[int, int], int] = {}
    for graph, size in enumerate(SIZES):
        first = STARTS[graph]
        own = (EDGES[0] >= first) & (EDGES[0] < first + size)
        clusters = CLUSTERS[first : first + size]
        pattern = dual_pattern(EDGES[:, own] - first, size)
        found = pairs_of(reformed(pattern, _at(4, **options | {"clusters": clusters})))
        alone |= {(query + first, key + first): kind for (query, key), kind in found.items()}
    assert together == alone


def layer(**options: Any) -> DualInterleavedAttention:
    torch.manual_seed(5)
    made = DualInterleavedAttention(CHANNELS, HEADS, **{"schedule": NEVER} | options).double()
    for parameter in made.parameters():  # biases are 0 at first
        torch.nn.init.normal_(parameter, std=0.4)
    return made


def inputs(token: bool) -> tuple[Tensor, Tensor | None]:
    torch.manual_seed(4)
    x = torch.randn(NODES, CHANNELS, dtype=torch.float64, requires_grad=True)
    tokens = torch.randn(GRAPHS, CHANNELS, dtype=torch.float64, requires_grad=True)
    return x, tokens if token else None


def joined(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else torch.cat(out)


def formula(
    module: DualInterleavedAttention, rows: Tensor, entries: dict[tuple[int, int], int]
) -> Tensor:
    """Outputs by scores of all pairs of rows, those that are no entries hidden."""
    types = torch.full((len(rows), len(rows)), -1)
    for (query, key), kind in entries.items():
        types[query, key] = kind
    q, k, v = (t.transpose(0, 1) for t in module._projected(rows))
    scores = q @ k.transpose(1, 2) / (CHANNELS / HEADS) ** 0.5
    if module.type_bias is not None:
        scores = scores + module.type_bias[types.clamp(min=0)].permute(2, 0, 1)
    weights = scores.masked_fill(types < 0, -torch.inf).softmax(-1)
    return module.out_proj((weights @ v).transpose(0, 1).reshape(rows.shape))


@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize("hops", [0, 1, 3])
@pytest.mark.parametrize("placement", ["edges", "random"])
def test_outputs_and_gradients(placement: str, hops: int, token: bool) -> None:
    """In float64; what is invented has the bias that it has in dense turns."""
    made = _at(6, clusters=CLUSTERS, block=3, placement=placement)
    biases = {"type_bias": True, "hops": hops} if hops else {}
    module = layer(reformation=made, **biases)
    pattern, (x, tokens) = pattern_of(token), inputs(token)
    found = reformed(pattern, made, hops=max(hops, 1))
    assert found.invented > 20
    entries = pairs_of(found)
    kinds = pattern.pair_types(hops=max(hops, 1))
    first = 0
    for rows in pattern.in_order(torch.arange(pattern.num_rows)).split(
        pattern.offsets.diff().tolist()
    ):
        for query, key in itertools.product(rows.tolist(), rows.tolist()):
            if (query, key) in entries:  # as in a dense turn
                assert entries[query, key] == int(kinds[first])
            first += 1
    assert hops < 3 or max(entries.values()) > OTHER
    out = joined(module(x, pattern, None, tokens))
    rows = x if tokens is None else torch.cat([x, tokens])
    truth = formula(module, rows, entries)
    torch.testing.assert_close(out, truth)
    grad = torch.randn_like(out)
    learned = [x, *module.parameters()] + ([] if tokens is None else [tokens])
    ours, theirs = (torch.autograd.grad(y, learned, grad) for y in (out, truth))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("select", ["elastic", "exact"])
@pytest.mark.parametrize("type_bias", [False, True])
def test_sub_blocks_give_the_numbers_of_rows(type_bias: bool, select: str) -> None:
    """Without dropout, and with it what rows give."""
    pattern, (x, tokens) = pattern_of(token=True), inputs(True)
    for dropout in (0.0, 0.5):
        found = []
        for kernel in ("rows", "blocks"):
            made = Reformation(select, clusters=CLUSTERS, block=3, kernel=kernel)
            if made.tuner is not None:
                made.tuner.index = 6
            module = layer(reformation=made, type_bias=type_bias, dropout=dropout)
            torch.manual_seed(0)
            out = joined(module(x, pattern, None, tokens))
            assert tokens is not None
            learned = [x, tokens, *module.parameters()]
            found.append([out, *torch.autograd.grad(out.square().sum(), learned)])
        torch.testing.assert_close(*found)
        assert "kernel='blocks'" in str(module.report(pattern))


def test_dense_turns_and_evaluation() -> None:
    """Dense turns are as without a reformation, and so is evaluation where that is asked for."""
    options: dict[str, Any] = {"clusters": CLUSTERS, "block": 3}
    x, _ = inputs(False)
    pattern = pattern_of()
    for evaluation in ("same", "exact"):
        module = layer(reformation=_at(6, evaluation=evaluation, **options))
        plain = layer()
        trained, evaluated = module(x, pattern), module.eval()(x, pattern)
        expected = plain(x, pattern) if evaluation == "exact" else trained
        torch.testing.assert_close(evaluated, expected)
        assert not torch.allclose(trained, plain(x, pattern))
    dense = Schedule("layer", 1)
    outs = [
        layer(reformation=made, schedule=dense, type_bias=True, hops=2)(x, pattern)
        for made in (None, _at(6, **options))
    ]
    assert torch.equal(*outs)


def test_selection_by_mass_keeps_its_bound() -> None:
    """No softmax loses more than it may, and outputs move by no more than follows from it."""
    x, tokens = inputs(True)
    pattern, moved = pattern_of(token=True), []
    for most in (0.0, 0.01, 0.1, 0.5, 0.99):
        made = Reformation("mass", clusters=CLUSTERS, block=2, mass=most)
        module, plain = layer(reformation=made, type_bias=True), layer(type_bias=True)
        before = module(x, pattern, None, tokens)
        torch.testing.assert_close(before, plain(x, pattern, None, tokens))  # none selected
        assert "before they are measured" in str(module.report(pattern))
        with made.measuring():
            module(x, pattern, None, tokens)
        found = reformed(pattern, made)
        entries, every = pairs_of(found), pairs_of(pattern)
        assert entries.items() <= every.items() and found.invented == 0
        assert len(every) - len(entries) == found.dropped == found.edges - found.kept
        assert tokens is not None
        rows = torch.cat([x, tokens])
        q, k, v = (t.transpose(0, 1) for t in plain._projected(rows))
        types = torch.full((len(rows), len(rows)), -1)
        stays = torch.zeros(len(rows), len(rows), dtype=torch.bool)
        for pair, kind in every.items():
            types[pair], stays[pair] = kind, pair in entries
        assert plain.type_bias is not None
        scores = q @ k.transpose(1, 2) / 2 + plain.type_bias[types.clamp(min=0)].permute(2, 0, 1)
        scores = scores.masked_fill(types < 0, -torch.inf)
        lost = (scores.softmax(-1) * ~stays).sum(-1).detach()
        assert found.mass == pytest.approx(float(lost.max()), rel=1e-9, abs=1e-15)
        assert float(lost.max()) <= most
        exact, dropped = (
            s.softmax(-1) @ v for s in (scores, scores.masked_fill(~stays, -torch.inf))
        )
        assert found.bound is not None
        assert float((exact - dropped).detach().abs().max()) <= found.bound * (1 + 1e-9)
        assert found.bound <= 2 * found.mass * float(v.detach().abs().max()) * (1 + 1e-9)
        torch.testing.assert_close(
            joined(module(x, pattern, None, tokens)),
            module.out_proj(dropped.transpose(0, 1).reshape(rows.shape)),
        )
        moved.append(found.dropped)
    assert moved[0] == 0 and moved == sorted(moved) and len(set(moved)) > 3


def test_layers_select_by_mass_for_themselves() -> None:
    made = Reformation("mass", clusters=3, block=2, mass=0.4)
    model = Graphormer(5, 2, 16, 3, 2, hops=1, reformation=made, schedule=NEVER)
    edges = edges_of([40])
    x, pattern = torch.randn(40, 5), model.pattern(edges, 40)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    with made.measuring():
        model(x, pattern)
    found = [reformed(pattern, made, layer=number) for number in range(3)]
    assert len({str(one) for one in found}) > 1
    assert all(one.mass is not None and one.mass <= 0.4 for one in found)
    with pytest.raises(ValueError, match="select: expected 'mass'"), _at(1).measuring():
        pass


def test_copies_select_by_mass_for_themselves() -> None:
    """As of a model whose weights are averaged, beside it on the same pattern."""
    made = Reformation("mass", clusters=3, block=2, mass=0.4)
    one = Graphormer(5, 2, 16, 2, 2, hops=1, reformation=made, schedule=NEVER).eval()
    edges = edges_of([40])
    x, pattern = torch.randn(40, 5), one.pattern(edges, 40)
    for parameter in one.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    with made.measuring():
        found = one(x, pattern)
    other, read = copy.deepcopy(one), pickle.loads(pickle.dumps(one))
    for model in (other, read):
        copied = model.layers[0].self_attn.reformation
        assert copied is model.layers[1].self_attn.reformation
        assert copied.entries(pattern, 64) is None
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=1.0)
        with copied.measuring():
            assert not torch.equal(model(x, pattern), found)
    assert torch.equal(one(x, pattern), found)


def test_clusters_that_change_afterwards() -> None:
    given, pattern = CLUSTERS.clone(), pattern_of()
    made = Reformation(clusters=given, block=4)
    before = reformed(pattern, made)
    given.zero_()
    for now in (reformed(pattern, made), reformed(pattern_of(), made)):
        assert pairs_of(now) == pairs_of(before)


@pytest.mark.parametrize("path", [False, True])
def test_types_that_are_given(path: bool) -> None:
    """Invented pairs have the types of their distances, as with patterns that look for these."""
    hops, draw = 2, torch.Generator().manual_seed(0)
    model = Graphormer(
        5, 2, 16, 2, 2, hops=4, path=path, reformation=Reformation(block=4, clusters=CLUSTERS)
    )
    for parameter in model.double().eval().parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=draw)
    x = torch.randn(NODES, 5, dtype=torch.float64, generator=draw)
    pattern = model.pattern(EDGES, NODES, BATCH, GRAPHS, hops=hops)
    alone = dual_pattern(EDGES, NODES, BATCH, num_graphs=GRAPHS, path=path, hops=hops)
    queries = torch.arange(NODES).repeat_interleave(alone.ptr.diff())
    index = torch.stack([alone.sources, queries])
    given = model.pattern(index, NODES, BATCH, GRAPHS, types=alone.types)
    made = model.layers[0].self_attn.reformation
    entries = [reformed(one, made, hops=4) for one in (pattern, given)]
    assert entries[0].invented and str(entries[0]) == str(entries[1])
    assert pairs_of(entries[0]) == pairs_of(entries[1])
    lengths = dual_pattern(EDGES, NODES, BATCH, num_graphs=GRAPHS, hops=4)
    far = {pair: kind for pair, kind in pairs_of(lengths).items() if kind > EDGE}
    found, before = pairs_of(entries[1]), pairs_of(given)
    invented = found.keys() - before.keys()
    assert {found[pair] for pair in invented} > {OTHER}
    assert all(found[pair] == far.get(pair, OTHER) for pair in invented)
    assert torch.equal(model(x, pattern), model(x, index, BATCH, GRAPHS, types=alone.types))


def test_reports_and_models() -> None:
    made = Reformation(clusters=4, block=4)
    model = Graphormer(5, 2, 16, 2, 2, reformation=made, hops=2)
    edges = edges_of([60])
    pattern = model.pattern(edges, 60)
    first, second = (layer.self_attn.report(pattern) for layer in model.layers)
    assert first.reformation is None and first.dense == (True,)
    found = reformed(pattern, made, hops=2)
    assert second.reformation == f"Reformation('indolent', clusters=4, block=4): {found}"
    assert str(second).endswith(f"{found.dropped} dropped, {found.invented} invented")
    assert second.entries == len(found.sources)
    before = pattern.nbytes
    reformed(pattern, Reformation(clusters=2, block=4))
    assert pattern.nbytes > before
    model(torch.randn(60, 5), pattern).sum().backward()
    again = copy.deepcopy(model)
    assert again.layers[0].self_attn.reformation is again.layers[1].self_attn.reformation


def test_the_papers_policy() -> None:
    """Sparse graphs are reformed, dense ones are not."""
    ring = torch.arange(30)
    ring = torch.stack([torch.cat([ring, ring.roll(-1)]), torch.cat([ring.roll(-1), ring])])
    star = torch.tensor([[0] * 5 + [1, 2, 3, 4, 5], [1, 2, 3, 4, 5] + [0] * 5])
    edges, sizes = torch.cat([ring, star + 30], dim=1), [30, 6]
    pattern = dual_pattern(edges, 36, torch.arange(2).repeat_interleave(torch.tensor(sizes)))
    made = Reformation("elastic", clusters=2, block=2)
    assert made.tuner is not None
    made.tuner.index = 6
    options: dict[str, Any] = {"policy": "paper", "layers": 20, "schedule": None}
    module, plain = layer(reformation=made, **options), layer(**options)
    x = torch.randn(36, CHANNELS, dtype=torch.float64)
    outs = module(x, pattern), plain(x, pattern)
    assert plain.report(pattern).dense == (False, True)
    assert torch.equal(outs[0][30:], outs[1][30:])
    entries = pairs_of(reformed(pattern, made))
    torch.testing.assert_close(outs[0][:30], formula(module, x, entries)[:30])
    assert not torch.allclose(outs[0][:30], outs[1][:30])
    of_ring = sum(query < 30 for query, _ in entries)
    assert module.report(pattern).entries == of_ring


def test_probes_see_what_sparse_turns_compute() -> None:
    x, _ = inputs(False)
    options: dict[str, Any] = {"clusters": CLUSTERS, "block": 3}
    probes = [
        layer(reformation=made).probe(x, pattern_of(), queries=1000)
        for made in (None, _at(0, **options), _at(6, **options))
    ]
    assert probes[0] == probes[1]
    assert probes[2].mass != pytest.approx(probes[0].mass, rel=1e-3)


def test_profile_of_blocks() -> None:
    found = fastest_block(dual_pattern(edges_of([50]), 50), 8, 2, clusters=2, repeats=1)
    assert tuple(found.seconds) == BLOCKS
    assert all(seconds > 0 for seconds in found.seconds.values())
    assert found.seconds[found.block] == min(found.seconds.values())


def test_states() -> None:
    made, other = _at(3), Reformation("elastic")
    other.load_state_dict(made.state_dict())
    assert other.tuner is not None and other.tuner.index == 3
    assert Reformation().state_dict() == {}
    for one, state in ((Reformation(), made.state_dict()), (other, {})):
        with pytest.raises(ValueError, match="state: expected one of select"):
            one.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"select": "all"}, "select: expected one of"),
        ({"placement": "first"}, "placement: expected one of"),
        ({"evaluation": "dense"}, "evaluation: expected one of"),
        ({"kernel": "tiles"}, "kernel: expected one of"),
        ({"clusters": 0}, "clusters: expected an integer of at least 1, a tensor or None, got 0"),
        ({"clusters": 2.0}, "clusters: expected"),
        ({"block": 0}, "block: expected an integer of 1 to 64, got 0"),
        ({"block": 65}, "block: expected"),
        ({"seed": -1}, "seed: expected"),
        ({"select": "mass"}, "mass: expected 0 to below 1, got None"),
        ({"select": "mass", "mass": 1.0}, "mass: expected 0 to below 1, got 1.0"),
        ({"select": "mass", "mass": math.nan}, "mass: expected"),
        ({"mass": 0.1}, "mass: expected None with select='indolent', got 0.1"),
        ({"select": "mass", "mass": 0.1, "placement": "random"}, "placement: expected 'edges'"),
        ({"tuner": AutoTuner()}, "tuner: expected None with select='indolent'"),
        ({"select": "elastic", "tuner": 3}, "tuner: expected an AutoTuner, got 3"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Reformation(**options)


@pytest.mark.parametrize(
    ("clusters", "message"),
    [
        (8, "clusters: expected at most 1, as graph 1 has nodes, got 8"),
        (CLUSTERS[1:], "clusters: expected int64 .61., one for each node, got torch.int64 .60."),
        (CLUSTERS.int(), "clusters: expected int64"),
        (CLUSTERS - 1, "clusters: expected numbers from 0 on, got -1"),
        (CLUSTERS + 9, "clusters: expected at most 1, as graph 1 has nodes, got 10"),
    ],
)
def test_wrong_clusters(clusters: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reformed(pattern_of(), Reformation(clusters=clusters))


def test_wrong_layers() -> None:
    with pytest.raises(TypeError, match="reformation: expected a Reformation or None, got 'mass'"):
        layer(reformation="mass")
    for channels, heads, repeats, name in ((7, 2, 1, "channels"), (8, 2, 0, "repeats")):
        with pytest.raises(ValueError, match=f"{name}: expected"):
            fastest_block(pattern_of(), channels, heads, repeats=repeats)


def test_compiled_code() -> None:
    """One graph, after the entries are there."""
    module = layer(reformation=_at(6, clusters=CLUSTERS, block=3))
    pattern, (x, _) = pattern_of(), inputs(False)
    out, graphs = module(x, pattern), []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x, pattern), out)
    torch.testing.assert_close(compiled(x, pattern), out)
    assert len(graphs) == 1
    torch._dynamo.reset()
