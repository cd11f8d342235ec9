"""A checkpoint is restored on any number of ranks, or there is an error."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, Linear

import fastgraph.dist as fgd
from fastgraph.dist.ranks.world import WORLD
from tests import forks
from tests.dist.graphs import NUM_CLASSES, PARTITIONS, graph


class Embedded(nn.Module):
    """Has a parameter with a row for each node, which is sharded as the nodes are."""

    def __init__(self, data: Data) -> None:
        super().__init__()
        self.table = nn.Parameter(data.x.detach() * 0.5)
        self.first = GCNConv(data.x.shape[1], 6)
        self.second = GCNConv(6, NUM_CLASSES)

    def forward(self, edge_index: Tensor) -> Tensor:
        x = F.dropout(self.table, 0.3, self.training)
        return self.second(self.first(x, edge_index).relu(), edge_index)


class Training:
    def __init__(self, data: Data) -> None:
        torch.manual_seed(3)
        self.data = data
        self.model = Embedded(data)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.history = data.y * 0

    def step(self) -> float:
        self.optimizer.zero_grad()
        out = self.model(self.data.edge_index)
        loss = F.cross_entropy(out[self.data.train_mask], self.data.y[self.data.train_mask])
        loss.backward()
        self.optimizer.step()
        self.history = self.history + self.data.y
        return float(loss.detach())

    def save(self, folder: Path, epoch: int) -> None:
        extra = {"epoch": epoch, "history": self.history}
        fgd.save(folder, self.model, self.optimizer, extra=extra)

    def load(self, folder: Path) -> int:
        extra = fgd.load(folder, self.model, self.optimizer)
        self.history = extra["history"]
        return int(extra["epoch"])


STEPS = 2


def training(partition: str) -> Training:
    torch.set_default_dtype(torch.float64)
    fgd.init(check=True)
    return Training(fgd.shard(graph(), parts=PARTITIONS[partition](WORLD.size)))


def begin(folder: Path) -> list[float]:
    """On three ranks."""
    run = training("uneven")
    losses = [run.step() for _ in range(STEPS)]
    run.save(folder, STEPS)
    return losses


def carry_on(folder: Path) -> dict[str, Any]:
    """On two ranks."""
    whole = training("one is empty")
    undisturbed = [whole.step() for _ in range(3 * STEPS)]
    run = training("uneven")
    epoch = run.load(folder)
    losses = [run.step() for _ in range(STEPS)]
    run.save(folder, epoch + STEPS)
    next_losses = [run.step() for _ in range(STEPS)]
    again = training("uneven")
    again.load(folder)
    # One rank alone cannot write.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if WORLD.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    with pytest.raises(fgd.CheckpointError) as failed:
        again.save(folder, 1000)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return {
        "undisturbed": undisturbed,
        "losses": losses,
        "next": next_losses,
        "again": [again.step() for _ in range(STEPS)],
        "failed": str(failed.value),
        "files": sorted(file.name for file in folder.iterdir()),
    }


def finish(folder: Path) -> dict[str, Any]:
    """On four ranks."""
    run = training("one is empty")
    epoch = run.load(folder)
    table, state = run.model.table, run.optimizer.state_dict()["state"][0]
    sharded = all(fgd.is_sharded(x) for x in (table, state["exp_avg"], run.history))
    laid_out = table.rows is run.data.x.rows and state["exp_avg"].rows.same(table.rows)
    losses = [run.step() for _ in range(STEPS)]
    history = torch.equal(fgd.whole(run.history), graph().y * 3 * STEPS)
    return {
        "epoch": epoch, "losses": losses, "history": history, "sharded": sharded and laid_out,
    }  # fmt: skip


def test_three_ranks_then_two_then_four(tmp_path: Path) -> None:
    first = forks.on_ranks(begin, 3, tmp_path)
    second = forks.on_ranks(carry_on, 2, tmp_path)
    third = forks.on_ranks(finish, 4, tmp_path)
    undisturbed = second[0]["undisturbed"]
    for rank in range(2):
        found = first[rank] + second[rank]["losses"] + third[rank]["losses"]
        assert found == pytest.approx(undisturbed, rel=1e-12)
    for last in third:
        assert last["epoch"] == 2 * STEPS
        assert last["history"] and last["sharded"]
    for rank in second:
        assert rank["again"] == rank["next"]  # to the bit, on as many ranks
        assert re.search(r"no checkpoint was written.*rank 1: OSError", rank["failed"])
        assert rank["files"] == ["000002"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("rough", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("none", torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)).relu())


def tied(seed: int) -> tuple[Tied, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tied()
    return model, torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.8, 0.99))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    noise = random.random() + float(np.random.rand())
    loss = F.dropout(model(torch.randn(5, 3)), 0.4).square().mean() * noise
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a checkpoint of a model after a step."""
    model, optimizer = tied(0)
    step(model, optimizer)
    fgd.save(tmp_path / "kept", model, optimizer, extra={"epoch": 1})
    return tmp_path / "kept"


