"""A rank that dies loses nothing that was not lost since the last checkpoint."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests import forks

RANKS, EPOCHS, KILLS = 2, 5, 2

# Counts what a rank does with others and with files, and dies at the count that is asked for.
SCRIPT = """
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

import fastgraph.dist as fgd
from fastgraph.dist.files import storage
from fastgraph.dist.ranks import transport

folder = Path(sys.argv[1])
rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
kills = json.loads(os.environ["KILLS"])
kill = kills[restarts] if restarts < len(kills) else [None, None]
events = 0


def happens(*_):
    global events
    events += 1
    if kill == [rank, events]:
        os.kill(os.getpid(), signal.SIGKILL)


def hook(event, _):
    if event == "open" or event.startswith(("os.", "shutil.")):
        happens()


issue = transport._issue
transport._issue = lambda *args, **options: (happens(), issue(*args, **options))[1]
sys.addaudithook(hook)

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
edges = torch.randint(0, 40, (2, 160))
data = Data(x=torch.randn(40, 6), y=torch.randint(0, 3, (40,)), edge_index=edges)
conv = GCNConv(6, 3)
table = torch.nn.Parameter(data.x.detach() * 1)
assert fgd.is_sharded(table)
conv.register_parameter("table", table)
optimizer = torch.optim.Adam(conv.parameters(), lr=0.1)
losses = fgd.load(folder / "kept", conv, optimizer, missing_ok=True) or []
for _ in range(len(losses), EPOCHS):
    optimizer.zero_grad()
    out = conv(F.dropout(conv.table, 0.2), data.edge_index)
    loss = F.cross_entropy(out, data.y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    fgd.save(folder / "kept", conv, optimizer, extra=losses)
if rank == 0:
    (folder / "end.json").write_text(json.dumps([losses, restarts, events]))
"""


def run(folder: Path, kills: list[tuple[int, int]]) -> tuple[list[float], int, int]:
    """All losses, the number of restarts, and what rank 0 did since the last one.

    Args:
        folder: for files.
        kills: for each start the rank that dies, and at which of its events.
    """
    if not (folder / "end.json").exists():
        script = folder / "script.py"
        script.write_text(SCRIPT.replace("EPOCHS", str(EPOCHS)))
        words = ["--partition=even", "--min-nodes", "10", str(script), str(folder)]
        variables = {"KILLS": json.dumps(kills), "TORCHELASTIC_RESTART_COUNT": "0"}
        if kills:
            start = ["--nproc-per-node", str(RANKS), "--max-restarts", str(len(kills))]
            done = subprocess.run(
                [sys.executable, "-m", "fastgraph.dist", *start, *words],
                env={**os.environ, **variables}, capture_output=True, text=True,
                timeout=250, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
        else:
            forks.launched(RANKS, "-m", "fastgraph.dist", *words, cwd=folder, **variables)
    losses, restarts, events = json.loads((folder / "end.json").read_text())
    return losses, restarts, events


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # that of this run, for all of its processes
    folder /= "undisturbed"
    with FileLock(f"{folder}.lock"):
        folder.mkdir(exist_ok=True)
        return run(folder, [])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--kills") // KILLS))


@pytest.mark.usefixtures("forking_interpreter")
def test_ranks_that_are_killed_at_random(tmp_path: Path, undisturbed: Any, seed: int) -> None:
    losses, _, events = undisturbed
    draw = random.Random(seed)
    # Early enough for the kill to happen, as ranks do less after each.
    kills = [(draw.randrange(RANKS), draw.randint(1, events // (KILLS + 1))) for _ in range(KILLS)]
    found, restarts, _ = run(tmp_path, kills)
    assert restarts == KILLS
    assert found == losses and len(losses) == EPOCHS  # to the bit
