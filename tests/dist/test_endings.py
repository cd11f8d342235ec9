"""A rank that ends alone ends all of them, and its error is the one that is shown."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.board import Asked
from fastgraph.dist.ranks.spawning import RankError
from fastgraph.dist.ranks.world import CollectiveError
from tests import forks

# Far below the half hour for which ranks would wait for each other.
SECONDS = 200

SCRIPT = """
import os
import signal
import sys
import threading
import time

import torch
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

torch.manual_seed(0)
edges = torch.randint(0, 40, (2, 160))
data = Data(x=torch.randn(40, 6), edge_index=edges)
conv = GCNConv(6, 3)
optimizer = torch.optim.SGD(conv.parameters(), lr=0.1)
for epoch in range(40):
    if epoch == 7 and os.environ["RANK"] == "1":
        {action}
    loss = conv(data.x, data.edge_index).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
"""


def ended(folder: Path, world_size: int, action: str) -> str:
    """The errors of ranks that end by one."""
    (folder / "script.py").write_text(SCRIPT.format(action=action))
    start = ["--nproc-per-node", str(world_size), "--min-nodes", "10", "--partition", "even"]
    done = subprocess.run(
        [sys.executable, "-m", "fastgraph.dist", *start, "script.py"], cwd=folder,
        env=dict(os.environ), capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    return done.stderr


ALONE = {
    "an error": ("raise KeyError('alone')", "KeyError: 'alone'"),
    "an error beside a thread that goes on": (
        "threading.Thread(target=time.sleep, args=(1000,)).start(); raise KeyError('alone')",
        "KeyError: 'alone'",
    ),
    "a signal": ("os.kill(os.getpid(), signal.SIGKILL)", "Signal 9"),
    "an exit code": ("sys.exit(7)", "exitcode  : 7"),
}


@pytest.mark.usefixtures("forking_interpreter")
@pytest.mark.parametrize("how", ALONE)
def test_the_first_error_is_shown(tmp_path: Path, world_size: int, how: str) -> None:
    action, error = ALONE[how]
    said = ended(tmp_path, world_size, action)
    _, first = said.split("Root Cause (first observed failure)")
    assert re.search(r"rank +: 1 ", first) and error in first, said


DIVERGING = {
    "the end": ("break", "RanksDivergedError: .*come to (its end on rank 1|the end of its script)"),
    "another collective": (
        "data.x.max(0)[0].sum().item(); data.x.mean(0)",
        # Where sizes differ gloo ends the process.
        "RanksDivergedError|CollectiveError|Fatal Python error: Aborted",
    ),
    "another learning rate": (
        "optimizer.param_groups[0]['lr'] = 0.05",
        "RanksDivergedError: parameter 0 of SGD of shape .* is not the same on all ranks",
    ),
}


@pytest.mark.usefixtures("forking_interpreter")
@pytest.mark.parametrize("how", DIVERGING)
def test_a_decision_of_one_rank_is_an_error(tmp_path: Path, world_size: int, how: str) -> None:
    """As one by the time, in the middle of a training."""
    action, error = DIVERGING[how]
    said = ended(tmp_path, world_size, action)
    assert re.search(error, said, re.DOTALL), said


def wait_for_a_slow_rank() -> list[list[float]]:
    """Each collective, while the last rank comes late and others look at the board meanwhile."""
    import fastgraph.dist as fgd

    rank, size = (world := fgd.init()).rank, world.size
    transport._PATIENCE = timedelta(seconds=0.05)
    x = torch.arange(3.0) + 10 * rank
    everyone = [1] * size

    def exchanged() -> torch.Tensor:
        return transport.all_to_all(x[:size, None], everyone, everyone)

    found = []
    for collective in (
        lambda: transport.all_reduce(x),
        lambda: transport.all_gather(x[:1], everyone),
        exchanged,
        lambda: torch.tensor(transport.broadcast([float(rank), 7.0])),
        lambda: torch.tensor(transport.gather_objects(float(rank))),
        lambda: transport.table_of(torch.tensor([rank])),
        lambda: torch.tensor(float(transport.agree(rank < size))),
        transport.barrier,
    ):
        if rank == size - 1:
            time.sleep(0.4)
        out = collective()
        found.append(out.flatten().tolist() if isinstance(out, torch.Tensor) else [])
    return found


def test_a_slow_rank_is_waited_for(world_size: int, once_on_ranks: Any) -> None:
    ranks = range(world_size)
    for rank, found in enumerate(once_on_ranks(wait_for_a_slow_rank, world_size)):
        assert found == [
            [float(sum(k + 10 * r for r in ranks)) for k in range(3)],
            [10.0 * r for r in ranks],
            [10.0 * r + rank for r in ranks],
            [0.0, 7.0],
            [float(r) for r in ranks],
            [float(r) for r in ranks],
            [1.0],
            [],
        ]


class _EndsWithThePatience:
    """A collective that ends between a wait that was too short and the question if it has ended."""

    def __init__(self, error: str | None) -> None:
        self._error, self._waits = error, 0

    def is_completed(self) -> bool:
        return self._waits > 0

    def wait(self, _: timedelta) -> None:
        self._waits += 1
        if self._waits == 1:
            raise RuntimeError("Operation timed out!")
        if self._error is not None:
            raise RuntimeError(self._error)


def test_a_collective_that_ends_with_the_patience_has_ended() -> None:
    asked = Asked(0, "barrier of [] None")
    transport._wait(cast(Any, _EndsWithThePatience(None)), asked)
    with pytest.raises(CollectiveError, match="connection closed"):
        transport._wait(cast(Any, _EndsWithThePatience("connection closed")), asked)


def fail(how: str) -> None:
    import fastgraph.dist as fgd

    if fgd.init().rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyError("alone")
    transport.barrier()


@pytest.mark.parametrize(("how", "code"), [("killed", -9), ("raised", 1)])
def test_a_function_on_ranks(world_size: int, how: str, code: int) -> None:
    with pytest.raises(RankError, match=f"rank 1 ended with {code}:") as failed:
        forks.on_ranks(fail, world_size, how, diverges=True)
    assert how == "killed" or "KeyError: 'alone'" in str(failed.value)
