"""Random programs on sharded tensors, beside one process."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import fastgraph
import fastgraph.dist as fgd
from tests import forks
from tests.dist import programs
from tests.dist.comparing import deviation

# Sums are taken in another order; values are of order 1.
TOLERANCE = 1e-11

FIRST = range(150)

BATCHES = [
    FIRST,
    *(
        pytest.param(range(first, first + 200), marks=pytest.mark.exhaustive)
        for first in range(150, 2150, 200)
    ),
]


def compare_on_this_rank(seeds: Sequence[int]) -> dict[int, str]:
    """By seed, the difference between a program on these ranks and on one process."""
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    world = fgd.init(random="exact")
    fastgraph.enable(min_edges=0)
    return {seed: wrong for seed in seeds if (wrong := difference(seed, world.size))}


def difference(seed: int, size: int) -> str:
    plain, shares = programs.drawn_graph(seed)
    sharded, _ = programs.drawn_graph(seed)
    weights = torch.tensor(shares[:size])
    if not weights.any():
        weights[-1] = 1
    generator = torch.Generator().manual_seed(seed)
    parts = torch.multinomial(weights, len(plain.x), replacement=True, generator=generator)
    expected = programs.run(seed, plain)
    try:
        found = [fgd.whole(x) for x in programs.run(seed, fgd.shard(sharded, parts=parts))]
    except Exception:
        return traceback.format_exc()
    pairs = zip(expected, found, strict=True)
    wrong = [deviation(a.detach(), b.detach(), TOLERANCE) for a, b in pairs]
    return "; ".join(f"result {i} {text}" for i, text in enumerate(wrong) if text)


@pytest.mark.parametrize("seeds", BATCHES, ids=lambda seeds: f"{seeds[0]}-{len(seeds)}")
def test_random_programs_give_what_they_give_on_one_process(
    world_size: int, seeds: Sequence[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for rank, wrong in enumerate(forks.on_ranks(compare_on_this_rank, world_size, seeds)):
        assert not wrong, f"rank {rank}: programs {sorted(wrong)}: {next(iter(wrong.values()))}"
