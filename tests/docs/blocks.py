"""The code blocks of a page, and what the words behind their three backticks ask of a test.

============================ ===========================================================
``python``                   runs; blocks of a page share their names
``sh``                       runs, in bash
``python title="train.py"``  becomes a file beside the page's programs, whatever language
``cpp title="a/path.cu"``    an excerpt of that file of the repository, word for word;
                             a line of dots stands for lines that are left out
``text output``              is among what the block before it prints
``text``                     anything else that is no code
``sh no-run``                is not run; a comment before it says ``<!-- not run: why -->``
============================ ===========================================================
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^`\n]*)\n(?P<code>.*?)^(?P=indent)```$", re.M | re.S
)
_TITLE = re.compile(r'(\w+) title="([^"]+)"')
_WHY_NOT = re.compile(r"<!-- not run: \S.*? -->\s*\Z", re.S)
_RUN = ("python", "sh")


class Block(NamedTuple):
    """A code block.

    Attributes:
        line: of its first line of code, from 1.
        info: what stands behind the backticks.
        kind: ``"python"``, ``"sh"``, ``"file"``, ``"excerpt"``, ``"output"``, ``"text"`` or
            ``"no-run"``.
        code: its text.
        title: the name of the file, for the kinds ``"file"`` and ``"excerpt"``.
    """

    line: int
    info: str
    kind: str
    code: str
    title: str = ""


def pages() -> list[Path]:
    """Every page that people read."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page.

    Raises:
        ValueError: a block is of a kind that no test knows, or does not say why it is not run.
    """
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        where = f"{page.relative_to(ROOT)}:{line}"
        kind, title = _kind(match["info"], where)
        if kind == "no-run" and not _WHY_NOT.search(text[: match.start()]):
            raise ValueError(f"{where}: expected <!-- not run: why --> before the block")
        code = re.sub(f"^{match['indent']}", "", match["code"], flags=re.MULTILINE)
        found.append(Block(line, match["info"], kind, code, title))
    return found


def _kind(info: str, where: str) -> tuple[str, str]:
    if info in (*_RUN, "text"):
        return info, ""
    if info == "text output":
        return "output", ""
    if info in [f"{language} no-run" for language in _RUN]:
        return "no-run", ""
    titled = _TITLE.fullmatch(info)
    if titled is None:
        raise ValueError(f"{where}: no test knows blocks of the kind {info!r}")
    is_excerpt = "/" in titled[2]
    if is_excerpt and not (ROOT / titled[2]).is_file():
        raise ValueError(f"{where}: there is no file {titled[2]}")
    return "excerpt" if is_excerpt else "file", titled[2]
