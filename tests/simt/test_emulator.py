"""The emulator finds planted mistakes, and none where there are none."""

from __future__ import annotations

import re
import subprocess

import pytest
import torch

from tests.simt import library
from tests.simt.library import Emulator, SimtError

SEEDS = range(8)
TWO_BLOCKS = {"plain_count", "same_output_of_blocks"}
REPORTS = {
    # A thread that reads too early finds another's value on its way, or nothing yet.
    "missing_barrier": r"race: (reads|writes) tile\+\d+ of 256 bytes|uninitialised memory: reads",
    "missing_warp_barrier": r"race: (reads|writes) tile\+\d+ of 256 bytes|uninitialised memory",
    "missing_second_barrier": r"race: (reads|writes) dynamic shared memory",
    "barrier_after_exit": r"divergent barrier: .* but thread \(5,0,0\) has exited",
    "barrier_in_branch": r"divergent barrier: .* waits in __syncthreads at planted\.cu:\d+, but",
    "shuffle_in_branch": r"reads lane \d+, which takes no part in it",
    "shuffle_outside_mask": r"reads lane \d+, which takes no part in it",
    "shuffle_by_a_stranger": r"waits in a shuffle .* for lanes fffffffe and is none of them",
    "different_collectives": r"divergent warp: .* waits in .*, but .* waits in ",
    "warp_against_block": r"divergent barrier: .* waits in __syncwarp at .* in __syncthreads at",
    "plain_count": r"race: (reads|writes) out\+0 of 256 bytes",
    "same_output_of_blocks": r"race: writes out\+0 of 256 bytes.*, which another block wrote",
    "unwritten_shared": r"uninitialised memory: reads tile\+28 of 256 bytes",
    "shared_overrun": r"overrun: writes tile\+256 of 256 bytes",
    "global_overrun": r"overrun: reads in\+256 of 256 bytes",
    "misaligned_load": r"misaligned access of 16 bytes: reads in\+8 of 256 bytes",
    "far_overrun": r"overrun: reads address outside of all buffers",
    "shared_address_for_the_gpus": r"an address of shared memory .* at planted\.cu:\d+",
    "sum_that_overflows": r"integer overflow at planted\.cu:\d+",
    "shift_by_all_bits": r"shift by too much at planted\.cu:\d+",
    "overrun_of_registers": r"index out of a thread's own array at planted\.cu:\d+",
}


@pytest.mark.parametrize("name", REPORTS)
def test_planted_mistakes_are_found_in_every_order(emulator: Emulator, name: str) -> None:
    for seed in SEEDS:
        with pytest.raises(SimtError) as caught:
            emulator.planted(name, bug=True, blocks=1 + (name in TWO_BLOCKS), seed=seed)
        report = str(caught.value)
        where = re.match(rf"kernel {name}, block \([01],0,0\), thread \(\d+,0,0\): (.*)", report)
        assert where is not None, report
        assert re.search(REPORTS[name], where[1]), report


@pytest.mark.parametrize("name", REPORTS)
def test_their_harmless_twins_pass(emulator: Emulator, name: str) -> None:
    blocks = 1 + (name in TWO_BLOCKS)
    expected = emulator.planted(name, bug=False, blocks=blocks)
    assert expected.count_nonzero() > 0
    for seed in SEEDS:
        for portable in (False, True):
            found = emulator.planted(name, False, blocks, seed, portable)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_race_between_threads_of_one_block(emulator: Emulator) -> None:
    with pytest.raises(SimtError, match="race"):
        emulator.planted("plain_count", bug=True, blocks=1)


def test_asking_which_lanes_run_together_does_not_compile(emulator: Emulator) -> None:
    source = '#include "fastgraph/platform.cuh"\nunsigned f() { return __activemask(); }\n'
    command = [library.COMPILER, *library.COMMON, "-fsyntax-only", "-x", "c++", "-"]
    process = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    assert process.returncode != 0
    assert "deleted function" in process.stderr
