"""Settings: every variable, every refusal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from fastgraph import settings
from fastgraph.settings import Settings


def test_defaults() -> None:
    assert Settings.from_environment({}) == Settings(
        enabled=None,
        backend=None,
        strict=False,
        min_edges=None,
        cache_bytes=None,
        cpu_level=None,
        measure=False,
        check_cache=True,
        project_first=None,
        dgl_sampling=False,
        compare=False,
    )


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("FASTGRAPH", "1", "enabled", True),
        ("FASTGRAPH", "0", "enabled", False),
        ("FASTGRAPH", "", "enabled", None),
        ("FASTGRAPH", "off", "enabled", False),
        ("FASTGRAPH_BACKEND", "reference", "backend", "reference"),
        ("FASTGRAPH_STRICT", "True", "strict", True),
        ("FASTGRAPH_MIN_EDGES", "100", "min_edges", 100),
        ("FASTGRAPH_CACHE_BYTES", "0", "cache_bytes", 0),
        ("FASTGRAPH_CPU_LEVEL", "avx2", "cpu_level", "avx2"),
        ("FASTGRAPH_MEASURE", "1", "measure", True),
        ("FASTGRAPH_CHECK_CACHE", "0", "check_cache", False),
        ("FASTGRAPH_PROJECT_FIRST", "0", "project_first", False),
        ("FASTGRAPH_DGL_SAMPLING", "1", "dgl_sampling", True),
        ("FASTGRAPH_COMPARE", "1", "compare", True),
        ("FASTGRAPH", "1", "compare", False),
        ("FASTGRAPH", "compare", "compare", True),
        ("FASTGRAPH", "compare", "enabled", True),
    ],
)
def test_variables(variable: str, text: str, name: str, value: Any) -> None:
    assert getattr(Settings.from_environment({variable: text}), name) == value


@pytest.mark.parametrize(
    ("variable", "text", "words"),
    [
        ("FASTGRAPH", "maybe", ("1, 0 or compare", "'maybe'")),
        ("FASTGRAPH_STRICT", "2", ("1 or 0", "'2'")),
        ("FASTGRAPH_MIN_EDGES", "-1", ("an integer >= 0", "-1")),
        ("FASTGRAPH_MIN_EDGES", "1e3", ("an integer >= 0", "'1e3'")),
        ("FASTGRAPH_CACHE_BYTES", "1 GiB", ("an integer >= 0", "'1 GiB'")),
        ("FASTGRAPH_CPU_LEVEL", "avx51", ("baseline, avx2, avx512", "'avx51'", "did you mean")),
        ("FASTGRAPH_BACKND", "cpu", ("unknown", "did you mean 'FASTGRAPH_BACKEND'")),
    ],
)
def test_invalid_variables(variable: str, text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=variable) as caught:
        Settings.from_environment({variable: text})
    for word in words:
        assert word in str(caught.value)


def test_variables_of_others_are_left_alone() -> None:
    others = {"FASTGRAPH_DATA": "/x", "FASTGRAPH_CUDA": "off", "FASTGRAPHICS": "1", "HOME": "/"}
    assert Settings.from_environment(others) == Settings()


def test_os_environ_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGRAPH_MIN_EDGES", "5")
    assert Settings.from_environment().min_edges == 5


@pytest.mark.parametrize(
    "changes",
    [
        {"enabled": 1},
        {"backend": 3},
        {"backend": ""},
        {"strict": None},
        {"min_edges": -1},
        {"min_edges": True},
        {"min_edges": 1.0},
        {"cache_bytes": "1"},
        {"cpu_level": ["avx2"]},
    ],
)
def test_every_way_to_make_one_checks(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(ValueError, match=f"{name} must be .*, got "):
        Settings(**changes)
    with pytest.raises(ValueError, match=f"{name} must be .*, got "):
        Settings().replace(**changes)


def test_replace_and_freeze() -> None:
    old = Settings(min_edges=3)
    new = old.replace(strict=True, backend="cpu")
    assert (new.strict, new.backend, new.min_edges, old.strict) == (True, "cpu", 3, False)
    with pytest.raises(TypeError, match="did you mean 'min_edges'"):
        old.replace(min_edge=3)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        old.strict = True  # type: ignore[misc]


def test_current_can_be_set() -> None:
    before = settings.current()
    try:
        settings.set_current(before.replace(min_edges=9))
        assert settings.current().min_edges == 9
    finally:
        settings.set_current(before)


def test_import_is_light() -> None:
    code = "import sys, fastgraph.settings; print({'torch', 'click', 'rich'} & set(sys.modules))"
    root = Path(__file__).parents[1]
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert shown.stdout == "set()\n"
