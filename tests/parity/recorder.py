"""A plugin of pytest that writes down each case as it begins and as it ends.

So that a process that dies leaves which case it was in, and a run goes on where another ended. It
imports nothing of fastgraph, since one of two runs is without.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parity.records import finished, read


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, required=True, help="file of JSON lines")
    parser.addoption("--fix-import", action="store_true", help="have DGL import on any torch")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--fix-import"):
        from fastgraph.dgl import fix_import

        fix_import()
    config.pluginmanager.register(_Recorder(config.getoption("--record")))


class _Recorder:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcome = ("", "")

    def _write(self, **line: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{json.dumps(line)}\n")

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        done = finished(read(self._path))
        left = [item for item in items if item.nodeid not in done]
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
        items[:] = left

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed or (report.skipped and report.nodeid.endswith(".py")):
            outcome = "skipped" if report.skipped else "collection failed"
            self._write(case=report.nodeid, outcome=outcome, why=_why(report))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        # A case that fails for some random numbers only must meet the same ones both times.
        random.seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
        if "torch" in sys.modules:
            sys.modules["torch"].manual_seed(0)
        return (yield)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._outcome = ("passed", "")
        self._write(case=nodeid, outcome="begun")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._outcome = ("failed", _why(report))
        elif report.skipped and self._outcome[0] == "passed":
            is_expected = hasattr(report, "wasxfail")
            self._outcome = ("failed as expected" if is_expected else "skipped", _why(report))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(case=nodeid, outcome=self._outcome[0], why=self._outcome[1])


def _why(report: pytest.TestReport | pytest.CollectReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash else report.longrepr).strip().splitlines()
    if not lines:
        return ""
    return lines[0] if crash else lines[-1]
