"""``python -m fastgraph context``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fastgraph import ops
from fastgraph.cli.main import main
from fastgraph.tokens import HopFeatures, write_graph
from fastgraph.tokens.graph_files import graph_of_edges


def ended(*arguments: object) -> object:
    with pytest.raises(SystemExit) as error:
        main(["context", *map(str, arguments)])
    return error.value.code


def test_features_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edges = torch.randint(0, 40, (2, 90), generator=torch.Generator().manual_seed(0))
    x = torch.randn(44, 3)
    write_graph(tmp_path / "graph", graph_of_edges(edges, 44))
    np.save(tmp_path / "x.npy", x.numpy())
    given = tmp_path / "graph", tmp_path / "x.npy", tmp_path / "context"
    assert ended(*given, "--dtype", "float32", "--memory", "20MiB") == 0
    assert "44 rows of 3 x 3 in float32" in " ".join(capsys.readouterr().out.split())
    found = HopFeatures(tmp_path / "context", verify=True)
    first = ops.gcn(x, edges)
    assert torch.equal(found.rows, torch.stack([x, first, ops.gcn(first, edges)], 1))

    def failing(*arguments: object) -> str:
        assert ended(*arguments) not in (0, None)
        return " ".join(capsys.readouterr().err.split())

    assert "resume finishes" in failing(*given)
    assert "expected dtype 'bfloat16', got 'float32'" in failing(*given, "--resume")
    assert ended(*given, "--dtype", "float32", "--resume") == 0
    np.save(tmp_path / "short.npy", x[:40].numpy())
    other = tmp_path / "graph", tmp_path / "short.npy", tmp_path / "other"
    assert "features must have shape [44, channels]" in failing(*other)
    (tmp_path / "short.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:-4])
    assert "expected a whole .npy file" in failing(*other)
    assert "memory must be as" in failing(*given[:2], tmp_path / "other", "--memory", "2 bananas")
