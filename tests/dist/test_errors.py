"""Errors that all ranks must raise, lest one of them waits for the others."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastgraph.dist as fgd
from fastgraph.dist import spawning
from fastgraph.dist.world import WORLD
from tests.dist.graphs import graph, uneven


def errors_on_this_rank() -> list[str]:
    world = fgd.init(check=True)
    data = fgd.shard(graph(), parts=uneven(world.size))
    found = []

    def diverge() -> None:
        if world.rank == 0:
            data.x.sum()
        else:
            fgd.whole(data.x)

    def point_outside() -> None:
        index = data.y.clone()
        index[0] = 1000  # which one rank holds
        data.x[index]

    for action in (diverge, point_outside):
        try:
            action()
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("nothing")
    # They still do the same.
    torch.testing.assert_close(fgd.whole(data.x).sum(), data.x.sum())
    return [*found, waited_for(data)]


def waited_for(data: Any) -> str:
    """The error of rank 0, whose collective the other one never joins; ranks cannot go on then."""
    group, store = dist.group.WORLD, dist.distributed_c10d._get_default_store()
    WORLD.check = False
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5), group)
    if WORLD.rank == 1:
        store.wait(["waited"])
        return ""
    with pytest.raises(fgd.CollectiveError) as failed:
        data.x.sum()
    store.set("waited", "yes")
    return str(failed.value)


@pytest.fixture(scope="module")
def errors(once_on_ranks: Any) -> list[list[str]]:
    found: list[list[str]] = once_on_ranks(errors_on_this_rank, 2)
    return found


def test_ranks_that_diverge_are_told_where(errors: list[list[str]]) -> None:
    for diverged, _, _ in errors:
        assert diverged.startswith("RanksDivergedError: ")
        lines = re.findall(r"rank (\d): (\w+) .* at .*test_errors\.py:(\d+)", diverged)
        assert [line[:2] for line in lines] == [("0", "all_reduce"), ("1", "all_gather")]
        assert lines[0][2] != lines[1][2]


def test_an_index_out_of_range_is_one_on_all_ranks(errors: list[list[str]]) -> None:
    for _, outside, _ in errors:
        assert outside == "IndexError: an index is out of range for a dimension of size 60"


def test_a_rank_that_does_not_come_is_waited_for_until_a_time_out(errors: list[list[str]]) -> None:
    (_, _, waited), _ = errors
    collective = r"rank 0 of 2: all_reduce of \[\] torch.float32, called at "
    assert re.match(collective + r".*test_errors\.py:\d+, did not end: .*[Tt]imed out", waited)


def test_ranks_that_take_too_long_are_named_with_what_they_wrote(tmp_path: Path) -> None:
    (tmp_path / "errors-0").write_text("waiting for rank 1\n")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        error = r"ranks \[0\] did not end in time\nrank 0:\nwaiting for rank 1"
        with pytest.raises(spawning.RankError, match=error):
            spawning._wait([process], tmp_path, time.monotonic())
        process.kill()
