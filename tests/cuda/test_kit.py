"""The kit for a GPU machine without a network: what it holds, and what its program runs there."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cuda.benchmarks import FOLDER

COMPILER = os.environ.get("CXX", "c++")


@pytest.fixture
def gpu_kit(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, without a network."""
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("gpu_kit")

    def pip(*arguments: str, command: str) -> None:
        where = Path(
            arguments[arguments.index("--target" if command == "install" else "--dest") + 1]
        )
        where.mkdir(parents=True)
        (where / "wheel.py").write_text(command)

    monkeypatch.setattr(module, "_pip", pip)
    return module


@pytest.fixture
def kit(gpu_kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    library, data, kit = (tmp_path / name for name in ("lib", "data", "kit"))
    for folder in (library, data):
        folder.mkdir()
    source = tmp_path / "answer.cpp"
    source.write_text("int answer() { return 42; }\n")
    made = library / "libfastgraph_cuda.so"
    subprocess.run([COMPILER, "-g", "-shared", "-fPIC", "-o", str(made), str(source)], check=True)
    (data / "graph.npz").write_text("edges")
    monkeypatch.setenv("FASTGRAPH_DATA", str(data))
    gpu_kit.make(
        kit,
        argparse.Namespace(
            python="3.12", architectures="90", library=library, turbo_gnn_python=None
        ),
    )
    return kit


def test_it_holds_all_that_its_manifest_names(gpu_kit: Any, kit: Path) -> None:
    manifest = json.loads((kit / "manifest.json").read_text())
    assert set(manifest["files"]) == {
        *("lib.tar.gz", "run", "site/wheel.py", "data/graph.npz", "turbo-gnn/wheel.py"),
    }
    assert manifest["bytes"] == sum(entry["bytes"] for entry in manifest["files"].values())
    gpu_kit.verify(kit)
    (kit / "data" / "graph.npz").write_text("edited")
    with pytest.raises(SystemExit, match=r"data/graph.npz is not the file of the manifest"):
        gpu_kit.verify(kit)


def test_one_that_is_too_large_is_refused(
    gpu_kit: Any, kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_kit, "MOST_BYTES", 10)
    with pytest.raises(SystemExit, match="the kit has"):
        gpu_kit.write_manifest(kit, "3.12", "90")


def test_a_folder_without_libraries_is_refused(gpu_kit: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="must hold libfastgraph"):
        gpu_kit.pack(tmp_path, tmp_path / "lib.tar.gz", "libfastgraph_*.so")


def test_its_program_unpacks_and_runs_the_benchmark(kit: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "benchmarks").mkdir(parents=True)
    (tree / "benchmarks" / "gpu.py").write_text(
        "import os, sys\nprint(sys.argv[1:], os.environ['FASTGRAPH_DATA'], *sys.path)\n"
    )
    said = subprocess.run(
        ["sh", str(kit / "run"), "--shot", "540"],
        cwd=tree,
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert said.startswith(f"['--shot', '540'] {kit / 'data'} ") and str(kit / "site") in said
    assert (tree / "fastgraph" / "lib" / "libfastgraph_cuda.so").stat().st_size > 0


def test_a_rehearsal_forgives_what_needs_a_gpu_alone(gpu_kit: Any) -> None:
    step = {"stage": "test", "exit_code": 1, "last_line": "21 failed"}
    row = {"layer": "GCN", "rival": "ours"}
    gpu_kit.judge({"stages": [step], "cells": [row]})
    with pytest.raises(SystemExit, match="nothing was measured"):
        gpu_kit.judge({"stages": [step], "cells": []})
    with pytest.raises(SystemExit, match="check: 21 failed; GCN: out of memory"):
        gpu_kit.judge(
            {
                "stages": [{**step, "stage": "check"}],
                "cells": [{**row, "failed": "out of memory"}],
            }
        )


def test_a_rehearsal_that_leaves_no_results_says_so(
    gpu_kit: Any, kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tmp_path / "checkout"
    (tree / "benchmarks").mkdir(parents=True)
    (tree / "benchmarks" / "gpu.py").write_text("")
    for command in (["init", "--quiet"], ["add", "benchmarks/gpu.py"]):
        subprocess.run(["git", *command], cwd=tree, check=True)
    monkeypatch.setattr(gpu_kit, "ROOT", tree)
    with pytest.raises(SystemExit, match="run ended with 0 and left no results"):
        gpu_kit.rehearse(kit, Path(sys.executable), 9.0)


def test_the_python_of_a_rehearsal_may_be_named_from_here(
    gpu_kit: Any, kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []
    step = {"stage": "check", "exit_code": 0, "seconds": 8.14, "last_line": "no GPU"}
    row = {"layer": "GCN", "graph": "cora", "failed": "out of memory"}
    results = {"machine": {"torch": "2.11.0"}, "stages": [step], "cells": [row]}
    monkeypatch.setattr(gpu_kit, "rehearse", lambda *words: given.append(words) or results)
    monkeypatch.chdir(tmp_path)
    out = ["--out", "log.md"]
    monkeypatch.setattr(sys, "argv", ["gpu_kit.py", str(kit), "--rehearse", "bin/python", *out])
    with pytest.raises(SystemExit, match="GCN: out of memory"):
        gpu_kit.main()  # the log tells that, too
    assert given == [(kit, tmp_path / "bin" / "python", 240.0)]
    lines = (tmp_path / "log.md").read_text().splitlines()
    assert any(re.fullmatch(r"torch 2.11.0, commit `\w+`, kernels for 90.", x) for x in lines)
    assert "| check | 8.1 | 0 | no GPU |" in lines and "- GCN, cora: out of memory" in lines
    size = (kit / "lib.tar.gz").stat().st_size
    assert f"| lib.tar.gz | {size:,} |" in lines
