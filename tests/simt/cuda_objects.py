"""Compiles each CUDA kernel with nvcc and prints the registers of its threads.

Fails where a kernel keeps more of them in memory than the few bytes with which the compiler buys
room for another block on a multiprocessor.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.simt.library import BUILD, CSRC


@dataclass(frozen=True)
class Usage:
    """Registers of a thread, and bytes of them that it keeps in memory."""

    kernel: str
    registers: int
    spilled: int


def find_nvcc() -> str | None:
    installed = [Path("/usr/local/cuda/bin"), *sorted(Path("/usr/local").glob("cuda-*/bin"))]
    return shutil.which("nvcc") or next(
        (str(path / "nvcc") for path in installed if (path / "nvcc").exists()), None
    )


def usages(nvcc: str, source: Path, architecture: str) -> Iterator[Usage]:
    BUILD.mkdir(parents=True, exist_ok=True)
    command: list[str | Path] = [
        *(nvcc, "-std=c++17", "-O3", f"-arch={architecture}", "-Werror", "all-warnings"),
        *(f"-I{CSRC}", f"-I{CSRC / 'include'}", "-Xptxas", "-v"),
        *("-c", source, "-o", BUILD / f"{source.stem}.{architecture}.o"),
    ]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(process.stderr)
    log = demangled(process.stderr).replace("fastgraph::", "").replace("cuda::", "")
    for entry in log.split("Compiling entry function '")[1:]:
        kernel = entry.split("'")[0].replace("(anonymous namespace)::", "").split("(")[0]
        registers, spilled = (
            int(re.search(pattern, entry)[1])  # type: ignore[index]
            for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
        )
        yield Usage(kernel, registers, spilled)


def demangled(log: str) -> str:
    tool = shutil.which("c++filt")
    if tool is None:
        return log
    return subprocess.run([tool], input=log, capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--architecture", default="sm_90")
    parser.add_argument("--max-spilled", type=int, default=32, help="bytes of a thread")
    options = parser.parse_args()
    nvcc = find_nvcc()
    if nvcc is None:
        print("skipped: there is no nvcc")
        return
    spilling = []
    for source in sorted((CSRC / "cuda").glob("*.cu")):
        for usage in usages(nvcc, source, options.architecture):
            if usage.spilled > options.max_spilled:
                spilling.append(usage.kernel)
            print(f"{usage.registers:4} registers {usage.spilled:4} bytes spilled  {usage.kernel}")
    if spilling:
        raise SystemExit(f"too many bytes spilled: {', '.join(spilling)}")


if __name__ == "__main__":
    main()
