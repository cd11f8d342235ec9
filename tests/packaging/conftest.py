from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wheel", type=Path, help="the built wheel that tests/packaging installs")


@pytest.fixture(scope="session")
def wheel(request: pytest.FixtureRequest) -> Path:
    # The option is unknown when pytest starts above this folder.
    path: Path | None = request.config.getoption("--wheel", default=None)
    if path is None:
        pytest.skip("needs --wheel: `make test-wheel` builds one and tests it")
    return path.resolve(strict=True)
