"""The forward pass of the CUDA gatv2, executed by the emulator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastgraph.backends.reference import philox
from tests.simt.cases import gatv2_reference, graphs, head_inputs
from tests.simt.library import DTYPES, Emulator, SimtError

# Heads, width: each layout of lanes and packs, whole and with a rest.
SHAPES = (
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
    emulator: Emulator, name: str, inputs: list[Tensor], dropout: float = 0.0, seed: int = 0
) -> None:
    rows, edges = GRAPHS[name]
    out, stats = emulator.gatv2(rows, *inputs, SLOPE, dropout, seed)
    keep = None
    if dropout:
        bits = philox(seed, edges.shape[1], inputs[0].shape[1], torch.device("cpu"))
        keep = (bits >= int(dropout * 2**32)) / (1 - dropout)
    expected, expected_stats = gatv2_reference(edges, *inputs, SLOPE, keep)
    eps = torch.finfo(inputs[0].dtype).eps
    torch.testing.assert_close(stats.double(), expected_stats, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(out.double(), expected, rtol=2e-5 + eps, atol=2e-5)


@pytest.mark.parametrize("name", GRAPHS)
def test_every_graph(emulator: Emulator, name: str) -> None:
    check(emulator, name, head_inputs(GRAPHS[name][0], 2, 12, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "width"), SHAPES)
def test_every_layout(emulator: Emulator, heads: int, width: int, dtype: torch.dtype) -> None:
    check(emulator, "random", head_inputs(GRAPHS["random"][0], heads, width, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows(emulator: Emulator, dtype: torch.dtype) -> None:
    check(emulator, "cut", head_inputs(GRAPHS["cut"][0], 2, 24, dtype))


def test_dropout_of_the_counter_based_generator(emulator: Emulator) -> None:
    seed = 0x1234_5678_9ABC_DEF1
    for name in ("random", "cut"):
        inputs = head_inputs(GRAPHS[name][0], 2, 8, torch.float32)
        check(emulator, name, inputs, dropout=0.4, seed=seed)


def test_large_scores(emulator: Emulator) -> None:
    inputs = [100 * x for x in head_inputs(GRAPHS["random"][0], 1, 8, torch.float32)]
    rows, edges = GRAPHS["random"]
    out, _ = emulator.gatv2(rows, *inputs, SLOPE)
    expected, _ = gatv2_reference(edges, *inputs, SLOPE, None)
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("width", [7, 64])
def test_bits_do_not_depend_on_the_order_of_threads(emulator: Emulator, width: int) -> None:
    rows, _ = GRAPHS["cut"]
    inputs = head_inputs(rows, 2, width, torch.float32)
    first, *others = [emulator.gatv2(rows, *inputs, SLOPE, 0.3, 5, seed) for seed in range(4)]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_heads_too_wide_for_registers_are_refused(emulator: Emulator) -> None:
    with pytest.raises(SimtError, match="error 1"):
        emulator.gatv2(
            GRAPHS["random"][0], *head_inputs(GRAPHS["random"][0], 1, 513, torch.float32)
        )
