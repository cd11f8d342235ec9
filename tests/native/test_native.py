from __future__ import annotations

import pytest

from fastgraph.machine import native
from fastgraph.settings import CPU_LEVELS


def test_available_levels_ascend_to_the_one_in_use() -> None:
    levels = native.available_levels()
    assert levels
    assert levels == [level for level in CPU_LEVELS if level in levels]


def test_setting_bounds_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTGRAPH_CPU_LEVEL", raising=False)
    assert native.cpu_level() == native.available_levels()[-1]
    lowest = native.available_levels()[0]
    monkeypatch.setenv("FASTGRAPH_CPU_LEVEL", lowest)
    assert native.cpu_level() == lowest


def test_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="level must be one of baseline, avx2, avx512, got 'sse9'"):
        native.library("sse9")


def test_missing_library_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(native, "_LIBRARY_DIR", tmp_path)
    native._load.cache_clear()
    try:
        with pytest.raises(
            RuntimeError, match=r"expected .*libfastgraph_cpu_baseline\.so.*pip install"
        ):
            native.library("baseline")
    finally:
        native._load.cache_clear()
