"""Attention on tiles by emulated tensor cores."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgraph import ops, settings
from fastgraph.backends import reference
from fastgraph.backends.cuda import CudaBackend
from fastgraph.backends.tiles import TilesAttention
from fastgraph.cli.tuning.kernels import time_kernels
from fastgraph.cli.tuning.measuring import Budget
from fastgraph.cli.tuning.recording import Given, OperatorCall, Program, Values
from fastgraph.graphs.graph import Graph
from fastgraph.registry.registry import REGISTRY
from fastgraph.tune import choices, fastest
from fastgraph.tune.tiles import DTYPES
from tests.graphs import random_edges
from tests.native.cases import normal
from tests.simt.backend import emulator
from tests.simt.compared import CASES, assert_same, graph_of, irregular, misaligned, simt
from tests.simt.test_tiles import CUT, H200, Faulty, cliques, rounded

pytestmark = pytest.mark.usefixtures("tf32_allowed")

TILES = TilesAttention(lambda: emulator().functions, lambda x: H200)
SMALL = Graph(random_edges(40, 40, 200), 40, 40)
LARGE = Graph(CUT.edge_index, CUT.num_src, CUT.num_dst)
OPTIONS = (0.0, 0, False)
"""No dropout, and no weights."""


def tensors_of(
    graph: Graph, heads: int, width: int, dtype: torch.dtype, transpose: bool = False
) -> list[Tensor]:
    """Query, key and value."""
    src, dst = (graph.num_dst, graph.num_src) if transpose else (graph.num_src, graph.num_dst)
    return [normal(n, heads, width, dtype=dtype, seed=i) for i, n in enumerate((dst, src, src))]


def check(graph: Graph, tensors: list[Tensor], transpose: bool, addend: Tensor | None) -> None:
    """Output and stats: scores of float32, weights and values as tensor cores take them."""
    emulator().seed(0)
    query, key, value = tensors
    options = (None, transpose, query.shape[2] ** -0.5, *OPTIONS)
    out, stats, weights = TILES(graph, query, key, value, *options, addend=addend)
    assert weights.shape == (0, query.shape[1])
    wide = [query.double(), key.double(), rounded(value).double()]
    wide_addend = None if addend is None else addend.double()
    exact, exact_stats, _ = reference.attention(graph, *wide, *options, addend=wide_addend)
    torch.testing.assert_close(stats.double(), exact_stats, rtol=1e-5, atol=1e-5)
    size, _, _ = reference.attention(graph, *wide[:2], wide[2].abs(), *options)
    # Half of the last place of weights in tf32 and in bfloat16, and what the score may be off.
    of_weight = 2.0**-11 if out.dtype == torch.float32 else 2.0**-8
    allowed = torch.finfo(out.dtype).eps * exact.abs() + (of_weight + 2.0**-16) * size
    error = (out.double() - exact).abs()
    assert bool((error <= allowed).all()), f"off by {float((error / allowed).nan_to_num().max())}"


# Once for each graph, but where windows are cut.
GRAPHS = [
    pytest.param(
        name, dtype, marks=() if dtype == torch.float32 or "cut" in name else pytest.mark.repeats
    )
    for name in (*CASES, "cut by windows")
    for dtype in DTYPES
]


@pytest.mark.parametrize(("name", "dtype"), GRAPHS)
def test_every_graph(name: str, dtype: torch.dtype) -> None:
    graph = graph_of(name) if name in CASES else LARGE
    bias = normal(1, 2, 24, dtype=dtype, seed=5)
    check(graph, tensors_of(graph, 2, 24, dtype), False, bias)
    backwards = tensors_of(graph, 1, 8, dtype, transpose=True)
    check(graph, backwards, True, normal(graph.num_src, 1, 8, dtype=dtype, seed=5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packs", [1, 4, 7, 8, 9, 16])
def test_every_width(packs: int, dtype: torch.dtype) -> None:
    for graph in (SMALL, LARGE) if packs == 9 else (SMALL,):
        check(graph, tensors_of(graph, 1, packs * 16 // dtype.itemsize, dtype), False, None)


def test_scores_are_as_large_as_they_come() -> None:
    """The weights of float32 scores of some thousands, where those of tf32 would be anything."""
    query, key, value = tensors_of(LARGE, 1, 64, torch.float32)
    tensors = [30 * query, 30 * key, value]
    found = TILES(LARGE, *tensors, None, False, 1.0, *OPTIONS)
    exact = reference.attention(LARGE, *(x.double() for x in tensors), None, False, 1.0, *OPTIONS)
    torch.testing.assert_close(found[1].double(), exact[1], rtol=2e-2, atol=0)
    torch.testing.assert_close(found[0].double(), exact[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("position", range(3))
def test_infinities_reach_what_they_reach_by_rows(position: int, dtype: torch.dtype) -> None:
    for graph in (SMALL, LARGE):
        tensors = tensors_of(graph, 2, 8, dtype)
        tensors[position] = irregular(*tensors[position].shape, dtype=dtype)
        options = (None, False, 0.2, *OPTIONS)
        expected = simt("attention", graph, *tensors, *options)
        for a, b in zip(TILES(graph, *tensors, *options), expected, strict=True):
            assert_same(a.where(~a.isfinite(), 0), b.where(~b.isfinite(), 0))


def test_bits_do_not_depend_on_the_order_of_threads() -> None:
    tensors = tensors_of(LARGE, 1, 8, torch.float32)
    found = []
    for seed in range(3):
        emulator().seed(seed)
        found.append(TILES(LARGE, *tensors, None, False, 0.2, *OPTIONS)[0])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_backward_pass_of_rows_takes_its_stats(dtype: torch.dtype) -> None:
    tensors = tensors_of(SMALL, 2, 16, dtype)
    options = (False, 0.25, 0.0, 0)
    grad = normal(40, 2, 16, dtype=dtype, seed=4)
    gradients = []
    for forward in (TILES, lambda *arguments: simt("attention", *arguments)):
        _, stats, _ = forward(SMALL, *tensors, None, *options, False)
        given = (SMALL, grad, None, None, *tensors, None, stats, *options)
        gradients.append(simt("attention_backward", *given)[:3])
    for found, expected in zip(*gradients, strict=True):
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(found, expected, rtol=max(eps, 1e-4), atol=max(eps, 1e-4))


def test_tiles_are_for_full_blocks_and_for_what_was_found_right() -> None:
    graph = cliques()
    query, key, value = tensors_of(graph, 1, 64, torch.float32)
    arguments = [query, key, value, None, False, 0.125, *OPTIONS]
    assert TILES.why_not(graph, *arguments) is None
    wide = normal(64, 1, 68, dtype=torch.float32)
    refused: list[tuple[dict[int, Any], str]] = [
        ({3: torch.ones(graph.num_edges, 4)}, "edges must have no features"),
        ({6: 0.5}, "drops no edges and gives no weights"),
        ({8: True}, "drops no edges and gives no weights"),
        ({0: wide, 1: wide, 2: wide}, "at most 256 bytes on tiles, got 272"),
        ({i: x[..., :0] for i, x in enumerate((query, key, value))}, "got 0"),
        ({i: x[..., :7] for i, x in enumerate((query, key, value))}, "whole packs of 16 bytes"),
        ({2: misaligned(value)}, "whole packs of 16 bytes"),
        ({i: x.half() for i, x in enumerate((query, key, value))}, "float32 or bfloat16"),
    ]
    for changed, message in refused:
        others = [changed.get(i, x) for i, x in enumerate(arguments)]
        why_not = TILES.why_not(graph, *others)
        assert why_not is not None and message in why_not
        assert not TILES.fits(graph, *others)
    addend = misaligned(query)
    assert not TILES.fits(graph, *arguments, addend=addend)
    sparse = graph_of("random")
    why_not = TILES.why_not(sparse, *tensors_of(sparse, 1, 64, torch.float32), *arguments[3:])
    assert why_not is not None and "are too few" in why_not
    unknown = TilesAttention(lambda: emulator().functions)
    assert unknown.why_not(graph, *arguments) == "the model does not know this GPU"


@pytest.mark.parametrize("position", [-3, -2], ids=["out", "stats"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_device_that_is_wrong_is_found(dtype: torch.dtype, position: int) -> None:
    def change(*arguments: Any) -> None:
        arguments[position][3, 0, 1] *= 1.25

    faulty = TilesAttention(lambda: Faulty("attention_tiles", change), lambda x: H200)
    tensors = tensors_of(cliques(), 1, 64, dtype)
    why_not = faulty.why_not(cliques(), *tensors, None, False, 0.125, *OPTIONS)
    assert why_not is not None and "weighted sums on tiles are off by" in why_not


class Counting:
    """The native library, and what was asked of it."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, function: str) -> Any:
        self.called.append(function)
        return getattr(emulator().functions, function)


