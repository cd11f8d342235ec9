"""Entries of the cache between runs are whole, and are data."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastgraph.machine import cache


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_content_is_read_again_by_its_kind_and_identity(folder: Path) -> None:
    assert cache.read("speeds", "a") is None
    cache.write("speeds", "a", {"speed": 2.5})
    assert cache.read("speeds", "a") == {"speed": 2.5}
    assert cache.read("speeds", "b") is None and cache.read("others", "a") is None
    path = cache.path_of("speeds", "a")
    assert folder in path.parents
    assert [child.name for child in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"content": 1}', '{"identity": "b", "content": 1}']
)
def test_what_is_not_whole_is_not_there(content: str) -> None:
    cache.write("speeds", "a", 1)
    cache.path_of("speeds", "a").write_text(content)
    assert cache.read("speeds", "a") is None


def test_what_was_edited_is_not_there() -> None:
    cache.write("speeds", "a", {"speed": 2.5})
    path = cache.path_of("speeds", "a")
    path.write_text(path.read_text().replace("2.5", "3.5"))
    assert cache.read("speeds", "a") is None


def test_where_nothing_can_be_kept_nothing_happens(folder: Path) -> None:
    (folder / "fastgraph").write_text("in the way of a folder")
    cache.write("speeds", "a", 1)
    assert cache.read("speeds", "a") is None
