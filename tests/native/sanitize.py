"""Fuzzes the native functions under AddressSanitizer and UndefinedBehaviorSanitizer.

Builds this machine's instruction level with both, or all that it has, makes sure that they catch a
planted overrun of a tensor and a planted overflow, then runs fuzz.py in processes with the
sanitizers preloaded.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fastgraph.machine import native
from fastgraph.settings import CPU_LEVELS

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "sanitize"
COMPILER = os.environ.get("CXX", "c++")
FLAGS = ("-shared", "-fPIC", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover")

PLANTED = """
#include <climits>
extern "C" void overrun(float* data, long size) { data[size] = 1; }
extern "C" int overflow(int value) { return INT_MAX + value; }
"""

PLANTED_CALL = """
import ctypes, sys, torch
lib, x = ctypes.CDLL(sys.argv[1]), torch.zeros(3, 5)
if sys.argv[2] == "overrun":
    lib.overrun(ctypes.c_void_p(x.data_ptr()), ctypes.c_long(x.numel() - int(sys.argv[3])))
else:
    lib.overflow(0 if int(sys.argv[3]) else 1)
print("survived")
"""


def sanitizer_environment(level: str) -> dict[str, str]:
    """Variables under which an uninstrumented Python runs instrumented libraries."""
    # libstdc++ has to be there when the sanitizer looks for the function that throws.
    names = ("libasan.so", "libubsan.so", "libstdc++.so")
    command = [[COMPILER, f"-print-file-name={name}"] for name in names]
    found = [subprocess.check_output(line, text=True).strip() for line in command]
    for name, path in zip(names, found, strict=True):
        if not Path(path).is_absolute():
            raise SystemExit(f"{COMPILER} has no {name}; set CXX to a GCC that comes with it")
    # GCC 12 does not align what it moves off the stack to 64 bytes (its bug 110027), and storing a
    # vector of AVX-512 there ends the process.
    after_return = int(level != "avx512")
    return os.environ | {
        "LD_PRELOAD": " ".join(str(Path(path).resolve()) for path in found),
        "ASAN_OPTIONS": f"detect_leaks=0:detect_stack_use_after_return={after_return}",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }


def build(level: str) -> Path:
    """Compile the library of one level and return its path."""
    tools = Path(sys.executable).parent
    ninja = shutil.which("ninja", path=f"{tools}{os.pathsep}{os.environ['PATH']}")
    cmake = shutil.which("cmake", path=f"{tools}{os.pathsep}{os.environ['PATH']}")
    if ninja is None or cmake is None:
        raise SystemExit("cmake and ninja are needed: pip install 'fastgraph[native]'")
    configure = [
        *(cmake, "-S", ROOT, "-B", BUILD, "-G", "Ninja"),
        f"-DCMAKE_MAKE_PROGRAM={ninja}",
        f"-DCMAKE_CXX_COMPILER={shutil.which(COMPILER)}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DFASTGRAPH_LIBRARY_DIR={BUILD / 'lib'}",
        "-DFASTGRAPH_SANITIZE=ON",
    ]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    subprocess.run([cmake, "--build", BUILD, "--target", f"fastgraph_cpu_{level}"], check=True)
    return BUILD / "lib" / f"libfastgraph_cpu_{level}.so"


def check_that_planted_errors_are_caught(environ: dict[str, str], folder: Path) -> None:
    source, library = folder / "planted.cpp", folder / "planted.so"
    source.write_text(PLANTED)
    subprocess.run([COMPILER, *FLAGS, source, "-o", library], check=True)
    for function, report in (("overrun", "heap-buffer-overflow"), ("overflow", "signed integer")):
        for harmless in (True, False):
            process = subprocess.run(
                [sys.executable, "-c", PLANTED_CALL, library, function, str(int(harmless))],
                env=environ,
                capture_output=True,
                text=True,
                check=False,
            )
            survived = process.returncode == 0 and "survived" in process.stdout
            if survived != harmless or (report in process.stderr) == harmless:
                raise SystemExit(
                    f"the sanitizers do not tell a planted {function} from a harmless call:\n"
                    f"{process.stdout}{process.stderr}"
                )


def fuzz(library: Path, environ: dict[str, str], folder: Path, options: list[str]) -> None:
    """Call each function in one of a few processes, as there are cores."""
    parts = min(os.cpu_count() or 1, 4)

    def run(part: int) -> None:
        journal = folder / f"call-{part}.txt"
        given = [library, journal, "--part", str(part), str(parts), *options]
        command = [sys.executable, "-m", "tests.native.fuzz", *given]
        process = subprocess.run(command, env=environ, cwd=ROOT, check=False)
        if process.returncode:
            last = journal.read_text() if journal.exists() else "none\n"
            raise SystemExit(f"failed with exit code {process.returncode}; last call: {last}")

    with ThreadPoolExecutor(parts) as pool:
        list(pool.map(run, range(parts)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--level", default=native.cpu_level(), choices=CPU_LEVELS)
    parser.add_argument("--all-levels", action="store_true", help="that this machine has")
    parser.add_argument("--examples", type=int, default=120, help="valid calls of each function")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for level in native.available_levels() if options.all_levels else [options.level]:
        sanitize(level, ["--examples", str(options.examples), "--seed", str(options.seed)])


def sanitize(level: str, options: list[str]) -> None:
    library = build(level)
    environ = sanitizer_environment(level)
    with tempfile.TemporaryDirectory() as folder:
        check_that_planted_errors_are_caught(environ, Path(folder))
        fuzz(library, environ, Path(folder), options)
    print(f"{level}: no error found")


if __name__ == "__main__":
    main()
