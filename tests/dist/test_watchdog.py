"""Ranks whose device waits for a collective say so, and what the others asked for last."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fastgraph.dist.ranks import board, ending, transport, watchdog
from fastgraph.dist.ranks.board import BOARD, Asked, Board
from fastgraph.dist.ranks.watchdog import WATCHDOG, Watchdog, Watched
from fastgraph.dist.ranks.world import WORLD, RanksDivergedError
from tests import forks, late_collectives, standin

ALONE = 1
"""The rank that comes late to a collective: when the other one has said that it waits."""

_TOLD = "told of it"


class Heard(io.StringIO):
    """Tells the other rank that something was written."""

    def write(self, text: str) -> int:
        tell()
        return super().write(text)


def tell() -> None:
    board._store().set(_TOLD, "")


def waits_for_the_other() -> None:
    while not board._store().check([_TOLD]):
        time.sleep(0.01)


def on_device() -> torch.Tensor:
    watchdog._SECONDS_BETWEEN_LOOKS = board.SECONDS_OF_SILENCE = 0.05
    late_collectives.install()
    WATCHDOG.begin()
    x = torch.ones(3).to(standin.DEVICE)
    transport.all_reduce(x)
    torch.get_device_module(standin.DEVICE).current_stream().synchronize()
    return x


def _told_of_a_late_rank() -> str:
    x = on_device()
    looks = WATCHDOG._beats
    while WATCHDOG._beats < looks + 2:  # one that began before the device was done may still speak
        time.sleep(0.01)
    said = io.StringIO() if WORLD.rank == ALONE else Heard()
    if WORLD.rank == ALONE:
        sys.stderr = said
        waits_for_the_other()
        sys.stderr = sys.__stderr__
    else:
        while "all_reduce" not in BOARD.beats()[ALONE]:
            time.sleep(0.01)
        sys.stderr = said
    transport.all_to_all(x[:2], [1, 1], [1, 1])
    sys.stderr = sys.__stderr__
    return said.getvalue()


def test_people_are_told_for_what_a_device_waits_and_what_others_asked_for_last() -> None:
    said, of_late = forks.on_ranks(_told_of_a_late_rank, 2)
    first = said.splitlines()[0]
    assert first.startswith("fastgraph.dist: the device of rank 0 of 2 has waited ")
    assert " for all_to_all of [] torch.float32 (collective " in first
    ours, others = first.split("; ")[:2]
    assert "test_watchdog.py:" in ours
    assert others.startswith("rank 1 has last asked its device to wait for all_reduce of [3] ")
    assert not of_late  # whose device waited for nothing meanwhile


def _error_of_a_failed_rank() -> str:
    x, errors = on_device(), []

    def end_by(error: Exception) -> None:
        errors.append(f"{type(error).__name__}: {error}")
        tell()

    if WORLD.rank == ALONE:
        BOARD.fail(ValueError("alone"))
        waits_for_the_other()
    with mock.patch.object(ending, "end_by", end_by):
        transport.all_reduce(x)
    return "\n".join(errors)


def test_a_rank_whose_device_waits_for_one_that_failed_ends_by_that() -> None:
    error, _ = forks.on_ranks(_error_of_a_failed_rank, 2)
    assert error.startswith(
        "CollectiveError: rank 0 of 2 waits for all_reduce of [3] torch.float32 at "
    )
    assert error.endswith("but rank 1 has failed: ValueError: alone")


@pytest.mark.parametrize(
    ("end", "heard"),
    [
        (lambda board: board.fail(ValueError("alone")), "rank 1 has failed: ValueError: alone"),
        (lambda board: board.end(), "rank 1 has come to the end of its script"),
    ],
)
def test_the_last_word_of_a_rank_stays_when_its_device_still_waits(
    monkeypatch: pytest.MonkeyPatch, end: Callable[[Board], None], heard: str
) -> None:
    store, of_rank = dist.HashStore(), Board()
    monkeypatch.setattr(board, "_store", lambda: store)
    monkeypatch.setattr(watchdog, "BOARD", of_rank)
    monkeypatch.setattr(WORLD, "size", 2)
    monkeypatch.setattr(WORLD, "rank", 1)
    watched = Watchdog()
    watched._waiting.append(
        Watched(Asked(7, "all_reduce of [3]", is_of_host=False), "x.py:1", time.monotonic() - 10)
    )
    end(of_rank)
    watched.look()
    assert of_rank.is_over  # at which its thread ends
    monkeypatch.setattr(WORLD, "rank", 0)
    assert Board().gone() == heard


def test_what_a_host_and_its_device_wait_for_both_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(board, "_store", lambda: store)
    monkeypatch.setattr(WORLD, "size", 2)
    monkeypatch.setattr(WORLD, "rank", 1)
    Board().look(Asked(8, "barrier of []"), "y.py:2")
    Board().look(Asked(7, "all_reduce of [3]", is_of_host=False), "x.py:1")
    monkeypatch.setattr(WORLD, "rank", 0)
    for number, what in (8, "barrier of [] at y.py:2"), (7, "all_reduce of [3] at x.py:1"):
        with pytest.raises(RanksDivergedError, match=re.escape(f"rank 1: {what}")):
            Board().look(Asked(number, "all_to_all of [3]"), "z.py:3")


def _watched() -> list[int]:
    """The collectives that are watched, after each of some that have ended."""
    x, found = on_device(), []
    for _ in range(50):
        transport.all_reduce(x)
        found.append(len(WATCHDOG._waiting))
    return found


def test_what_a_device_has_gone_beyond_is_forgotten() -> None:
    for of_rank in forks.on_ranks(_watched, 2):
        assert max(of_rank) <= standin.LAG + 1


def _begun_again() -> tuple[int, bool, bool]:
    """The last collective after ranks have joined again, and which of both threads goes on."""
    on_device()
    WATCHDOG.waits(Asked(7, "all_reduce of [3]", is_of_host=False))
    before = WATCHDOG._stop
    WATCHDOG.begin()
    return len(WATCHDOG._waiting), before.is_set(), WATCHDOG._stop.is_set()


def test_ranks_that_join_again_are_watched_anew() -> None:
    assert forks.on_ranks(_begun_again, 2) == [(0, True, False)] * 2


def test_a_store_that_goes_while_a_thread_asks_for_it_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(WORLD, "size", 2)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    assert board._store() is None


def test_hosts_that_wait_by_themselves_are_not_watched() -> None:
    for started in forks.on_ranks(_is_watched, 2):
        assert not started


def _is_watched() -> bool:
    WATCHDOG.begin()
    return WATCHDOG._stop is not None
