"""The whole of ``benchmarks/gpu.py``, rehearsed where there is no device.

Stand-ins answer for the driver, the compilers and the sanitizer, and the kernels of the CPU for
those of a GPU. All else is real: processes, records, the build of a package of others, reports.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cuda.benchmarks import FOLDER, measure

PROGRAMS = {
    "nvidia-smi": "echo 9.0",
    "nvcc": "exit 1",
    "ninja": "exit 1",
    "cmake": 'echo "$@" >>{root}/cmake.log; [ "$1" != --build ] || touch {library}',
    "compute-sanitizer": 'echo "ERROR SUMMARY: 0 errors, $2"',
}
TESTS = {
    "conftest.py": 'def pytest_addoption(parser): parser.addoption("--gpu", action="store_true")\n',
    "cuda/test_operators.py": "def test_every_graph_random(pytestconfig):\n"
    '    assert pytestconfig.getoption("--gpu")\n',
}


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A source tree in which no library of this one is replaced, and a machine's programs."""
    (tmp_path / "benchmarks").mkdir()
    shutil.copy(FOLDER / "gpu.py", tmp_path / "benchmarks")
    (tmp_path / "benchmarks" / "measure").symlink_to(FOLDER / "measure")
    library = tmp_path / "fastgraph" / "lib" / "libfastgraph_cuda.so"
    for folder in (library.parent, tmp_path / "tests" / "cuda", tmp_path / "bin"):
        folder.mkdir(parents=True)
    for name, text in TESTS.items():
        (tmp_path / "tests" / name).write_text(text)
    for name, body in PROGRAMS.items():
        program = tmp_path / "bin" / name
        program.write_text("#!/bin/sh\n" + body.format(root=tmp_path, library=library) + "\n")
        program.chmod(0o755)
    return tmp_path


def start(machine: Path, *given: str) -> subprocess.Popen[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("FASTGRAPH")}
    environ["PATH"] = f"{machine / 'bin'}{os.pathsep}{environ['PATH']}"
    environ["TURBO_GNN_FAULTS"] = "gatv2_aggr:crash,reduction_aggr:hang"
    command = [sys.executable, str(machine / "benchmarks" / "gpu.py"), "--device", "cpu"]
    command += ["--record", str(machine / "record.jsonl")]
    command += ["--graphs", "kronecker-11,kronecker-11-clusters"]
    command += ["--layers", "GATv2,SAGE-mean,SAGE-max", "--widths", "16", "--others", "turbo-gnn"]
    command += ["--seconds", "3000", "--timed-seconds", "0", *given]
    return subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def rows(path: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """By layer, package beside us and column."""
    found = measure("output").Record(path).lines("row")
    return {(row["layer"], row["beside"], row["rival"]): row for row in found}


def wait_for(process: subprocess.Popen[str], is_there: Callable[[], bool]) -> None:
    while not is_there():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)


@pytest.mark.exhaustive  # minutes, of what no change but one of these benchmarks touches
@pytest.mark.timeout(900)  # those that measure load torch, one after another
@pytest.mark.usefixtures("forking_interpreter")
def test_one_crash_one_kill_and_one_hang(machine: Path) -> None:
    sources = Path(__file__).with_name("turbo_gnn")
    record, first = machine / "record.jsonl", start(machine, "--turbo-gnn", str(sources))
    wait_for(first, lambda: ("GATv2", "turbo-gnn", "turbo-gnn") in rows(record))
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert not record.with_suffix(".json").exists()
    with record.open("a") as file:
        file.write('{"row": {"gra')  # what it was about to say

    rebuilt = start(machine, "--stages", "")
    said, _ = rebuilt.communicate()
    assert rebuilt.returncode == 0, said
    results = json.loads(record.with_suffix(".json").read_text())
    stages = {step["stage"]: step for step in results["stages"]}
    assert list(stages) == ["build", "preflight", "check", "test", "sanitize", "turbo-gnn"]
    assert all(step["exit_code"] == 0 for step in results["stages"]), stages
    assert "-DFASTGRAPH_CUDA_ARCHITECTURES=90 " in (machine / "cmake.log").read_text()
    assert "1 passed" in stages["test"]["last_line"]
    assert "0 errors, synccheck" in stages["sanitize"]["last_line"]
    assert stages["preflight"]["output"][0].startswith("ok    tensors: torch ")
    found = rows(record)
    crashed = found["GATv2", "turbo-gnn", "turbo-gnn"]
    assert crashed["failed"] == "the process ended by SIGSEGV"
    assert ("GATv2", "turbo-gnn", "ours") not in found
    ours = found["GATv2", "upstream", "ours"]
    assert ours["errors"]["gradient"] < ours["errors"]["allowed"]
    page = record.with_suffix(".md").read_text()
    assert "the process ended by SIGSEGV" in page and "ok    tensors" in page

    # A crash of others is no failure of ours, and those after it are measured.
    second = start(machine, "--stages", "measure", "--cell-seconds", "10")
    said, _ = second.communicate()
    assert second.returncode == 0, said
    assert "kronecker-11 GATv2 16 float32" not in said  # it is in the record
    found = rows(record)
    for rival in ("ours", "ours-measured", "turbo-gnn"):
        row = found["SAGE-mean", "turbo-gnn", rival]
        assert row["forward"]["median"] > 0 and row["backward"]["median"] > 0
    assert found["SAGE-max", "turbo-gnn", "turbo-gnn"]["failed"] == "no answer within 10 s"
    assert "failed" not in found["SAGE-max", "upstream", "ours"]
    # On the CPU nothing competes, which the row says, too.
    in_clusters = [
        (row["rival"], row["dtype"], row.get("kernels"), row.get("failed"))
        for row in measure("output").Record(record).lines("row")
        if row["graph"] == "kronecker-11-clusters"
    ]
    rivals = {"upstream": None, "ours": None, "ours-measured": {}}
    assert in_clusters == [(name, "bfloat16", chosen, None) for name, chosen in rivals.items()]
