"""An unmodified script on several ranks prints what it prints on one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastgraph.dist.operators import links
from fastgraph.dist.running import launch
from tests import forks

SCRIPT = """
import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
edges = torch.randint(0, 40, (2, 160))
data = Data(x=torch.randn(40, 6), y=torch.randint(0, 3, (40,)), edge_index=edges)
data.train_mask = torch.arange(40) % 3 == 0
print(data, (type(data.x).__name__, data.x.rows.mode) if {show_type} else "")
conv = GCNConv(6, 3)
optimizer = torch.optim.Adam(conv.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    out = F.dropout(conv(data.x, data.edge_index), 0.2)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    print(f"{{loss.item():.10f}}")
torch.save(out, "out.pt")
print(torch.load("out.pt").shape)
"""


def run(folder: Path, *words: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


LAUNCHED = (
    *("-m", "fastgraph.dist", "--partition", "even"),
    *("--min-nodes", "10", "--random", "exact"),
)


def test_a_script_prints_the_same(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(show_type=False))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    found = run(tmp_path, *torchrun, *LAUNCHED, "--check", "--weights", "2,1", "script.py")
    plain = forks.python("script.py", cwd=tmp_path)
    assert found == plain.stdout, plain.stderr


def test_a_graph_that_the_script_makes_is_sharded(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(show_type=True))
    options = ("--weights", "auto", "--mode", "heads")
    found = forks.launched(2, *LAUNCHED, *options, "script.py", cwd=tmp_path)
    assert re.search(r"\) \('ShardedTensor', 'heads'\)$", found, re.MULTILINE)


LARGER = """
import sys
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GATv2Conv, GCNConv

torch.manual_seed(0)
data = Data(x=torch.randn(600, 32), edge_index=torch.randint(600, (2, 20_000)))
layers = torch.nn.ModuleList([GATv2Conv(32, 16, heads=4), GCNConv(64, 32)])
optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    x = data.x
    for layer in layers:
        x = layer(x, data.edge_index)
    loss = x.square().mean()
    loss.backward()
    optimizer.step()
print(loss.item().hex())
"""


def test_a_second_run_takes_the_modes_of_the_first_one(tmp_path: Path) -> None:
    """And so has its bits; what ranks measured is kept, and not measured again."""
    (tmp_path / "script.py").write_text(LARGER)
    runs, kept = [], []
    for _ in range(2):
        done = forks.launched(2, *LAUNCHED, "script.py", cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path))
        runs.append(re.sub(r"\d+ gloo", "", done))
        (file,) = (tmp_path / "fastgraph" / links.KIND).glob("*.json")
        kept.append((file.stat().st_mtime_ns, file.read_bytes()))
    assert runs[0] == runs[1] and kept[0] == kept[1]
    chosen = r"^fastgraph.dist: (attention with 4 heads|sums or extrema of 32 channels) by \w+: "
    assert re.findall(chosen, runs[0], re.MULTILINE) == [
        "attention with 4 heads",
        "sums or extrema of 32 channels",
    ]


OWN_DATASET = """
import torch
from torch_geometric.data import Data, Dataset

class Own(Dataset):
    def len(self):
        return 1

    def get(self, index):
        edges = torch.randint(0, 40, (2, 160), generator=torch.Generator().manual_seed(0))
        return Data(x=torch.arange(40.0), edge_index=edges)

data = Own(None)[0]
print(type(data.x).__name__, data.x.sum().item())
"""


def test_a_graph_of_the_scripts_own_dataset_is_sharded_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(OWN_DATASET)
    found = forks.launched(2, *LAUNCHED, "script.py", cwd=tmp_path)
    assert found.splitlines()[-1] == "ShardedTensor 780.0"


ENDING = """
import atexit
import os

def say():
    names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
    print([name for name in names if "gloo" in name])

atexit.register(say)  # runs after what is registered later
import torch
import torch.distributed as dist
import fastgraph.dist as fgd

fgd.init()
dist.all_reduce(torch.ones(2))
import torch.distributed.nn.functional
"""


def test_threads_of_the_group_end_before_the_interpreter(tmp_path: Path) -> None:
    """They free tensors, and would bring it down while it ends."""
    (tmp_path / "script.py").write_text(ENDING)
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    assert run(tmp_path, *ranks, "script.py").splitlines()[-1] == "[]"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A script that is not run, of a process that may set variables."""
    monkeypatch.setenv(launch.STORE_OF_ITS_OWN, "0")
    monkeypatch.delenv("RANK", raising=False)
    path = tmp_path / "script.py"
    path.touch()
    return str(path)


def test_ranks_are_started_by_torchrun(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr("torch.distributed.run.main", started.append)
    of_ranks, of_script = ["--weights", "2,1", "--check"], ["--max-restarts", "9", "-m"]
    launch.main(
        ["--weights", "2,1", "--max-restarts=3", "--check", "--nproc-per-node", "2",
         script, *of_script]
    )  # fmt: skip
    (words,) = started
    assert words[:3] == ["--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    assert words[3:] == ["-m", "fastgraph.dist", *of_ranks, script, *of_script]
    assert os.environ[launch.STORE_OF_ITS_OWN] == "1"


@pytest.mark.parametrize(
    ("words", "weights"),
    [("auto", "auto"), ("uniform", None), ("2,1.5", [2.0, 1.5])],
)
def test_weights(script: str, words: str, weights: object) -> None:
    assert launch.parser().parse_args(["--weights", words, script]).weights == weights


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--weights", "fair"], "expected auto, uniform or numbers such as 2,1, got 'fair'"),
        (["--nproc-per-node", "0"], "must be an integer above 0, got 0"),
        (["--nproc-per-node", "2", "--max-restarts", "-1"], "must be an integer above -1, got -1"),
        (["--max-restarts", "2"], "--max-restarts needs --nproc-per-node"),
        (["--nproc-per-node", "2", "--random", "no"], "invalid choice: 'no'"),
        (["--nproc-per-node", "2", "--mode", "no"], "invalid choice: 'no'"),
    ],
)
def test_bad_options(
    script: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        launch.main([*words, script])
    assert message in capsys.readouterr().err


def test_a_rank_starts_no_ranks(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        launch.main(["--nproc-per-node", "2", script])
    assert "this is a rank" in capsys.readouterr().err


def test_torchrun_that_will_not_restart_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    for value, is_told in (("0", True), ("1", False)):
        monkeypatch.setenv(launch.STORE_OF_ITS_OWN, value)
        launch._say_how_to_restart()
        told = f"set {launch.STORE_OF_ITS_OWN}=1 before torchrun" in capsys.readouterr().err
        assert told is is_told


PROCESSED = """
import warnings
import torch
from torch_geometric import transforms as T
from torch_geometric.data import Data, InMemoryDataset

class Own(InMemoryDataset):
    raw_file_names, processed_file_names = [], ["data.pt"]

    def __init__(self, root, **options):
        super().__init__(root, **options)
        self.load(self.processed_paths[0])

    def process(self):
        edges = torch.randint(0, 40, (2, 160))
        data = Data(x=torch.rand(40, 3, dtype=torch.float64), y=torch.zeros(40), edge_index=edges)
        data = self.pre_transform(data)
        {save}

warnings.simplefilter("ignore")
torch.manual_seed(3)
for force_reload in (False, False, True):
    split = T.RandomNodeSplit(num_val=5, num_test=5)
    data = Own("own", pre_transform=split, force_reload=force_reload)[0]
    print(f"{{data.x.sum():.6f}}", int(data.train_mask.sum()), type(data.x).__name__)
    print(torch.rand(1).item())
"""


@pytest.mark.parametrize(
    "save",
    [
        "self.save([data], self.processed_paths[0])",
        "torch.save(self.collate([data]), self.processed_paths[0])",
    ],
)
def test_a_dataset_is_processed_by_one_rank_alone(tmp_path: Path, save: str) -> None:
    """With random numbers, of which all ranks have drawn as many afterwards."""
    (tmp_path / "script.py").write_text(PROCESSED.format(save=save))
    plain = forks.python("script.py", cwd=tmp_path)
    (tmp_path / "own/processed/data.pt").unlink()
    found = forks.launched(3, *LAUNCHED, "script.py", cwd=tmp_path)
    assert found.replace("ShardedTensor", "Tensor") == plain.stdout, plain.stderr
    assert found.count("ShardedTensor") == 3