def test_everything_comes_back(tmp_path: Path) -> None:
    model, optimizer = tied(0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, 10)
    step(model, optimizer)
    extra = {
        "scheduler": scheduler.state_dict(), 3: [1.5, float("inf"), None, True, "text"],
        "best": (torch.tensor(2.0), torch.arange(6).view(2, 3).T), (0, "key"): {},
    }  # fmt: skip
    assert fgd.save(tmp_path, model, optimizer, extra=extra) == tmp_path / "000001"
    expected = [step(model, optimizer) for _ in range(3)]
    groups = optimizer.state_dict()["param_groups"]
    other, other_optimizer = tied(7)
    random.seed(9)
    np.random.seed(9)
    found = fgd.load(tmp_path, other, other_optimizer)
    assert [step(other, other_optimizer) for _ in range(3)] == expected
    assert other.first.weight is other.second.weight
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), other.buffers(), strict=True))
    assert other_optimizer.state_dict()["param_groups"] == groups
    assert found["scheduler"] == extra["scheduler"] and found[3] == extra[3]
    assert found[0, "key"] == {}
    assert all(torch.equal(a, b) for a, b in zip(found["best"], extra["best"], strict=True))


def test_the_newest_are_kept(tmp_path: Path) -> None:
    model, _ = tied(0)
    (tmp_path / "000001.unfinished").mkdir()  # by a run that died
    for epoch in range(4):
        fgd.save(tmp_path, model, extra=epoch, keep=2)
    assert sorted(child.name for child in tmp_path.iterdir()) == ["000003", "000004"]
    assert fgd.load(tmp_path, model) == 3
    assert fgd.load(tmp_path / "000003", model) == 2


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    others = ["2024", "20240101", "000000", "data.unfinished"]
    for name in others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    model, _ = tied(0)
    for epoch in range(3):
        fgd.save(tmp_path, model, extra=epoch)
    assert fgd.load(tmp_path, model) == 2
    last = {child.name for child in tmp_path.iterdir()} - set(others)
    assert last == {"20240104"}
    assert all((tmp_path / name / "file").exists() for name in others)


def test_an_empty_folder_is_no_checkpoint(folder: Path) -> None:
    (folder / "000099").mkdir()
    model, _ = tied(0)
    assert fgd.load(folder, model) == {"epoch": 1}


def test_groups_that_do_not_fit_change_nothing(folder: Path) -> None:
    model, _ = tied(5)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    state = torch.get_rng_state()
    groups = [{"params": list(m.parameters())} for m in (model.first, model.norm)]
    with pytest.raises(ValueError, match=r"groups of \[5\] parameters, .* got \[2, 2\]"):
        fgd.load(folder, model, torch.optim.Adam(groups))
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("depth", [65, 2000, 100_000])
def test_values_that_are_nested_too_deeply(tmp_path: Path, depth: int) -> None:
    model, _ = tied(0)
    with pytest.raises(TypeError, match="extra must be nested at most 64 deep"):
        fgd.save(tmp_path, model, extra=nested(depth))
    assert not list(tmp_path.iterdir())
    fgd.save(tmp_path, model, extra=nested(64))
    assert fgd.load(tmp_path, model) == nested(64)


def test_a_manifest_that_is_nested_too_deeply(folder: Path) -> None:
    manifest = folder / "000001" / "manifest.json"
    manifest.write_text("[" * 100_000)
    with pytest.raises(fgd.FileFormatError, match="expected JSON"):
        fgd.load(folder, tied(0)[0])


def test_nothing_to_load(tmp_path: Path) -> None:
    model, _ = tied(0)
    for path in (tmp_path, tmp_path / "never"):
        assert fgd.load(path, model, missing_ok=True) is None
        with pytest.raises(FileNotFoundError, match="expected a folder with checkpoints"):
            fgd.load(path, model)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def edit(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1] + b"x")


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")


def add_another(file: Path) -> None:
    (file.parent / "more.safetensors").touch()


def make_newer(file: Path) -> None:
    file.write_text(file.read_text().replace('"version": 1', '"version": 2', 1))


def edit_a_number(file: Path) -> None:
    file.write_text(file.read_text().replace("0.99", "0.98"))


