"""Runs the tests of the CUDA kernels on the emulator, and counts which of their lines they execute.

Prints the lines that none of them reaches, and fails if these are more than one in twenty.
Arguments are pytest's.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from tests.simt.library import CSRC, KERNELS, ROOT, build, why_unavailable

# Not those of layers: what an operator does is to be seen where it is called.
TESTS = ("tests/simt", "tests/cuda/test_operators.py")
LEAST = 0.95


def run_tests(arguments: Sequence[str]) -> None:
    command = [sys.executable, "-m", "pytest", "--emulate", *arguments, *TESTS]
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise SystemExit("tests failed, so no lines are counted")


def counts(folder: Path) -> dict[str, dict[int, int]]:
    """How often each line ran, by the name of its file, over all instances of templates."""
    found: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    kernels = {path.stem for path in KERNELS if CSRC in path.parents}  # without planted mistakes
    for notes in sorted(folder.glob("*.gcno")):
        if notes.stem.rpartition("-")[0] not in kernels:
            continue
        command = ["gcov", "--json-format", "--stdout", str(notes)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for line in text.splitlines():
            found_in = json.loads(line)
            for file in found_in["files"]:
                # Relative where a cache of the compiler was told of a common folder.
                path = Path(found_in["current_working_directory"], file["file"])
                if CSRC not in path.parents or path.suffix not in (".cu", ".cuh"):
                    continue
                for entry in file["lines"]:
                    found[path.name][entry["line_number"]] += entry["count"]
    return found


def main() -> None:
    why_not = why_unavailable()
    if why_not is not None:
        print(f"skipped: the CUDA kernels do not run, {why_not}")
        return
    folder = build().parent
    for old in folder.glob("*.gcda"):
        old.unlink()
    run_tests(sys.argv[1:])
    if shutil.which("gcov") is None:
        print("skipped: no count of lines, there is no gcov")
        return
    found = counts(folder)
    missing = {path.name for path in KERNELS if CSRC in path.parents} - found.keys()
    if missing:
        raise SystemExit(f"nothing was counted in {', '.join(sorted(missing))}")
    for name, lines in sorted(found.items()):
        unreached = [number for number, count in sorted(lines.items()) if count == 0]
        share = 1 - len(unreached) / len(lines)
        rest = f", not {unreached}" if unreached else ""
        print(f"{100 * share:6.1f} % of {len(lines):4} lines of {name}{rest}")
    every = [count > 0 for lines in found.values() for count in lines.values()]
    share = sum(every) / len(every)
    print(f"{100 * share:6.1f} % of {len(every)} lines")
    if share < LEAST:
        raise SystemExit(f"expected at least {100 * LEAST:.0f} %")


if __name__ == "__main__":
    main()
