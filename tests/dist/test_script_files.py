"""Files that an unmodified script writes: each once, whatever it writes them by."""

from __future__ import annotations

from pathlib import Path

from tests import forks
from tests.dist.test_launching import LAUNCHED

SCRIPT = """
import csv
import gzip
import json
import logging
import os
import pathlib
import shutil
import tempfile

import numpy as np
import torch
from torch_geometric.data import Data

data = Data(x=torch.arange(40.0).view(40, 1), edge_index=torch.randint(0, 40, (2, 160)))
os.makedirs("out")
try:
    os.mkdir("out")
    print("made twice")
except FileExistsError:
    pass
logging.basicConfig(filename="out/train.log", level=logging.INFO, format="%(message)s")
for epoch in range(3):
    total = data.x.sum().item() + epoch
    logging.info("epoch %d: %s", epoch, total)
    with open("out/plain.txt", "a") as file:
        file.write(f"{total}\\n")
    with open("out/table.csv", "a", newline="") as file:
        csv.writer(file).writerow([epoch, total])
np.save("out/array.npy", np.arange(3))
np.savetxt("out/array.txt", np.arange(3))
with gzip.open("out/lines.gz", "wt") as file:
    file.write("once\\n")
with open("out/state.pt", "wb") as file:
    torch.save({"x": torch.ones(2)}, file)
path = pathlib.Path("out/best.json")
path.write_text(json.dumps({"total": total}))
print(json.loads(path.read_text()), np.load("out/array.npy"), torch.load("out/state.pt"))
print(open("out/plain.txt").read().split(), os.path.getsize("out/plain.txt"))
path.rename("out/renamed.json")
print(path.exists(), os.path.exists("out/renamed.json"))
shutil.copy("out/renamed.json", "out/copied.json")
os.remove("out/renamed.json")
print(os.path.exists("out/renamed.json"), os.path.exists("out/copied.json"))
os.makedirs("gone/deep", exist_ok=True)
open("gone/deep/file", "w").close()
shutil.rmtree("gone")
print(os.path.exists("gone/deep/file"))
with tempfile.TemporaryDirectory() as folder:
    name = os.path.join(folder, "own")
    open(name, "w").write(str(os.getpid()))
    print(open(name).read() == str(os.getpid()), os.listdir(folder))
print("end")
"""


def files(folder: Path) -> dict[str, bytes]:
    """The content of files below a folder, but for the script and what has a date in it."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix not in (".py", ".gz")
    }


def test_each_file_is_written_once(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("plain", "ranks")]
    for folder in folders:
        folder.mkdir()
        (folder / "script.py").write_text(SCRIPT)
    plain = forks.python("script.py", cwd=folders[0])
    options = ("--rank-logs", str(tmp_path / "logs"))
    found = forks.launched(3, *LAUNCHED, *options, "script.py", cwd=folders[1])
    assert plain.stdout.endswith("end\n"), plain.stderr
    assert found == plain.stdout
    assert files(folders[1]) == files(folders[0])
    for rank in (1, 2):
        logs = tmp_path / "logs" / f"rank-{rank}"
        assert (logs / "output.txt").read_text() == plain.stdout
        kept = logs / "files" / str(folders[1]).lstrip("/") / "out/plain.txt"
        assert kept.read_text() == (folders[0] / "out/plain.txt").read_text()


def test_copies_are_gone_after_the_end(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("open('file', 'w').write('text')")
    (tmp_path / "temporary").mkdir()
    forks.launched(2, *LAUNCHED, "script.py", cwd=tmp_path, TMPDIR=str(tmp_path / "temporary"))
    assert (tmp_path / "file").read_text() == "text"
    assert not list((tmp_path / "temporary").glob("**/file"))
