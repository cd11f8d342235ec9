from __future__ import annotations

import pytest

from tests.simt import backend, library


@pytest.fixture(scope="session", autouse=True)
def emulator() -> library.Emulator:
    why_not = library.why_unavailable()
    if why_not is not None:
        pytest.skip(why_not)
    return backend.emulator()
