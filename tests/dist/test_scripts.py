"""Work of scripts besides training, on each rank, beside one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastgraph.dist.ranks.spawning import RankError
from tests import forks

LAUNCHED = (
    *("-m", "fastgraph.dist", "--partition", "even"),
    *("--min-nodes", "10", "--random", "exact"),
)

PREAMBLE = """
import os, random
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import Data, InMemoryDataset
import torch_geometric.transforms as T
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
n = 40
edges = torch.randint(0, n, (2, 160))
features = torch.randn(n, 6)
"""

ALIKE = {
    "edits": """
mask, x = torch.zeros(n, dtype=torch.bool), torch.ones(n, 1, requires_grad=True)
data = Data(x=x, train_mask=mask, edge_index=edges)
mask[:15] = True
print(int(data.train_mask.sum()), float(data.x[data.train_mask].sum()))
(data.x * data.x).sum().backward()
print(x.grad.view(-1).tolist(), data.x.grad.sum().item())
""",
    "formats": """
data = Data(x=features, y=torch.arange(n), edge_index=edges)
print(f"{data.x[0, 1]:.4f} {data.x.mean():.3e}", "{:d}".format(data.y[3]))
torch.save(data.x[0], "row.pt")
print(torch.load("row.pt", weights_only=True).tolist())
""",
    "directories": """
data = Data(x=features, edge_index=edges)
os.makedirs("runs/first")
os.mkdir("runs/second")
for path in ("runs", "runs/first"):
    try:
        os.makedirs(path)
    except FileExistsError as error:
        print("exists", error.filename)
os.makedirs("runs/first", exist_ok=True)
print(sorted(os.listdir("runs")))
""",
    "a dataset that draws": """
class Drawn(InMemoryDataset):
    def __init__(self):
        super().__init__(".", pre_transform=T.RandomNodeSplit(num_val=5, num_test=5))
        self.load(self.processed_paths[0])

    @property
    def processed_file_names(self):
        return ["data.pt"]

    def process(self):
        random.random(), np.random.rand(3)
        data = Data(x=features[:9], y=torch.arange(9), edge_index=edges % 9)
        self.save([self.pre_transform(data)], self.processed_paths[0])

print(int(Drawn()[0].train_mask.sum()), torch.rand(2), random.random() + np.random.rand() < 2)
print(nn.Linear(3, 2).weight)
""",
    "arrays": """
data = Data(x=features, edge_index=edges)
for array in (data.x.numpy(), data.x.cpu().numpy(), np.asarray(data.x)):
    try:
        array[0, 0] = 1.0
        wrong = len(set(os.environ) & {"WORLD_SIZE"})  # one process writes to its tensor
    except ValueError as error:
        wrong = "read-only" not in str(error)
    print("wrong", int(wrong), float(array[1].sum()))
""",
    "loaders": """
data = Data(x=features, y=torch.arange(n), edge_index=edges)
chosen = (data.x[:, 0] > 0).nonzero().view(-1)
for workers in (0, 2):
    for batch in torch.utils.data.DataLoader(chosen, batch_size=7, num_workers=workers):
        print(batch.tolist(), float(data.x[batch].sum()) > -1000)
pairs = torch.utils.data.TensorDataset(data.x, data.y)
print([y.tolist() for _, y in torch.utils.data.DataLoader(pairs, 9, num_workers=2)])
""",
}

DIFFERENT = {
    "a mask from a generator without a seed": (
        """
data = Data(x=features, edge_index=edges)
mask = torch.zeros(n, dtype=torch.bool)
mask[np.random.default_rng().permutation(n)[:13]] = True
print(float(data.x[mask].sum()))
""",
        ("mask of shape [40]", "script.py:18"),
    ),
    "labels in a graph": (
        """
labels = torch.from_numpy(np.random.default_rng().integers(0, 3, n))
data = Data(x=features, y=labels, edge_index=edges)
""",
        ("y of shape [40]", "script.py:16"),
    ),
    "an index": (
        """
data = Data(x=features, edge_index=edges)
print(data.x[int(os.environ["RANK"])])
""",
        ("an index", "script.py:16"),
    ),
    "parameters": (
        """
data = Data(x=features, edge_index=edges)
model = nn.Sequential(nn.Linear(6, 2))
with torch.no_grad():
    model[0].weight[0, 0] = np.random.default_rng().random()
model(data.x).sum().backward()
""",
        ("model.0.weight of shape [2, 6]", "script.py:19"),
    ),
    "parameters that meet no rows": (
        """
scale = nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([scale], lr=0.1)
scale.grad = torch.from_numpy(np.random.default_rng().random(3))
optimizer.step()
""",
        ("parameter 0 of SGD", "script.py:18"),
    ),
    "random states": (
        """
data = Data(x=features, edge_index=edges)
random.seed(int(np.random.default_rng().integers(2**30)))
print(float((data.x * torch.ones(6)).sum()))
""",
        ("the random state of random", "script.py:17"),
    ),
    "a worker with sharded tensors": (
        """
data = Data(x=features, edge_index=edges)
rows = [data]
loader = torch.utils.data.DataLoader(
    range(4), num_workers=1, collate_fn=lambda batch: rows[0].x[batch]
)
list(loader)
""",
        ("a worker of a data loader", "fastgraph.dist.whole"),
    ),
}


def written(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(PREAMBLE + text)
    return folder


@pytest.mark.parametrize("name", ALIKE)
def test_scripts_print_what_they_print_on_one_process(
    tmp_path: Path, world_size: int, name: str
) -> None:
    plain = forks.python("script.py", cwd=written(tmp_path / "plain", ALIKE[name]))
    assert plain.returncode == 0, plain.stderr
    folder = written(tmp_path / "ranks", ALIKE[name])
    found = forks.launched(world_size, *LAUNCHED, "script.py", cwd=folder)
    kept = [line for line in found.splitlines() if not line.startswith("fastgraph.dist")]
    for line in plain.stdout.splitlines():
        assert line in kept, found


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_between_ranks_is_an_error(tmp_path: Path, name: str) -> None:
    text, parts = DIFFERENT[name]
    folder = written(tmp_path / "ranks", text)
    with pytest.raises(RankError) as failed:
        forks.launched(2, *LAUNCHED, "script.py", cwd=folder)
    for part in parts:
        assert part in str(failed.value)


SETS = """
import sys
classes = {c: i for i, c in enumerate(set("abcdefgh"))}
if classes["a"] >= 0:
    sys.stderr.write(f"{list(classes)} {hash('one')}\\n")  # at once, lest ranks write in between
"""


def test_sets_of_strings_have_one_order(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SETS)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done: Any = subprocess.run(
        [sys.executable, *torchrun, *LAUNCHED, "script.py"], cwd=tmp_path, env=environment,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second = re.findall(r"\['.*?'\] -?\d+", done.stderr)
    assert first == second
