"""Builds the CUDA library and compares registers and loops with ``registers.json``.

It is built for all architectures, or for those of ``--architectures``. The table holds what a
thread of each kernel uses on each of them, and for one architecture what its busiest loop does, as
``sass.py`` reads it off the machine code where there is a disassembler. A kernel fails that keeps
more in memory, of its registers or in its stack frame, than the table says and the few bytes by
which compilers differ; or whose loop has become longer, or has fewer of its loads on their way
together. ``--write`` puts what was found into the table; what it says of architectures that were
not built stays, for kernels that are still there.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import tvm_ffi

from fastgraph.graphs.graph import Csr
from tests.cuda import sass
from tests.cuda.sass import Loop

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "cuda"
LIBRARY = BUILD / "lib" / "libfastgraph_cuda.so"
TABLE = Path(__file__).with_name("registers.json")
TOLERANCE = 8
"""Bytes that a kernel may keep in memory beyond those of the table."""
LONGER = 1.1
"""How much longer than in the table a loop may be: other compilers place instructions otherwise."""
DISASSEMBLED = "sm_90"
"""The architecture whose machine code is read."""


class Usage(NamedTuple):
    """The resources that a kernel uses.

    Attributes:
        registers: of a thread.
        spilled_bytes: what it stores of its registers.
        stack_bytes: its stack frame, with room for those and for arrays whose indices are known
            at run time only.
        shared_bytes: of a block.
        loop: what its busiest loop does; zeros where that is not known.
    """

    registers: int
    spilled_bytes: int
    stack_bytes: int
    shared_bytes: int
    loop: Loop = Loop(0, 0, 0)

    def numbers(self) -> list[int]:
        """Those above, without a loop that is not known."""
        return [*self[:4], *(self.loop if self.loop.instructions else ())]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Usage:
        """From what :meth:`numbers` gives."""
        first, loop = numbers[:4], numbers[4:]
        return cls(*first, Loop(*loop)) if loop else cls(*first)


Usages = dict[str, dict[str, Usage]]
"""By kernel and architecture."""


def find_nvcc() -> str | None:
    installed = [Path("/usr/local/cuda/bin"), *sorted(Path("/usr/local").glob("cuda-*/bin"))]
    return shutil.which("nvcc") or next(
        (str(path / "nvcc") for path in installed if (path / "nvcc").exists()), None
    )


def build(nvcc: str, architectures: Sequence[str] = (), few_layouts: bool = False) -> str:
    """The compiler's messages of a fresh build, for all architectures or for some.

    With few layouts there are not all kernels of attention for other types than float.
    """
    shutil.rmtree(BUILD, ignore_errors=True)
    configure = [
        *("cmake", "-S", ROOT, "-B", BUILD, "-G", "Ninja", "-DFASTGRAPH_CUDA=on"),
        *("-DFASTGRAPH_WERROR=ON", f"-DFASTGRAPH_CUDA_ARCHITECTURES={';'.join(architectures)}"),
        f"-DCMAKE_CUDA_COMPILER={nvcc}",
        f"-DCMAKE_CUDA_FLAGS=-Xptxas -v {'-DFASTGRAPH_FEW_LAYOUTS' if few_layouts else ''}",
        # The host's side is called to be refused; nvcc optimises kernels whatever it is told here.
        *("-DCMAKE_CXX_FLAGS_RELEASE=-O0 -DNDEBUG", "-DCMAKE_CUDA_FLAGS_RELEASE=-O0 -DNDEBUG"),
        *(f"-DPython_EXECUTABLE={sys.executable}", f"-DFASTGRAPH_LIBRARY_DIR={LIBRARY.parent}"),
    ]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    command = ["cmake", "--build", BUILD, "--target", "fastgraph_cuda"]
    process = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if process.returncode:
        raise SystemExit(process.stdout)
    readable = subprocess.run(
        ["c++filt"], input=process.stdout, capture_output=True, text=True, check=True
    )
    return readable.stdout


def parsed(log: str) -> Usages:
    """The usages that the assembler reports, by the names of kernels without their arguments."""
    usages: Usages = {}
    for entry in log.split("Compiling entry function '")[1:]:
        signature, _, rest = entry.partition("' for '")
        kernel = short_name(signature)
        reported = ("registers", "bytes spill", "bytes stack frame", "bytes smem")
        found = (re.search(rf"(\d+) {what}", rest) for what in reported)
        numbers = (int(match[1]) if match else 0 for match in found)
        usages.setdefault(kernel, {})[rest.partition("'")[0]] = Usage(*numbers)
    return usages


def short_name(signature: str) -> str:
    """A kernel's name with its template arguments, from a signature that ``c++filt`` has read."""
    for namespace in ("fastgraph::", "cuda::", "(anonymous namespace)::"):
        signature = signature.replace(namespace, "")
    signature = signature.removeprefix("void ")
    # A template argument may be in parentheses too, such as the type of an enumerator.
    template, closed, _ = signature.rpartition(">(")
    return template + ">" if closed else signature.split("(")[0]


