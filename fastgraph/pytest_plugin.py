"""Running any project's tests under fastgraph: ``pytest --fastgraph``.

The fixture ``fastgraph_enabled`` does so for single tests. Nothing here imports torch or changes
anything until one of both is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fastgraph.routing.status import Status

_USED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--fastgraph``."""
    parser.getgroup("fastgraph").addoption(
        "--fastgraph",
        action="store_true",
        help="run all tests with fastgraph enabled, for graphs of any size, and show its status",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Enable before test modules are imported, because they may run layers themselves."""
    if config.getoption("--fastgraph"):
        import fastgraph

        config.stash[_USED] = True
        try:
            fastgraph.enable(min_edges=0)
        except ValueError as error:
            raise pytest.UsageError(f"--fastgraph: {error}") from None


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave a process that goes on after its tests as it was."""
    if config.getoption("--fastgraph"):
        import fastgraph

        fastgraph.disable()


@pytest.fixture
def fastgraph_enabled(request: pytest.FixtureRequest) -> Iterator[Status]:
    """Enabled during the test, for graphs of any size; gives ``fastgraph.status()``."""
    import fastgraph

    request.config.stash[_USED] = True
    with fastgraph.enabled(min_edges=0):
        yield fastgraph.status()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Show what was routed, if fastgraph was used at all."""
    if not config.stash.get(_USED, False):
        return
    import fastgraph
    from fastgraph.settings import NOT_ENABLED, Settings

    terminalreporter.section("fastgraph")
    if Settings.from_environment().enabled is False:
        terminalreporter.write_line(NOT_ENABLED)
    elif config.pluginmanager.hasplugin("dsession"):
        terminalreporter.write_line(
            "every worker has a status of its own; run without -n to see it"
        )
    else:
        terminalreporter.write(str(fastgraph.status()))
