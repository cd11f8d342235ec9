"""``%load_ext fastgraph``: enables, and unloading disables."""

from __future__ import annotations

import importlib

import pytest

import fastgraph


class Shell:
    """As IPython's extension manager calls extensions, where IPython is not installed."""

    def run_line_magic(self, magic: str, name: str) -> None:
        module = importlib.import_module(name)
        {"load_ext": module.load_ipython_extension, "unload_ext": module.unload_ipython_extension}[
            magic
        ](self)


@pytest.fixture(params=["stand-in", "IPython"])
def shell(request: pytest.FixtureRequest) -> Shell:
    if request.param == "stand-in":
        return Shell()
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    return interactive.InteractiveShell()  # type: ignore[no-any-return]


def test_loading_enables_and_unloading_disables(shell: Shell) -> None:
    fastgraph.disable()
    try:
        for _ in range(2):
            shell.run_line_magic("load_ext", "fastgraph")
            assert fastgraph.is_enabled()
            shell.run_line_magic("unload_ext", "fastgraph")
            assert not fastgraph.is_enabled()
    finally:
        fastgraph.disable()


def test_the_kill_switch_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGRAPH", "0")
    fastgraph.disable()
    Shell().run_line_magic("load_ext", "fastgraph")
    assert not fastgraph.is_enabled()
