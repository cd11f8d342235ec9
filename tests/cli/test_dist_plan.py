"""``python -m fastgraph dist-plan``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastgraph.cli.dist_plan import chosen, devices_of
from fastgraph.dist.forecast.forecast import Total
from tests.forks import fastgraph

SCRIPT = """
import sys
import torch
from torch_geometric.nn import GCNConv, TransformerConv

torch.manual_seed(0)
x, edges = torch.randn(300, 8), torch.randint(300, (2, 2000))
first, second = TransformerConv(8, 4, heads=4), GCNConv(16, 3)
print("with", sys.argv[1:])
for epoch in range(100):
    second(first(x, edges).relu(), edges).square().mean().backward()
    print("epoch", epoch)
"""
LINKS = ("--latency", "20", "--bandwidth", "10")


def test_a_script(tmp_path: Path) -> None:
    pytest.importorskip("pymetis")
    (tmp_path / "train.py").write_text(SCRIPT)
    files = ("--json", "plan.json", "--plot", "plan.svg")
    words = ("--devices", "1..8", *LINKS, *files, "train.py", "--json", "mine")
    done = fastgraph("dist-plan", *words, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "with ['--json', 'mine']" in done.stderr and "epoch 1" in done.stderr
    assert "epoch 2" not in done.stderr  # whose backward pass ends the script
    assert "Modelled" in done.stdout and "Layers: TransformerConv, GCNConv" in done.stdout
    assert "20 us of a message, 10 GB/s" in done.stdout
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["layers"] == ["TransformerConv", "GCNConv"]
    assert [one["devices"] for one in found["devices"]] == [1, 2, 4, 8]
    for one in found["devices"][1:]:
        assert one["modes"]["heads"]["layers"] == ["heads", "halo"]  # of sums there are none
        assert one["auto"]["sent"] > 0 and one["auto"]["memory"] > 0
    assert (tmp_path / "plan.svg").read_text().count("<path") > 10


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ("print('no model')", LINKS, "ended after 0 backward passes"),
        ("raise SystemExit(3)", LINKS, "ended with 3 before a step of training was seen"),
        ("", (*LINKS, "--devices", "8..2"), "--devices: expected numbers above 0 like 1..512"),
        ("", ("--latency", "-1"), "--latency must be above 0, got -1.0"),
    ],
)
def test_what_cannot_be_planned(
    tmp_path: Path, script: str, words: tuple[str, ...], message: str
) -> None:
    (tmp_path / "train.py").write_text(script)
    done = fastgraph("dist-plan", *words, "train.py", cwd=tmp_path)
    assert done.returncode in (1, 2) and message in done.stderr


def test_numbers_of_devices() -> None:
    assert devices_of("1..512") == [2**n for n in range(10)]
    assert devices_of("3..12") == [3, 4, 8, 12]
    assert devices_of("8,2,4,2") == [2, 4, 8]


def test_modes_of_layers_in_a_cell() -> None:
    total = Total(1.0, 1.0, 1.0, ["halo", "halo", "grid", "heads"], [(4, 2)])
    assert chosen(total) == "2 halo, grid 4x2, heads"
    assert chosen(total._replace(layers=["grid", "grid"], meshes=[(2, 2)] * 2)) == "grid 2x2"
