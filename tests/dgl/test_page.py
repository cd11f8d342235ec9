"""The blocks of ``docs/dgl.md``, and the table of DGL's layers: both need DGL."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.dgl.graphs import dgl
from tests.docs.blocks import ROOT
from tests.docs.test_code_blocks import run


def test_the_page_runs(tmp_path: Path) -> None:
    assert dgl.__version__
    run(ROOT / "docs" / "dgl.md", tmp_path)


@pytest.mark.skipif(dgl.__version__ < "2", reason="the table is made with the newest DGL")
def test_the_table_of_layers_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    made = importlib.import_module("layer_tables").table("dgl")
    assert made is not None
    page = (ROOT / "docs" / "coverage.md").read_text()
    assert f"\n{made}\n" in page, "run python docs/generate.py where DGL is installed"