def make_foreign(file: Path) -> None:
    file.write_text('{"format": "another"}')


def make_foreign_list(file: Path) -> None:
    file.write_text("[1]")


DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    ("*.safetensors", cut, "bytes, got .* cut off"),
    ("*.safetensors", edit, "it is corrupt"),
    ("*.safetensors", lengthen, "it is another file"),
    ("*.safetensors", Path.unlink, "bytes, got none"),
    ("*.safetensors", add_another, "expected the files .* got .*more.safetensors"),
    ("manifest.json", cut, "expected JSON, got what is cut off"),
    ("manifest.json", make_newer, "expected version 1 .* got 2, written by fastgraph"),
    ("manifest.json", edit_a_number, "expected the SHA-256"),
    ("manifest.json", make_foreign, "expected the format .* got 'another'"),
    ("manifest.json", make_foreign_list, "expected the format .* got None"),
    ("manifest.json", Path.unlink, "expected a folder with a manifest.json"),
]


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGES)
def test_files_that_are_not_what_was_written(
    folder: Path, name: str, damage: Callable[[Path], None], message: str
) -> None:
    (file,) = folder.rglob(name)
    damage(file)
    model, optimizer = tied(5)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(fgd.FileFormatError, match=message) as failed:
        fgd.load(folder, model, optimizer)
    assert str(file.parent) in str(failed.value)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_file_instead_of_a_folder(tmp_path: Path) -> None:
    model, _ = tied(0)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    with pytest.raises(fgd.FileFormatError, match="expected a folder with checkpoints, got a file"):
        fgd.load(tmp_path / "model.pt", model)


def test_files_are_no_pickles(folder: Path) -> None:
    (file,) = folder.rglob("*.safetensors")
    for path in folder.rglob("*"):
        if path.is_file():
            assert path in (file, file.parent / "manifest.json")
    header = int.from_bytes(file.read_bytes()[:8], "little")
    names = json.loads(file.read_bytes()[8 : 8 + header])
    assert "model.first.weight" in names and "optimizer.state.0.exp_avg" in names


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"a": [object()]}, r"extra.a.0 must be of numbers.* got object"),
        (np.float32(1), r"extra must be of numbers.* got float32"),
        (torch.eye(2).to_sparse(), "extra must be a dense tensor"),
        (
            torch.ones(2, dtype=torch.complex128),
            "extra must be a dense tensor .* got torch.complex128",
        ),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "extra.a.b stands for two"),
    ],
)
def test_what_cannot_be_kept(tmp_path: Path, extra: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        fgd.save(tmp_path, tied(0)[0], extra=extra)
    assert not list(tmp_path.iterdir())


def test_other_arguments(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = tied(0)
    with pytest.raises(ValueError, match="keep must be an integer above 0, got 0"):
        fgd.save(folder, model, keep=0)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got OrderedDict"):
        fgd.save(folder, model.state_dict())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer or None"):
        fgd.load(folder, model, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model.weight must have a shape"):
        fgd.save(folder, Linear(-1, 2))
    with pytest.raises(RuntimeError, match="Missing key"):
        fgd.load(folder, nn.Linear(2, 2))
    fgd.save(folder, model)
    with pytest.raises(ValueError, match="optimizer must be None"):
        fgd.load(folder, model, optimizer)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"call fastgraph.dist.init\(\)"):
        fgd.save(folder, model)


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
import fastgraph.dist as fgd
from fastgraph.dist.files import storage  # imported later, it would count as operations on files

folder = Path(sys.argv[1])
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

def save(value, kill_at):
    with torch.no_grad():
        model.weight.fill_(value)
    count = 0
    def hook(event, args):
        nonlocal count
        if event == "open" or event.startswith(("os.", "shutil.")):
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    fgd.save(folder, model, optimizer, extra=value)

if os.fork() == 0:
    save(0, None)
    os._exit(0)
assert os.wait()[1] == 0
last, killed, outcomes = 0, 0, set()
while True:
    value = last + 1
    child = os.fork()
    if child == 0:
        save(value, killed + 1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    found = fgd.load(folder, model, optimizer)
    assert found in (last, value), (last, value, found)
    assert bool((model.weight == found).all())
    if status == 0:
        assert found == value
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
    outcomes.add(found == value)
    last, killed = found, killed + 1
assert [child.name for child in folder.iterdir()] == [max(p.name for p in folder.iterdir())]
print(killed, sorted(outcomes))
"""


def test_a_process_killed_at_each_of_its_operations_on_files(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    killed, _, outcomes = done.stdout.strip().partition(" ")
    assert int(killed) > 10 and outcomes == "[False, True]"
