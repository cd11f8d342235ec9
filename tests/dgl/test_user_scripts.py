"""Scripts as users of DGL write them, unmodified, beside one process: they print the same."""

from __future__ import annotations

from pathlib import Path

import pytest

import fastgraph.dgl
from tests import forks
from tests.dist.test_scripts import LAUNCHED

fastgraph.dgl.fix_import()
pytest.importorskip("dgl", reason="DGL is not installed: see `make test-dgl`")

FOLDER = Path(__file__).parent / "user_scripts"

# DGL makes some parameters by `torch.FloatTensor`, whatever the default is.
BEFORE = """import torch, fastgraph.dgl; fastgraph.dgl.fix_import()
torch.set_default_dtype(torch.float64); torch.FloatTensor = torch.DoubleTensor
"""

SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))


def written(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(BEFORE + text)
    return folder


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_prints_what_it_prints_on_one_process(
    tmp_path: Path, world_size: int, name: str
) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    plain = forks.python("script.py", cwd=written(tmp_path / "plain", text))
    assert plain.returncode == 0, plain.stderr
    folder = written(tmp_path / "ranks", text)
    found = forks.launched(world_size, *LAUNCHED, "script.py", cwd=folder)
    expected = plain.stdout.splitlines()
    assert expected
    # Other lines are warnings.
    assert [line for line in found.splitlines() if line in expected] == expected, found


DRAWN = """
import dgl, torch
from dgl.data import DGLDataset

class Drawn(DGLDataset):
    def process(self):
        self.graph = dgl.rand_graph(9, 30)

    def __getitem__(self, index):
        return self.graph

    def __len__(self):
        return 1

    def save(self):
        dgl.save_graphs("drawn.bin", self.graph)

    def load(self):
        self.graph = dgl.load_graphs("drawn.bin")[0][0]

    def has_cache(self):
        import os
        return os.path.exists("drawn.bin")

for reload in (False, False, True):
    graph = Drawn("drawn", raw_dir=".", force_reload=reload)[0]
    print("dataset", [end.tolist() for end in graph.edges()])
    print("drawn", [end.tolist() for end in dgl.rand_graph(9, 5).edges()])
    print("drawn", dgl.random.choice(100, 5).tolist(), torch.rand(2).tolist())
"""


@pytest.mark.parametrize("seed", ["", "dgl.seed(5)"])
def test_generators_agree_after_the_first_rank_has_made_a_dataset(
    tmp_path: Path, world_size: int, seed: str
) -> None:
    folder = written(tmp_path, DRAWN.replace("for reload", f"{seed}\nfor reload"))
    first = forks.launched(
        world_size, *LAUNCHED, "--rank-logs", "logs", "script.py", cwd=folder
    ).splitlines()
    drawn = [line for line in first if line.startswith(("dataset", "drawn"))]
    assert len(set(drawn)) >= 6
    for rank in range(1, world_size):
        of_rank = (tmp_path / "logs" / f"rank-{rank}" / "output.txt").read_text()
        assert of_rank.splitlines() == drawn


MADE = """
import threading
import dgl, torch
from dgl.data import DGLDataset

class Made(DGLDataset):
    def process(self):
        self.graph = dgl.graph((torch.arange(40), torch.arange(40) * 7 % 40))
        self.graph.ndata["mask"] = torch.arange(40) % 3 == 0
        self.forgotten = ["by the file"]
        BOUND

    def __getitem__(self, index):
        return self.graph

    def __len__(self):
        return 1

    def save(self):
        FILE

    def load(self):
        self.graph = dgl.load_graphs("made.bin")[0][0]

    def has_cache(self):
        import os
        return os.path.exists("made.bin")

made = Made("made", raw_dir=".")
mask = made[0].ndata["mask"]
print(mask.dtype, int((~mask).sum()), made.forgotten)
"""


@pytest.mark.parametrize(
    ("bound", "file"),
    [("", 'dgl.save_graphs("made.bin", self.graph)'), ("self.lock = threading.Lock()", "pass")],
    ids=["sent", "made by each"],
)
def test_ranks_have_of_a_dataset_what_the_first_has_made(
    tmp_path: Path, world_size: int, bound: str, file: str
) -> None:
    folder = written(tmp_path, MADE.replace("BOUND", bound).replace("FILE", file))
    found = forks.launched(world_size, *LAUNCHED, "--rank-logs", "logs", "script.py", cwd=folder)
    expected = "torch.bool 26 ['by the file']"
    assert expected in found.splitlines()
    for rank in range(1, world_size):
        of_rank = (tmp_path / "logs" / f"rank-{rank}" / "output.txt").read_text()
        assert of_rank.splitlines() == [expected]
