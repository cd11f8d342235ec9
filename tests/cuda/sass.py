"""The loops of a kernel's machine code, read from the disassembly.

A loop that gathers waits for memory: how many of its loads are on their way together decides how
long, and how many instructions it has decides how many warps it takes to wait for nothing else.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Loop(NamedTuple):
    """The innermost loop of a kernel that loads most from global memory; zeros without one.

    Attributes:
        instructions: in it, whatever of them is skipped.
        loads: from global memory.
        waits: how often it waits for some of them, or the most that are on their way together are
            ``loads / waits``. Loads whose results nothing in the loop uses are one wait.
    """

    instructions: int
    loads: int
    waits: int


class Instruction(NamedTuple):
    """One of a kernel, and where it may go on."""

    address: int
    text: str

    @property
    def target(self) -> int | None:
        """Where a branch leads, if it says so."""
        found = re.search(r"\bBRA(?:\.\w+)* .*?\b(0x[0-9a-f]+)$", self.text)
        return int(found[1], 16) if found else None

    @property
    def loads(self) -> bool:
        return re.search(r"\bLDG\b|\bLDG\.", self.text) is not None

    @property
    def registers(self) -> list[int]:
        """The numbers of those named, in order: what it writes comes first."""
        return [int(number) for number in re.findall(r"\bR(\d+)\b", self.text)]


_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*/\* 0x")
_WIDTHS = {".64": 2, ".128": 4}


def find_disassembler() -> str | None:
    """``cuobjdump`` with ``nvdisasm`` beside it, which it calls: a toolkit's or a package's."""
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    packaged = [str(bin) for path in folders for bin in Path(path).glob("nvidia/*/bin")]
    toolkits = ["/usr/local/cuda/bin", *map(str, Path("/usr/local").glob("cuda-*/bin"))]
    path = os.pathsep.join([os.environ.get("PATH", ""), *packaged, *toolkits])
    found = shutil.which("cuobjdump", path=path)
    beside = "" if found is None else os.path.dirname(found)
    return found if shutil.which("nvdisasm", path=beside or None) else None


def disassembled(cuobjdump: str, binary: Path, architecture: str) -> dict[str, list[Instruction]]:
    """The instructions of every kernel of a library or object, by its mangled name."""
    folder = os.path.dirname(cuobjdump)
    text = subprocess.run(
        [cuobjdump, "-sass", "-arch", architecture, binary],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": os.pathsep.join([folder, os.environ.get("PATH", "")])},
    ).stdout
    return dict(parsed(text))


def parsed(text: str) -> Iterator[tuple[str, list[Instruction]]]:
    """Name and instructions of each function."""
    for function in text.split("Function : ")[1:]:
        name, _, body = function.partition("\n")
        lines = (_LINE.match(line) for line in body.splitlines())
        code = [Instruction(int(line[1], 16), line[2]) for line in lines if line]
        yield name.strip(), code


def busiest_loop(code: list[Instruction]) -> Loop:
    """The loop that loads most, of those with no other's end in them; the shorter of equals."""
    spans = [
        (instruction.target, instruction.address)
        for instruction in code
        if instruction.target is not None and instruction.target < instruction.address
    ]
    ends = {end for _, end in spans}
    loops = (
        _measured([i for i in code if begin <= i.address <= end])
        for begin, end in spans
        if not any(begin <= other < end for other in ends)
    )
    return max(loops, key=lambda loop: (loop.loads, -loop.instructions), default=Loop(0, 0, 0))


def _measured(body: list[Instruction]) -> Loop:
    loads = waits = 0
    awaited: set[int] = set()
    for instruction in body:
        registers = instruction.registers
        if awaited.intersection(registers):  # of some; those after it are the next ones
            waits += 1
            awaited.clear()
        if instruction.loads and registers:
            loads += 1
            stated = instruction.text.partition("[")[0]  # an address may have a width as well
            count = next((n for width, n in _WIDTHS.items() if width in stated), 1)
            awaited.update(range(registers[0], registers[0] + count))
    return Loop(len(body), loads, waits + bool(awaited))