def with_loops(usages: Usages, binary: Path) -> Usages:
    """The usages, with the loops of the library where there is a disassembler."""
    tool = sass.find_disassembler()
    if tool is None:
        print("skipped: no loops of CUDA kernels, there is no cuobjdump with nvdisasm")
        return usages
    code = sass.disassembled(tool, binary, DISASSEMBLED)
    readable = subprocess.run(
        ["c++filt"], input="\n".join(code), capture_output=True, text=True, check=True
    )
    names = map(short_name, readable.stdout.splitlines())
    loops = dict(zip(names, map(sass.busiest_loop, code.values()), strict=True))
    missing = {k for k, by_arch in usages.items() if DISASSEMBLED in by_arch} - loops.keys()
    if missing:
        raise SystemExit(f"no machine code of {', '.join(sorted(missing))}")
    return {
        kernel: {
            arch: usage._replace(loop=loops[kernel]) if arch == DISASSEMBLED else usage
            for arch, usage in by_arch.items()
        }
        for kernel, by_arch in usages.items()
    }


def read_table(path: Path) -> Usages:
    table = json.loads(path.read_text()) if path.exists() else {}
    return {
        kernel: {arch: Usage.of(numbers) for arch, numbers in by_arch.items()}
        for kernel, by_arch in table.items()
    }


def write_table(path: Path, table: Usages) -> None:
    """One line for each kernel."""
    numbers = {
        kernel: {arch: usage.numbers() for arch, usage in by_arch.items()}
        for kernel, by_arch in table.items()
    }
    lines = (f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(numbers.items()))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def updated(old: Usages, found: Usages) -> Usages:
    """The old table with what was found now, of the kernels that were."""
    return {kernel: {**old.get(kernel, {}), **by_arch} for kernel, by_arch in found.items()}


def excesses(old: Usages, new: Usages) -> list[str]:
    """Kernels that spill more than before, or, where the old table lacks them, that spill at all.

    And kernels whose busiest loop is longer, or waits more often for as many loads, where both
    tables know it.
    """
    found = []
    for kernel, by_arch in new.items():
        for arch, usage in by_arch.items():
            known = old.get(kernel, {}).get(arch, Usage(0, 0, 0, 0))
            for what, now, before in (
                ("spilled", usage.spilled_bytes, known.spilled_bytes),
                ("of stack frame", usage.stack_bytes, known.stack_bytes),
            ):
                if now > before + TOLERANCE:
                    found.append(f"{kernel} on {arch}: {now} bytes {what} instead of {before}")
            loop, known_loop = usage.loop, known.loop
            if not loop.instructions or not known_loop.instructions:
                continue
            if loop.instructions > LONGER * known_loop.instructions:
                found.append(
                    f"{kernel} on {arch}: {loop.instructions} instructions in its loop "
                    f"instead of {known_loop.instructions}"
                )
            if loop.loads * known_loop.waits < known_loop.loads * loop.waits:
                found.append(
                    f"{kernel} on {arch}: waits {loop.waits} times for {loop.loads} loads "
                    f"instead of {known_loop.waits} times for {known_loop.loads}"
                )
    return found


def check_that_it_loads() -> None:
    """The library opens where there is no driver, and refuses tensors on the CPU."""
    library = tvm_ffi.load_module(str(LIBRARY))
    assert library.runtime_version() >= 12000
    # It is built in, but there is none without a torch for CUDA.
    assert (library.cusparse_version() > 0) is (torch.version.cuda is not None)
    rows, x = Csr(torch.zeros(2).long(), torch.zeros(0).int(), None), torch.zeros(1, 1)
    with pytest.raises(ValueError, match="expected tensors on a GPU"):
        library.spmm(*rows.arguments, None, None, None, x, x)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    parser.add_argument(
        "--architectures", metavar="80,90", help="some, the lowest of which gives the PTX of all"
    )
    parser.add_argument(
        "--few-layouts",
        action="store_true",
        help="of attention one of each kind in all types but float, which stands for them",
    )
    options = parser.parse_args(arguments)
    if options.write and options.few_layouts:
        parser.error("the table is of all layouts")
    architectures = options.architectures.split(",") if options.architectures else []
    nvcc = find_nvcc()
    if nvcc is None:
        print("skipped: the CUDA kernels are not compiled, there is no nvcc")
        return
    found = parsed(build(nvcc, architectures, options.few_layouts))
    compiled = {arch for by_arch in found.values() for arch in by_arch}
    if not compiled or (architectures and compiled != {f"sm_{arch}" for arch in architectures}):
        raise SystemExit(f"the assembler reports on {', '.join(sorted(compiled)) or 'nothing'}")
    check_that_it_loads()
    if DISASSEMBLED in compiled:
        found = with_loops(found, LIBRARY)
    if options.write:
        write_table(TABLE, updated(read_table(TABLE), found))
        return
    grown = excesses(read_table(TABLE), found)
    if grown:
        raise SystemExit("\n".join(["more is kept in memory, or waited for:", *grown]))
    usages = [usage for by_arch in found.values() for usage in by_arch.values()]
    spilled = max(usage.spilled_bytes for usage in usages)
    stack = max(usage.stack_bytes for usage in usages)
    print(
        f"{len(found)} kernels for {', '.join(sorted(compiled))}: "
        f"at most {spilled} bytes spilled and {stack} of stack frame"
    )


if __name__ == "__main__":
    main()
