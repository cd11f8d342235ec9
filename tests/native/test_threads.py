from __future__ import annotations

import os
import signal
import subprocess
import sys
from ast import literal_eval
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgraph.plugins.backend import FLOATING
from tests.cli.commands import python

from .cases import compress, normal, transpose


class Inputs:
    """A graph with a hub on both sides, and everything that the kernels take."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(11)
        self.edges, self.rows, self.cols, self.width = 60_000, 900, 700, 40
        self.row = torch.randint(0, self.rows, (self.edges,), generator=generator)
        self.row[torch.rand(self.edges, generator=generator) < 0.3] = 17
        self.col = torch.randint(0, self.cols, (self.edges,), generator=generator)
        self.col[torch.rand(self.edges, generator=generator) < 0.3] = 23
        self.x = normal(self.cols, self.width, dtype=dtype)
        self.weight = normal(self.edges, dtype=dtype, seed=1)
        self.grad = normal(self.rows, self.width, dtype=dtype, seed=2)

    def run(self, lib: Any) -> list[Tensor]:
        """The results of all kernels.

        Nothing here is a torch operation that would run on several threads: a forked child could
        hang in torch itself.
        """
        graph = compress(lib, self.row, self.col, self.rows, self.cols)
        flipped = transpose(lib, graph)
        results = [*graph.csr[:3], *flipped.csr[:3]]

        def new(*shape: int, dtype: torch.dtype = self.x.dtype) -> Tensor:
            results.append(torch.empty(*shape, dtype=dtype))
            return results[-1]

        rows = (self.rows, self.width)
        lib.spmm(*graph.csr, self.weight, None, None, self.x, new(*rows))
        lib.sddmm(*graph.csr, None, self.grad, self.x, new(self.edges))
        for wants_ties in (True, False):
            out, record = new(*rows), new(*rows, dtype=torch.int32)
            ties, winner = (record, None) if wants_ties else (None, record)
            lib.segment_reduce(*graph.csr, self.weight, True, self.x, out, ties, winner)
            grad_x = new(self.cols, self.width)
            lib.segment_reduce_backward(
                *graph.csr[:4], self.weight, self.x, out, self.grad, ties, winner, grad_x
            )
        return [result for result in results if result is not None]


def identical(first: list[Tensor], second: list[Tensor]) -> bool:
    """True if the bits are equal, compared without torch's threads."""
    return all(
        bytes(memoryview(a.view(torch.uint8).numpy()))
        == bytes(memoryview(b.view(torch.uint8).numpy()))
        for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("dtype", FLOATING)
def test_results_do_not_depend_on_threads(lib: Any, dtype: torch.dtype) -> None:
    inputs = Inputs(dtype)
    runs = []
    for threads in (1, 2, 4, 2):
        torch.set_num_threads(threads)
        assert lib.max_threads() == threads
        runs.append(inputs.run(lib))
    assert all(identical(runs[0], run) for run in runs[1:])


RUNTIMES = """
import torch
from fastgraph.machine import native
from tests.native.test_threads import Inputs
torch.set_num_threads(2)
Inputs(torch.float32).run(native.library(native.available_levels()[-1]))
with open("/proc/self/maps") as maps:
    paths = {line.split()[-1] for line in maps if "/" in line}
print([path for path in sorted(paths) if any(n in path for n in ("gomp", "iomp", "libomp"))])
"""


def test_one_openmp_runtime_is_mapped(tmp_path: Path) -> None:
    # In a process of its own: packages that other tests import, scikit-learn among them, bring
    # runtimes of their own.
    done = python("-c", RUNTIMES, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    runtimes = {os.path.realpath(path) for path in literal_eval(done.stdout)}
    assert len(runtimes) == 1


def in_child(call: Callable[[], bool]) -> int:
    """Exit code of ``call`` in a forked child: 0 if it returned true; a hang is killed."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        code = 2
        try:
            code = 0 if call() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_kernels_survive_a_fork(best: Any) -> None:
    torch.set_num_threads(2)
    inputs = Inputs(torch.float32)
    expected = inputs.run(best)

    def same() -> bool:
        return best.max_threads() == 1 and identical(inputs.run(best), expected)

    assert in_child(same) == 0
    assert best.max_threads() == 2


LOADED_AFTER_FORK = """
import os, signal, sys, torch
from fastgraph.machine import native
torch.set_num_threads(2)
big = torch.randn(400, 400)
(big @ big).sum(); torch.arange(1_000_000).float().exp_()
row = torch.randint(0, 1000, (100_000,))
rowptr = torch.empty(1001, dtype=torch.int64)
col, edge_id = torch.empty(2, 100_000, dtype=torch.int32)
child = os.fork()
if child == 0:
    signal.alarm(20)
    lib = native.library()
    lib.build_csr(row, row, 1000, 1000, rowptr, col, edge_id)
    os._exit(0 if lib.max_threads() == 1 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_library_loaded_in_a_forked_child_works() -> None:
    subprocess.run([sys.executable, "-c", LOADED_AFTER_FORK], check=True, timeout=60)


class Batches(torch.utils.data.Dataset[Tensor]):
    def __init__(self, lib: Any) -> None:
        self.lib = lib
        self.inputs = Inputs(torch.float32)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        return self.inputs.run(self.lib)[6]


def test_data_loader_workers_run_kernels(best: Any) -> None:
    torch.set_num_threads(2)
    batches = Batches(best)
    expected = batches[0]
    loader = torch.utils.data.DataLoader(
        batches, num_workers=2, multiprocessing_context="fork", timeout=30
    )
    for batch in loader:
        assert torch.equal(batch[0], expected)


def test_a_thread_may_have_a_number_of_threads_of_its_own(lib: Any) -> None:
    def count() -> int:
        torch.get_num_threads()
        lib.use_threads(3)
        return int(lib.max_threads())

    before = lib.max_threads()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(count).result() == 3
    assert lib.max_threads() == before
    with pytest.raises(ValueError, match=r"count must be in \[1, 2\^31\), got 0"):
        lib.use_threads(0)
