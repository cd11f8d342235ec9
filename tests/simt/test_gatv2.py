"""The forward pass of the CUDA gatv2, executed by the emulator."""

from __future__ import annotations

import pytest
import torch

from fastgraph.backends.reference import philox
from tests.simt.cases import gatv2_reference, graphs, head_inputs
from tests.simt.library import DTYPES, Emulator, SimtError

# Heads, width: each layout of lanes and packs, whole and with a rest.
SHAPES = (
    (2, 0),
    (1, 1),
    (3, 7),
    (2, 33),
    (2, 64),
    (1, 130),
    (1, 300),
    (4, 32),
    (1, 128),
    (1, 256),
    (1, 512),
)
GRAPHS = graphs()
SLOPE = 0.2


def check(
    emulator: Emulator,
    name: str,
    shape: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    edge_dim: int = 0,
    dropout: float = 0.0,
    seed: int = 0,
) -> None:
    rows, edges = GRAPHS[name]
    inputs = head_inputs(rows, *shape, dtype, edge_dim)
    out, stats, alpha = emulator.gatv2(rows, inputs, SLOPE, dropout, seed, weights=True)
    keep = None
    if dropout:
        bits = philox(seed, edges.shape[1], shape[0], torch.device("cpu"))
        keep = (bits >= int(dropout * 2**32)) / (1 - dropout)
    expected, expected_stats, expected_alpha = gatv2_reference(edges, inputs, SLOPE, keep)
    rtol, atol = 2e-5 + torch.finfo(dtype).eps, 2e-5
    torch.testing.assert_close(stats.double(), expected_stats, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(alpha.double(), expected_alpha, rtol=rtol, atol=atol)


@pytest.mark.parametrize("edge_dim", [0, 3])
@pytest.mark.parametrize("name", GRAPHS)
def test_every_graph(emulator: Emulator, name: str, edge_dim: int) -> None:
    check(emulator, name, (2, 12), edge_dim=edge_dim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_layout(emulator: Emulator, shape: tuple[int, int], dtype: torch.dtype) -> None:
    check(emulator, "random", shape, dtype)
    check(emulator, "random", shape, dtype, edge_dim=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows(emulator: Emulator, dtype: torch.dtype) -> None:
    check(emulator, "cut", (2, 24), dtype)


def test_dropout_of_the_counter_based_generator(emulator: Emulator) -> None:
    seed = 0x1234_5678_9ABC_DEF1
    for name in ("random", "cut"):
        check(emulator, name, (2, 8), dropout=0.4, seed=seed)


def test_large_scores(emulator: Emulator) -> None:
    rows, edges = GRAPHS["random"]
    inputs = [None if x is None else 100 * x for x in head_inputs(rows, 1, 8, torch.float32)]
    out, _, _ = emulator.gatv2(rows, inputs, SLOPE)
    expected, _, _ = gatv2_reference(edges, inputs, SLOPE)
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("width", [7, 64])
def test_bits_do_not_depend_on_the_order_of_threads(emulator: Emulator, width: int) -> None:
    rows, _ = GRAPHS["cut"]
    inputs = head_inputs(rows, 2, width, torch.float32)
    first, *others = [
        emulator.gatv2(rows, inputs, SLOPE, 0.3, 5, weights=True, seed=seed) for seed in range(4)
    ]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_heads_too_wide_for_registers_are_refused(emulator: Emulator) -> None:
    rows, _ = GRAPHS["random"]
    with pytest.raises(SimtError, match="error 1"):
        emulator.gatv2(rows, head_inputs(rows, 1, 513, torch.float32))


def test_more_heads_than_a_grid_takes(emulator: Emulator) -> None:
    rows, _ = GRAPHS["one_edge"]
    with pytest.raises(SimtError, match="kernel gatv2_rows: impossible launch"):
        emulator.gatv2(rows, head_inputs(rows, 65_536, 1, torch.float32))