class Emulated(CudaBackend):
    """The GPU backend, emulated, with a clock that finds each call faster than the one before."""

    name = "emulated"
    priority = -200

    def __init__(self) -> None:
        self.library = Counting()
        super().__init__(lambda: self.library, "cpu", self.seconds, generated=None)

    def unavailable(self) -> None:
        return None

    def below(self, x: Tensor) -> str:
        return "emulator"

    def seconds(self, call: Any) -> float:
        call()
        return 1 / len(self.library.called)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Emulated]:
    """Selected, with the setting that lets kernels compete."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(choices, "KERNELS", choices.KERNELS.again())
    monkeypatch.setattr(settings, "_current", settings.current().replace(measure=True))
    known = partial(TilesAttention, sheet=lambda x: H200)
    monkeypatch.setattr("fastgraph.backends.cuda.TilesAttention", known)
    backend = Emulated()
    monkeypatch.setitem(REGISTRY.backends, backend.name, backend)
    REGISTRY.select(backend.name)
    yield backend
    REGISTRY.select(None)


def test_the_operator_takes_them_where_they_are_faster(emulated: Emulated) -> None:
    edges = torch.stack(cliques().edge_list())
    given = [x.requires_grad_() for x in tensors_of(cliques(), 1, 64, torch.float32)]
    results = []
    for backend in ("emulated", "emulated", "reference"):
        REGISTRY.select(backend)
        out = ops.attention(*given, edges)[0]
        results.append([out, *torch.autograd.grad(out.square().sum(), given)])
    last = ["attention_tiles", "attention_backward"]
    assert emulated.library.called[-2:] == last and emulated.library.called.count("attention") == 1
    for a, b, exact in zip(*results, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, exact, rtol=1e-2, atol=1e-2)


def test_tune_chooses_them(emulated: Emulated) -> None:
    edges = torch.stack(cliques().edge_list())
    heads = Values((64, 1, 64), torch.bfloat16, False)
    graph = (None, None, Given(0), None, None, 0, False)
    call = OperatorCall("attention", (heads, heads, heads, *graph, 0.125, 0.0, False))
    (found,) = time_kernels(Program({call: ["GPSConv"]}, [edges], 2, True, 0), Budget(60.0), "cpu")
    (timed,) = found.timed
    assert timed.seconds.keys() == {"rows", "tiles"} and timed.fastest == "tiles"
    fastest.keep(found.timed)
    emulated.library.called.clear()
    ops.attention(*tensors_of(cliques(), 1, 64, torch.bfloat16), edges, scale=0.125)
    assert (
        "attention_tiles" in emulated.library.called and "attention" not in emulated.library.called
    )


@pytest.fixture
def arguments() -> dict[str, Any]:
    """Of a native call on a graph of 20 rows and 3 edges."""
    graph = Graph(torch.tensor([[0, 1, 0], [0, 0, 19]]), 2, 20)
    ones = torch.ones(2, 1, 8)
    operands = {"query": torch.zeros(20, 1, 8), "key": ones, "value": ones, "scale": 1.0}
    results = {"out": torch.empty(20, 1, 8), "stats": torch.empty(20, 1, 2), "addend": None}
    prepared = TILES._prepared(graph, False)._asdict()
    return prepared | {"rowptr": graph.grouped(transpose=False).ptr} | operands | results


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_windows", 3, "num_windows must be that of 20 rows of out, got 3"),
        ("tasks", torch.zeros(1, 4, dtype=torch.int32), "tasks must list 2 rows"),
        ("rowptr", torch.zeros(20, dtype=torch.int64), r"rowptr must have shape \[21\]"),
        ("query", torch.zeros(20, 8), "query must have 3 dimensions"),
        ("query", torch.zeros(20, 1, 4), r"query must have shape \[20, 1, 8\]"),
        ("key", torch.zeros(2, 1, 8).double(), "key must be float32 or bfloat16, got float64"),
        ("key", torch.zeros(2, 1, 68), r"query must have shape \[20, 1, 68\]"),
        ("value", torch.zeros(3, 1, 8), r"value must have shape \[2, 1, 8\]"),
        ("value", misaligned(torch.zeros(2, 1, 8)), "value must have rows of whole packs"),
        ("out", torch.zeros(20, 1, 16)[..., ::2], "out must be contiguous"),
        ("stats", torch.zeros(20, 2), r"stats must have shape \[20, 1, 2\]"),
        ("addend", torch.zeros(3, 1, 8), r"addend must have shape \[20, 1, 8\]"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: dict[str, Any], name: str, value: Any, message: str
) -> None:
    attention_tiles = emulator().functions.attention_tiles
    attention_tiles(*arguments.values())
    assert arguments["out"][:, 0, 0].tolist() == [1, *[0] * 18, 1]
    assert arguments["stats"][:, 0, 1].tolist() == [0.5, *[0] * 18, 1]
    with pytest.raises((TypeError, ValueError), match=message):
        attention_tiles(*{**arguments, name: value}.values())


@pytest.mark.parametrize("width", [0, 7, 68])
def test_heads_that_are_too_wide_or_broken_are_refused(
    arguments: dict[str, Any], width: int
) -> None:
    for name in ("query", "key", "value", "out"):
        arguments[name] = torch.zeros(len(arguments[name]), 1, width)
    with pytest.raises(ValueError, match=r"of 16 to 256 bytes, got|of whole packs of 16 bytes"):
        emulator().functions.attention_tiles(*arguments.values())
