"""The code blocks of the documentation run, and print what the pages show."""

from __future__ import annotations

import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import environment
from tests.docs import run_page
from tests.docs.blocks import ROOT, Block, blocks_of, pages

pytest.importorskip("torch_geometric")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


RUN = [page for page in pages() if {"python", "sh"} & {block.kind for block in blocks_of(page)}]


@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_blocks_run(page: Path, tmp_path: Path) -> None:
    if page.name == "dgl.md" and find_spec("dgl") is None:
        pytest.skip("DGL is not installed: `make test-dgl` runs this page")
    run(page, tmp_path)


def run(page: Path, folder: Path) -> None:
    """Run the blocks of a page in this folder."""
    # Without the variable DGL writes a file at home.
    wrong = run_page.run_page(page, folder, environment(DGLBACKEND="pytorch"))
    assert not wrong, wrong


def excerpts() -> list[Any]:
    return [
        pytest.param(name_of(page), block, id=f"{name_of(page)}:{block.line}")
        for page in pages()
        for block in blocks_of(page)
        if block.kind == "excerpt"
    ]


@pytest.mark.parametrize(("page", "block"), excerpts())
def test_excerpts_are_those_of_the_file(page: str, block: Block) -> None:
    rest = [line.rstrip() for line in (ROOT / block.title).read_text().splitlines()]
    for part in split_at_dots(block.code):
        starts = [i for i in range(len(rest) - len(part) + 1) if rest[i : i + len(part)] == part]
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
