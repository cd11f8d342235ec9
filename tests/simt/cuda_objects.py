"""Compiles each CUDA kernel with nvcc and compares its registers with ``registers.json``.

The table holds what a thread of each kernel uses on each architecture. A kernel fails that keeps
more of its registers in memory than the table says and the few bytes by which compilers differ;
``--write`` puts what was found into the table.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple

from tests.simt.library import BUILD, CSRC

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
TABLE = Path(__file__).with_name("registers.json")
TOLERANCE = 8
"""Bytes that a kernel may keep in memory beyond those of the table."""


class Usage(NamedTuple):
    """What a thread, and for shared memory a block, uses."""

    registers: int
    spilled_bytes: int
    shared_bytes: int


Usages = dict[str, dict[str, Usage]]
"""By kernel and architecture."""


def find_nvcc() -> str | None:
    installed = [Path("/usr/local/cuda/bin"), *sorted(Path("/usr/local").glob("cuda-*/bin"))]
    return shutil.which("nvcc") or next(
        (str(path / "nvcc") for path in installed if (path / "nvcc").exists()), None
    )


def compiled(nvcc: str, source: Path, architecture: str) -> dict[str, Usage]:
    """The usage of a file's kernels on one architecture."""
    BUILD.mkdir(parents=True, exist_ok=True)
    command: list[str | Path] = [
        *(nvcc, "-std=c++17", "-O3", f"-arch={architecture}", "-Werror", "all-warnings"),
        *(f"-I{CSRC}", f"-I{CSRC / 'include'}", "-Xptxas", "-v"),
        *("-c", source, "-o", BUILD / f"{source.stem}.{architecture}.o"),
    ]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(process.stderr)
    readable = subprocess.run(
        ["c++filt"], input=process.stderr, capture_output=True, text=True, check=True
    )
    return parsed(readable.stdout)


def parsed(log: str) -> dict[str, Usage]:
    """The usages that the assembler reports, by the names of kernels without their arguments."""
    for namespace in ("fastgraph::", "cuda::", "(anonymous namespace)::"):
        log = log.replace(namespace, "")
    usages = {}
    for entry in log.split("Compiling entry function '")[1:]:
        signature = entry.split("'")[0].removeprefix("void ")
        # A template argument may be in parentheses too, such as the type of an enumerator.
        template, closed, _ = signature.rpartition(">(")
        kernel = template + ">" if closed else signature.split("(")[0]
        found = (
            re.search(rf"(\d+) {what}", entry)
            for what in ("registers", "bytes spill", "bytes smem")
        )
        usages[kernel] = Usage(*(int(match[1]) if match else 0 for match in found))
    return usages


def read_table(path: Path) -> dict[str, Usages]:
    """The usages by source file."""
    table = json.loads(path.read_text()) if path.exists() else {}
    return {
        source: {
            kernel: {arch: Usage(*numbers) for arch, numbers in by_arch.items()}
            for kernel, by_arch in kernels.items()
        }
        for source, kernels in table.items()
    }


def write_table(path: Path, table: dict[str, Usages]) -> None:
    """One line for each kernel."""
    sources = []
    for source, kernels in sorted(table.items()):
        lines = (f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(kernels.items()))
        sources.append(f"  {json.dumps(source)}: {{\n" + ",\n".join(lines) + "\n  }")
    path.write_text("{\n" + ",\n".join(sources) + "\n}\n")


def merged(old: Usages, new: Usages) -> Usages:
    """The new kernels, with what is known of them on architectures that were left out."""
    return {kernel: {**old.get(kernel, {}), **by_arch} for kernel, by_arch in new.items()}


def excesses(old: Usages, new: Usages) -> list[str]:
    """What spills more than it did; a kernel that the table does not know may not spill."""
    found = []
    for kernel, by_arch in new.items():
        for arch, usage in by_arch.items():
            known = old.get(kernel, {}).get(arch, Usage(0, 0, 0)).spilled_bytes
            if usage.spilled_bytes > known + TOLERANCE:
                found.append(f"{kernel} on {arch}: {usage.spilled_bytes} bytes instead of {known}")
    return found


def architectures(text: str) -> Sequence[str]:
    """Those of a command line."""
    chosen = ARCHITECTURES if text == "all" else text.split(",")
    if not set(chosen) <= set(ARCHITECTURES):
        raise argparse.ArgumentTypeError(f"expected all or {','.join(ARCHITECTURES)}, got {text}")
    return chosen


def main(arguments: Sequence[str] | None = None) -> None:
    names = sorted(path.stem for path in (CSRC / "cuda").glob("*.cu"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", nargs="*", help=f"files to compile, of {', '.join(names)}")
    parser.add_argument(
        "--architectures",
        type=architectures,
        default=["sm_90"],
        help=f"all, or some of {','.join(ARCHITECTURES)}; sm_90 unless told",
    )
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.sources) - set(names))
    if unknown:
        parser.error(f"no such files: {', '.join(unknown)}")
    nvcc = find_nvcc()
    if nvcc is None:
        print("skipped: there is no nvcc")
        return
    jobs = list(product(options.sources or names, options.architectures))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(lambda job: compiled(nvcc, CSRC / "cuda" / f"{job[0]}.cu", job[1]), jobs)
        found: dict[str, Usages] = {}
        for (source, arch), usages in zip(jobs, results, strict=True):
            for kernel, usage in usages.items():
                found.setdefault(source, {}).setdefault(kernel, {})[arch] = usage
    table = read_table(TABLE)
    print("registers, bytes spilled and bytes shared")
    for source, kernels in found.items():
        for kernel, by_arch in sorted(kernels.items()):
            numbers = ("{}: {:3} {:3} {:5}".format(arch, *usage) for arch, usage in by_arch.items())
            print(f"{'  '.join(numbers)}  {source}: {kernel}")
    if options.write:
        everything = {name: table[name] for name in table if name in names}
        for source, kernels in found.items():
            everything[source] = merged(table.get(source, {}), kernels)
        write_table(TABLE, everything)
        return
    spilling = [
        line for s, kernels in found.items() for line in excesses(table.get(s, {}), kernels)
    ]
    if spilling:
        raise SystemExit("\n".join(["more registers are kept in memory:", *spilling]))


if __name__ == "__main__":
    main()
