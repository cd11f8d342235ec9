"""For which GPUs a build compiles the CUDA kernels, by what CMake finds; nothing is compiled."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.registers import ROOT, find_nvcc

ALL = "80;86;89;90;100;120"
TOOLS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def configured(
    folder: Path, setting: str | None, gpus: str, nvcc: str, *options: str
) -> tuple[bool, str]:
    """True if CMake succeeds where nvidia-smi lists these capabilities, and its output."""
    for tool in ("cmake", "ninja", os.environ.get("CXX", "c++")):
        if shutil.which(tool, path=TOOLS) is None:
            pytest.skip(f"there is no {tool}")
    smi = folder / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\nprintf '%s\\n' {gpus}\n")
    smi.chmod(0o755)
    environ = os.environ | {"PATH": f"{folder}{os.pathsep}{TOOLS}", "CUDACXX": nvcc}
    environ.pop("FASTGRAPH_CUDA", None)
    if setting is not None:
        environ["FASTGRAPH_CUDA"] = setting
    process = subprocess.run(
        [
            *("cmake", "-S", ROOT, "-B", folder / "build", "-G", "Ninja"),
            f"-DPython_EXECUTABLE={sys.executable}",
            *options,
        ],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return process.returncode == 0, " ".join(process.stdout.split())  # CMake breaks long lines


@pytest.mark.parametrize(
    ("setting", "gpus", "succeeds", "said"),
    [
        ("off", "9.0", True, "no CUDA kernels: FASTGRAPH_CUDA=off"),
        ("auto", "", True, "no CUDA kernels: nvidia-smi shows no GPU"),
        (None, "9.0", True, "no CUDA kernels: there is no nvcc that works"),
        ("on", "9.0", False, "FASTGRAPH_CUDA=on is impossible: there is no nvcc that works"),
        ("yes", "", False, 'FASTGRAPH_CUDA must be auto, on or off, got "yes"'),
    ],
)
def test_without_nvcc(
    tmp_path: Path, setting: str | None, gpus: str, succeeds: bool, said: str
) -> None:
    success, log = configured(tmp_path, setting, gpus, nvcc=str(tmp_path / "nvcc"))
    assert success == succeeds, log
    assert said in log
    assert "CUDA kernels for:" not in log


@pytest.mark.parametrize(
    ("setting", "gpus", "said"),
    [
        (None, "9.0 8.0 9.0", "CUDA kernels for: 80;90 "),
        (None, "7.5", "no CUDA kernels: the kernels need compute capability 80, not 75"),
        ("on", "9.0", f"CUDA kernels for: {ALL} "),
    ],
)
def test_with_nvcc(tmp_path: Path, setting: str | None, gpus: str, said: str) -> None:
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("there is no nvcc")
    success, log = configured(tmp_path, setting, gpus, nvcc, "-DFASTGRAPH_CUDA_SPLIT=ON")
    assert success, log
    assert said in log
    has_kernels = said.startswith("CUDA kernels for:")
    assert ("CUDA kernels for:" in log) == has_kernels
    # The largest files are compiled once for each type, and the others once.
    built = (tmp_path / "build" / "build.ninja").read_text()
    for file, targets in {
        "gatv2": [f"cuda_{element}" for element in ("float", "double", "bfloat16", "float16")],
        "spmm": ["cuda"],
    }.items():
        objects = re.findall(
            rf"^build CMakeFiles/fastgraph_(\w+)\.dir/\S*/{file}\.cu\.o:", built, re.M
        )
        assert sorted(objects) == (sorted(targets) if has_kernels else [])
