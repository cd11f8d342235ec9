"""Ranks that wait in vain: for collectives of other numbers, or for rows that nobody sends."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from io import StringIO

import pytest
import torch
import torch.distributed as dist

import fastgraph.dist as fgd
from fastgraph.dist.ranks import board, transport
from fastgraph.dist.ranks.board import Board, Rows
from fastgraph.dist.ranks.spawning import RankError
from fastgraph.dist.ranks.world import WORLD, RanksDivergedError
from tests import forks

RANKS = 3

LATE = 2
"""The rank that does something else meanwhile."""


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Have this process speak as a rank."""
    store = dist.HashStore()
    monkeypatch.setattr(board, "_store", lambda: store)
    monkeypatch.setattr(WORLD, "size", RANKS)
    return lambda rank: monkeypatch.setattr(WORLD, "rank", rank)


def ahead(rows: Rows | None = None) -> tuple[Board, board.Asked]:
    """A rank that waits for a barrier, after an exchange in which it did not wait for all."""
    found = Board()
    found.ask("all_to_all of [6]", rows=rows)
    return found, found.ask("barrier of []")


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_rank_that_is_ahead_tells_what_it_did_where_another_stands(
    as_rank: Callable[[int], None], has_ended: bool
) -> None:
    as_rank(1)
    behind = Board()
    behind.look(behind.ask("gather_objects of []"), "x.py:1")
    as_rank(0)
    found, asked = ahead()
    with pytest.raises(RanksDivergedError) as error:
        found.meet() if has_ended else found.look(asked, "y.py:2")
    place = "the end of the script" if has_ended else "y.py:2"
    assert f"rank 0: all_to_all of [6] before {place}\n" in str(error.value)
    assert "rank 1: gather_objects of [] at x.py:1\n" in str(error.value)


@pytest.mark.parametrize(
    ("theirs", "is_same"),
    [
        (Rows(range(3), [4, 0, 0], [3, 0, 0]), True),
        (Rows(range(3), [4, 0, 0], [2, 0, 0]), False),
        (Rows(range(3), [5, 0, 0], [3, 0, 0]), False),
        (Rows([1, 2], [0, 7], [0, 7]), True),  # another group, of a grid
    ],
)
def test_rows_that_two_ranks_exchange_are_those_of_both(
    as_rank: Callable[[int], None], theirs: Rows, is_same: bool
) -> None:
    as_rank(1)
    behind = Board()
    behind.look(behind.ask("all_to_all of [6]", rows=theirs), "x.py:1")
    as_rank(0)
    found, asked = ahead(Rows(range(3), [0, 3, 1], [0, 4, 2]))
    if is_same:
        return found.look(asked, "y.py:2")
    told = (
        "rank 0 sends 3 to rank 1 and receives 4, before y.py:2\n"
        f"  rank 1 receives {theirs.received[0]} and sends {theirs.sent[0]}, at x.py:1\n"
    )
    with pytest.raises(RanksDivergedError, match=re.escape(told)):
        found.look(asked, "y.py:2")


def test_a_rank_remembers_so_many_collectives(
    as_rank: Callable[[int], None],
) -> None:
    as_rank(1)
    behind = Board()
    behind.look(behind.ask("gather_objects of []"), "x.py:1")
    as_rank(0)
    found, asked = ahead()
    for _ in range(board._REMEMBERED - 2):
        asked = found.ask("all_reduce of [6]")
    with pytest.raises(RanksDivergedError):
        found.look(asked, "y.py:2")
    found.look(found.ask("all_reduce of [6]"), "y.py:2")  # its place is taken


def _one_has_a_graph_of_its_own() -> None:
    transport._PATIENCE = timedelta(seconds=0.05)
    if WORLD.rank == LATE:
        transport.gather_objects(1)
    transport.all_reduce(torch.ones(6))


def test_ranks_that_wait_for_others_of_other_numbers_end() -> None:
    with pytest.raises(RankError) as failed:
        forks.on_ranks(_one_has_a_graph_of_its_own, RANKS, diverges=True)
    assert re.search(
        r"ranks ask for different collectives:\n"
        rf".*  rank {LATE}: gather_objects of \[\] None before \S+test_board.py:\d+\n"
        r".*  rank \d: all_reduce of \[6\] torch.float32 at \S+test_board.py:\d+\n",
        str(failed.value),
    )


def _told_of_a_late_rank() -> str:
    fgd.init()
    transport._PATIENCE, board.SECONDS_OF_SILENCE = timedelta(seconds=0.02), 0.1
    before, sys.stderr = sys.stderr, StringIO()
    try:
        if WORLD.rank == LATE:
            store = board._store()
            while not store.check(["told"]):
                time.sleep(0.01)
        elif WORLD.rank == 0:
            sys.stderr = Heard()
        transport.barrier()
        return sys.stderr.getvalue()
    finally:
        sys.stderr = before


class Heard(StringIO):
    """Lets the late rank go on when it was named alone, as it is when the other one waits."""

    def write(self, text: str) -> int:
        if text.endswith(f"not there: rank {LATE}"):
            board._store().set("told", "")
        return super().write(text)


def test_people_are_told_for_which_rank_the_others_wait() -> None:
    of_first, _, of_late = forks.on_ranks(_told_of_a_late_rank, RANKS)
    assert re.search(
        r"rank 0 of 3 has waited \d+ s for barrier of \[\] None at \S+test_board.py:\d+; "
        rf"not there: rank {LATE}\n",
        of_first,
    )
    assert not of_late
