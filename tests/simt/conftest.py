from __future__ import annotations

import pytest

from tests.simt import library


@pytest.fixture(scope="session")
def emulator() -> library.Emulator:
    why_not = library.why_unavailable()
    if why_not is not None:
        pytest.skip(why_not)
    return library.Emulator(library.build("checked"))
