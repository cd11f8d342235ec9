"""Derived parts that a pattern of dual-interleaved attention keeps: their use and their size."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgraph.graphs.memo import MEMO
from fastgraph.nn import DualInterleavedAttention, DualPattern, Graphormer, dual_pattern
from fastgraph.nn.dual_pattern import OTHER

NODES, CHANNELS = 9, 8
BATCH = torch.repeat_interleave(torch.arange(2), torch.tensor([4, 5]))
EDGES = torch.tensor([[0, 1, 2, 4, 5, 6, 7], [1, 2, 3, 5, 6, 7, 8]])
KINDS: list[dict[str, Any]] = [
    {},
    {"type_bias": True},
    {"type_bias": True, "hops": 3},
    {"policy": "paper"},
    {"policy": "paper", "type_bias": True, "hops": 2},
]


def gradient(module: Any, *given: Any) -> Tensor:
    torch.manual_seed(3)
    x = torch.randn(NODES, CHANNELS, requires_grad=True)
    out = module(x, *given)
    return torch.autograd.grad((out[0] if isinstance(out, tuple) else out).square().sum(), x)[0]


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("made", ["before", "within"])
def test_training_after_inference(made: str, options: dict[str, Any]) -> None:
    """As Lightning's sanity check does: what is kept in inference mode serves training."""
    torch.manual_seed(0)
    module = DualInterleavedAttention(CHANNELS, 2, **options)
    token = torch.randn(2, CHANNELS)
    with torch.inference_mode(made == "within"):
        pattern = dual_pattern(EDGES.clone(), NODES, BATCH, token=True)
    with torch.inference_mode():
        module(torch.randn(NODES, CHANNELS), pattern, token=token)
    fresh = dual_pattern(EDGES, NODES, BATCH, token=True)
    assert torch.equal(gradient(module, pattern, None, token), gradient(module, fresh, None, token))


@pytest.mark.parametrize("options", [{}, {"policy": "paper"}])
def test_a_model_is_evaluated_first(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, edges = Graphormer.slim(CHANNELS, 3, **options).eval(), EDGES.clone()
    with torch.inference_mode():
        model(torch.randn(NODES, CHANNELS), edges, BATCH)
    found = gradient(model, edges, BATCH)
    assert torch.equal(found, gradient(model, EDGES.clone(), BATCH)) and found.any()
    model.train()(torch.randn(NODES, CHANNELS), edges, BATCH).sum().backward()


def test_answers_are_those_of_their_budget() -> None:
    nodes = 60  # a ring in a random order, among random edges: its path is found by a search
    draw = torch.Generator().manual_seed(0)
    ring = torch.randperm(nodes, generator=draw)
    edges = torch.stack([ring, ring.roll(1)])
    edges = torch.cat([edges, torch.randint(nodes, (2, 30), generator=draw)], dim=1)
    pattern = dual_pattern(torch.cat([edges, edges.flip(0)], dim=1), nodes)
    verdicts = [
        pattern.conditions(40, **budget)[0].hamiltonian_path.verdict
        for budget in ({"budget": 0}, {}, {"budget": 0})
    ]
    assert verdicts == ["undecided", "yes", "undecided"]
    assert pattern.split(40).pairs == 0  # by the default budget, after another was asked for


def test_types_of_pairs_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    edges = EDGES.clone()
    whole = DualInterleavedAttention(CHANNELS, 2).pattern(edges, NODES, BATCH, token=True)
    before, counted = whole.nbytes, MEMO.nbytes
    types = whole.pair_types(hops=3)
    assert types.nbytes == 5 * 5 + 6 * 6 == whole.nbytes - before == MEMO.nbytes - counted
    module = sys.modules[DualPattern.__module__]
    monkeypatch.setattr(module, "BLOCK_PAIRS", 13)  # two queries, and one
    apart = dual_pattern(EDGES, NODES, BATCH, token=True)
    assert torch.equal(apart.pair_types(hops=3), types)
    monkeypatch.setattr(module, "BLOCK_PAIRS", 1)
    rows = torch.tensor([3, 5, 8])
    some = [pattern.pair_types(rows, hops=3) for pattern in (apart, whole)]
    assert torch.equal(*some) and len(some[0]) == 5 + 6 + 6


@pytest.mark.parametrize("path", [False, True])
@pytest.mark.parametrize("token", [False, True])
def test_pairs_some_hops_apart_are_those_of_all_pairs(token: bool, path: bool) -> None:
    options: dict[str, Any] = {"token": token, "path": path}
    near = dual_pattern(EDGES, NODES, BATCH, hops=3, **options)
    assert near.hops == 3
    whole = dual_pattern(EDGES, NODES, BATCH, **options).pair_types(hops=3)
    types = near.pair_types(hops=3)
    assert torch.equal(types, whole)  # of the entries, and of distances along edges alone
    assert near.num_entries == int((whole != OTHER).sum())


@pytest.mark.parametrize("hops", [1, 3])
def test_a_pattern_of_its_own_entries(hops: int) -> None:
    made = dual_pattern(EDGES, NODES, BATCH, hops=hops, path=True)
    queries = torch.arange(NODES).repeat_interleave(made.ptr.diff())
    mixed = torch.randperm(2 * made.num_entries) % made.num_entries  # each pair twice
    index, types = torch.stack([made.sources, queries])[:, mixed], made.types[mixed]
    again = dual_pattern(index, NODES, BATCH, path=True, types=types)
    for name in ("sources", "ptr", "types", "offsets", "hops", "sizes", "pairs"):
        found, expected = getattr(again, name), getattr(made, name)
        is_same = torch.equal(found, expected) if isinstance(found, Tensor) else found == expected
        assert is_same, name


@pytest.mark.parametrize(
    ("index", "types", "options", "message"),
    [
        ([[0, 0], [1, 1]], [1, 3], {"path": True}, "types: expected one type of each pair, got"),
        ([[0, 0], [1, 1]], [1], {}, r"types: expected uint8 \[2\], one of each pair"),
        ([[0], [1]], [0], {}, "types: expected 0 of loops and of no other pairs"),
        ([[1], [1]], [1], {}, "types: expected 0 of loops and of no other pairs"),
        ([[0], [1]], [4], {}, "types: expected those of loops, edges, the path or distances"),
        ([[0], [1]], [255], {}, r"distances up to 250, got \[255\]"),
        ([[0], [1]], [3], {}, "types: expected none of a path without path=True"),
        ([[0], [2]], [3], {"path": True}, "types: expected 3 of consecutive nodes alone"),
        ([[0], [1]], [1], {"hops": 2}, "hops: expected 1 beside types"),
        ([[0], [1]], None, {"hops": 0}, "hops: expected an integer of 1 to 250, got 0"),
        ([[0], [1]], None, {"hops": 251}, "hops: expected an integer of 1 to 250, got 251"),
        ([[0], [1]], None, {"hops": 2.0}, "hops: expected an integer of 1 to 250, got 2.0"),
    ],
)
def test_types_that_are_none(
    index: list[list[int]], types: list[int] | None, options: dict[str, Any], message: str
) -> None:
    given = None if types is None else torch.tensor(types, dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        dual_pattern(torch.tensor(index), 3, types=given, **options)


def test_a_layer_has_biases_for_all_hops() -> None:
    layer = DualInterleavedAttention(CHANNELS, 2, type_bias=True, hops=2)
    pattern = layer.pattern(EDGES, NODES, BATCH, hops=3)
    with pytest.raises(ValueError, match="edges: expected a pattern of hops up to 2"):
        layer(torch.randn(NODES, CHANNELS), pattern)
