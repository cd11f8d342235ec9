"""The blocks of ``docs/dgl.md``, which need DGL."""

from __future__ import annotations

from pathlib import Path

from tests.dgl.graphs import dgl
from tests.docs.blocks import ROOT
from tests.docs.test_code_blocks import run


def test_the_page_runs(tmp_path: Path) -> None:
    assert dgl.__version__
    run(ROOT / "docs" / "dgl.md", tmp_path)
