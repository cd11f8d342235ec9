"""What pages show is what happens."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs import run_page
from tests.docs.blocks import ROOT, Block, blocks_of, pages

pytest.importorskip("torch_geometric")

IDS: Callable[[Path], str] = lambda page: str(page.relative_to(ROOT))  # noqa: E731
RUN = [page for page in pages() if {"python", "sh"} & {block.kind for block in blocks_of(page)}]


@pytest.mark.parametrize("page", RUN, ids=IDS)
def test_blocks_run(page: Path, tmp_path: Path) -> None:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("FASTGRAPH", "PYTHON"))}
    done = subprocess.run(
        [sys.executable, run_page.__file__, str(page)],
        cwd=tmp_path,
        env={**inherited, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def excerpts() -> list[tuple[str, Block]]:
    found = [(IDS(page), block) for page in pages() for block in blocks_of(page)]
    return [(page, block) for page, block in found if block.kind == "excerpt"]


@pytest.mark.parametrize(("page", "block"), excerpts(), ids=lambda part: getattr(part, "line", part))
def test_excerpts_are_those_of_the_file(page: str, block: Block) -> None:
    rest = [line.rstrip() for line in (ROOT / block.title).read_text().splitlines()]
    for part in split_at_dots(block.code):
        starts = [
            i for i in range(len(rest) - len(part) + 1) if rest[i : i + len(part)] == part
        ]
        assert starts, f"{page}:{block.line}: {block.title} does not hold\n" + "\n".join(part)
        rest = rest[starts[0] + len(part) :]


def split_at_dots(code: str) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for line in code.splitlines():
        if line.strip() in ("...", "// ...", "# ..."):
            parts.append([])
        else:
            parts[-1].append(line.rstrip())
    return [part for part in parts if part]


def test_configuration_files_can_be_read() -> None:
    for page in pages():
        for block in blocks_of(page):
            if block.info.startswith("toml"):
                tomllib.loads(block.code)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```pyhton\n```\n", r"page.md:2: no test knows blocks of the kind 'pyhton'"),
        ("```sh no-run\nls\n```\n", "expected <!-- not run: why --> before the block"),
        ('```cpp title="csrc/none.cu"\n```\n', "there is no file csrc/none.cu"),
    ],
)
def test_blocks_that_nothing_would_check_are_refused(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.docs.blocks.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match=message):
        blocks_of(page)


def test_wrong_blocks_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_page.run_shell(Block(1, "sh", "sh", "echo a; echo b\n"), "page") == "a\nb\n"
    with pytest.raises(SystemExit, match="page: exit status 3"):
        run_page.run_shell(Block(1, "sh", "sh", "exit 3\n"), "page")
    run_page.check_output(Block(1, "", "output", "b\n"), "a\nb\nc\n", "page")
    with pytest.raises(SystemExit, match="not among"):
        run_page.check_output(Block(1, "", "output", "a\nc\n"), "a\nb\nc\n", "page")
