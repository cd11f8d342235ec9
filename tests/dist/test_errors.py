"""Errors that all ranks must raise, lest one of them waits for the others."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastgraph
import fastgraph.dist as fgd
from fastgraph import ops
from fastgraph.dist.ranks import spawning, transport
from fastgraph.dist.ranks.agreement import check_alike, first_rank_first
from fastgraph.dist.ranks.world import WORLD, alone
from fastgraph.machine import native
from tests.dist.graphs import NUM_EDGES, graph, uneven


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

    def attend(types: torch.Tensor) -> None:
        features = data.x.view(-1, 2, 4)
        ops.attention(*[features] * 3, data.edge_index, bias=torch.ones(4, 2), bias_index=types)

    def meet_a_type_of_one_edge() -> None:
        types = torch.zeros(NUM_EDGES, dtype=torch.uint8)
        types[7] = 200
        attend(types)

    def meet_a_type_of_a_row() -> None:
        types = (data.edge_weight > 2).to(torch.int16)
        types[7] = -1
        attend(types)

    def transform() -> None:
        torch.func.grad(lambda w: (data.x * w).mean())(torch.ones(()))

    def map_over_rows() -> None:
        torch.func.vmap(torch.sum)(data.x)

    actions = diverge, point_outside, meet_a_type_of_one_edge, meet_a_type_of_a_row
    actions = *actions, transform, map_over_rows
    for action in actions:
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
    found: list[list[str]] = once_on_ranks(errors_on_this_rank, 2, diverges=True)
    return found


def test_ranks_that_diverge_are_told_where(errors: list[list[str]]) -> None:
    for diverged, *_ in errors:
        assert diverged.startswith("RanksDivergedError: ")
        lines = re.findall(r"rank (\d): (\w+) .* at .*test_errors\.py:(\d+)", diverged)
        assert [line[:2] for line in lines] == [("0", "all_reduce"), ("1", "all_gather")]
        assert lines[0][2] != lines[1][2]


def test_an_index_out_of_range_is_one_on_all_ranks(errors: list[list[str]]) -> None:
    for _, outside, *_ in errors:
        assert outside == "IndexError: an index is out of range for a dimension of size 60"


def test_a_type_beyond_the_table_is_an_error_on_all_ranks(errors: list[list[str]]) -> None:
    for _, _, of_one_edge, of_a_row, *_ in errors:
        assert of_one_edge == "IndexError: bias_index holds 200, expected 0 <= type < 4"
        assert of_a_row == "IndexError: bias_index holds -1, expected 0 <= type < 4"


def test_transforms_are_refused(errors: list[list[str]]) -> None:
    for *_, of_others, of_rows, _ in errors:
        assert of_others.startswith("NotImplementedError: a sharded tensor is used within a trans")
        assert of_rows.startswith("NotImplementedError: aten.")  # which torch itself wraps


def test_a_rank_that_does_not_come_is_waited_for_until_a_time_out(errors: list[list[str]]) -> None:
    (*_, waited), _ = errors
    collective = r"rank 0 of 2: all_reduce of \[\] torch.float32, called at "
    assert re.match(collective + r".*test_errors\.py:\d+, did not end: .*[Tt]imed out", waited)


def test_ranks_that_take_too_long_are_named_with_what_they_wrote(tmp_path: Path) -> None:
    (tmp_path / "errors-0").write_text("waiting for rank 1\n")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        error = r"ranks \[0\] did not end in time\nrank 0:\nwaiting for rank 1"
        with pytest.raises(spawning.RankError, match=error):
            spawning._wait([process], tmp_path, time.monotonic())
        process.kill()


def alike_on_this_rank() -> dict[str, str]:
    """The errors of ranks of which one would not route as the others do."""
    fgd.init()
    found = {}

    def check(name: str) -> None:
        try:
            check_alike()
        except fgd.RanksDivergedError as error:
            found[name] = str(error)
        else:
            found[name] = ""

    last = WORLD.rank == WORLD.size - 1
    with fastgraph.enabled():
        check("alike")
    with fastgraph.enabled(min_edges=7 if last else None):
        check("settings")
    with pytest.MonkeyPatch.context() as patch:
        if last:  # a processor for which nothing was compiled
            patch.setattr(native, "_machine_level", lambda: "baseline")
            patch.setattr(native, "_library_path", lambda level: Path("missing"))
        with fastgraph.enabled():
            check("kernels")
    return found


def test_ranks_that_would_route_other_layers_are_named(once_on_ranks: Any) -> None:
    for errors in once_on_ranks(alike_on_this_rank, 3):
        assert errors["alike"] == ""
        named = "rank 2 differs from rank 0 in"
        assert f"{named} settings: it has ['min_edges=7']" in errors["settings"]
        assert f"{named} kernels: it has [" in errors["kernels"]
        assert "attention of torch.bfloat16" in errors["kernels"]


def test_a_collective_of_a_rank_that_works_alone_is_an_error(monkeypatch: Any) -> None:
    """As of a dataset that shards a graph while it is processed; the others would never come."""
    monkeypatch.setattr(WORLD, "size", 2)
    with alone(), pytest.raises(fgd.RanksDivergedError, match=r"barrier .* one by one"):
        transport.barrier()


def first_on_this_rank(folder: Path) -> list[str]:
    """Errors of what one rank does for all, which all must raise."""
    fgd.init()
    found = []

    class LocalError(Exception):
        def __init__(self, text: str) -> None:
            super().__init__(text)
            self.lock = threading.Lock()  # which cannot be sent

    for error in (ValueError("wrong"), LocalError("unsendable")):

        def action(error: Exception = error) -> None:
            if WORLD.rank == 0:
                raise error

        try:
            first_rank_first(action)
        except Exception as raised:
            found.append(f"{type(raised).__name__}: {raised}")
    return found


def test_errors_of_a_rank_that_works_for_all_are_raised_by_all(
    once_on_ranks: Any, tmp_path: Path
) -> None:
    first, second = once_on_ranks(first_on_this_rank, 2, tmp_path)
    assert first == ["ValueError: wrong", "LocalError: unsendable"]
    assert second == ["ValueError: wrong", "RuntimeError: rank 0 raised LocalError: unsendable"]


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"backend": 1}, TypeError, "backend: expected a str, got 1"),
    ({"backend": "glo"}, ValueError, "backend: expected one of ['auto', "),
    ({"backend": "cpu:gloo,cuda:ncl"}, ValueError, "got 'cpu:gloo,cuda:ncl'"),
    ({"timeout": 30}, TypeError, "timeout: expected a timedelta, got 30"),
    ({"timeout": timedelta()}, ValueError, "timeout: expected a time above 0, got "),
    ({"check": "no"}, TypeError, "check: expected a bool, got 'no'"),
    ({"random": []}, ValueError, "random must be one of ['rows', 'exact'], got []"),
]


@pytest.mark.parametrize(("given", "error", "message"), WRONG)
def test_ranks_join_by_no_wrong_arguments(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        fgd.init(**given)
