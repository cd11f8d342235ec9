"""The examples of graph transformers, with few and small graphs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import forks

pytest.importorskip("torch_geometric")

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "graph_transformers"
LOSS = re.compile(r"^Epoch: \d+, Loss: (\S+),", re.MULTILINE)


def losses(script: str, *words: str, cwd: Path) -> list[str]:
    done = forks.python(str(FOLDER / script), *words, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return LOSS.findall(done.stdout)


@pytest.mark.parametrize(
    ("script", "size"),
    [
        ("nodes.py", ["--nodes", "120"]),
        ("graphs.py", ["--graphs", "40", "--batch-size", "16"]),
        ("sequences.py", ["--nodes", "240", "--clusters", "6", "--together", "2"]),
    ],
)
def test_they_train(script: str, size: list[str], tmp_path: Path) -> None:
    words = [*size, "--lr", "0.01", "--warm-up", "1", "--epochs", "4"]
    found = losses(script, *words, cwd=tmp_path)
    assert len(found) == 4 and float(found[-1]) < float(found[0])
    # To compute layers once more changes nothing, dropout included.
    assert losses(script, *words, "--checkpoint", cwd=tmp_path) == found


def test_sequences_lose_the_edges_between_them(tmp_path: Path) -> None:
    words = ["--nodes", "240", "--clusters", "4", "--epochs", "1", "--together"]
    some, all_of_them = (
        forks.python(str(FOLDER / "sequences.py"), *words, together, cwd=tmp_path).stdout
        for together in ("2", "4")
    )
    assert "Lost edges: 0.0%" in all_of_them
    lost = re.search(r"Lost edges: (\S+)%", some)
    assert lost is not None and 0 < float(lost[1]) < 100


def test_mixed_precision(tmp_path: Path) -> None:
    words = ["--graphs", "40", "--batch-size", "16", "--epochs", "1"]
    exact, rounded = (losses("graphs.py", *words, *more, cwd=tmp_path) for more in ([], ["--amp"]))
    assert rounded != exact and float(rounded[0]) == pytest.approx(float(exact[0]), rel=0.05)
