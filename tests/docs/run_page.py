"""Runs the blocks of one page, in their order.

In a process of its own, as it enables fastgraph and changes what it likes.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from tests import forks
from tests.docs.blocks import ROOT, Block, blocks_of
from tests.interpreter import interpreter


def run_page(page: Path, folder: Path, environment: Mapping[str, str]) -> str:
    """Run a page in a folder, with other variables of the environment.

    Returns:
        What is wrong with it: what it printed, or nothing.
    """
    log = folder / "page.log"
    with interpreter(environment) as python:
        paths = (str(python.parent), str(Path(sys.executable).parent), environment["PATH"])
        given = {**environment, "PATH": os.pathsep.join(paths)}
        code = forks.call(run_blocks, page, python, folder=folder, variables=given, out=log)
    return "" if code == 0 else f"exit status {code}\n{log.read_text()}"


def run_blocks(page: Path, python: Path) -> None:
    """Run a page in this process, in the current folder, with this interpreter for others."""
    sys.executable = str(python)
    sys.path.insert(0, str(Path.cwd()))  # with the files of the page, as where a script is
    blocks = blocks_of(page)
    for block in blocks:
        if block.kind == "file":
            Path(block.title).write_text(block.code)
    module = module_of(blocks)
    printed = ""
    for block in blocks:
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if block.kind == "python":
            printed = run_python(block, module)
        elif block.kind == "sh":
            printed = run_shell(block, where)
        elif block.kind == "output":
            check_output(block, printed, where)


def module_of(blocks: list[Block]) -> ModuleType:
    """The module in which the page's Python runs, with its source where that of modules is.

    PyG reads the source of classes. Lines are those of the page, in tracebacks as well.
    """
    lines: list[str] = []
    for block in blocks:
        if block.kind == "python":
            lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
    module = ModuleType("page")
    module.__file__ = str(Path("page.py").absolute())
    Path(module.__file__).write_text("\n".join(lines) + "\n")
    sys.modules["page"] = module
    return module


def run_python(block: Block, module: ModuleType) -> str:
    assert module.__file__ is not None
    code = compile("\n" * (block.line - 1) + block.code, module.__file__, "exec")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, vars(module))
    return out.getvalue()


def run_shell(block: Block, where: str) -> str:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{where}: exit status {done.returncode}\n{done.stdout}")
    return done.stdout


def check_output(block: Block, printed: str, where: str) -> None:
    shown = [line.rstrip() for line in block.code.splitlines()]
    lines = [line.rstrip() for line in printed.splitlines()]
    places = range(len(lines) - len(shown) + 1)
    if not any(lines[place : place + len(shown)] == shown for place in places):
        raise SystemExit(f"{where}: this is not among what the block before it prints:\n{printed}")
