from __future__ import annotations

import pytest

from fastgraph.backends import tasks
from tests.conftest import NOT_ASKED_FOR
from tests.simt import backend, library


@pytest.fixture(scope="session", autouse=True)
def emulator(request: pytest.FixtureRequest) -> library.Emulator:
    if not request.config.getoption("--emulate"):
        pytest.skip(NOT_ASKED_FOR)
    why_not = library.why_unavailable()
    if why_not is not None:
        pytest.skip(why_not)
    return backend.emulator()


@pytest.fixture(autouse=True)
def _chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the graphs here, some are cut like large ones."""
    monkeypatch.setattr(tasks, "SMALL", 2000)
