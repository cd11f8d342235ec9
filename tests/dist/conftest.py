"""Ranks that are started once for all processes of a run of the tests."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
from filelock import FileLock

from fastgraph.dist.graphs import pyg_functions
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor import hooks
from tests import forks

ON_SQUARES = ("test_grid_programs", "test_sparse")
"""Modules whose subject is a grid of several rows and columns."""

_SECONDS_OF_A_RANK = 100.0
"""Ranks share the cores: more of them are given more time."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world_size" in metafunc.fixturenames:
        asked = metafunc.config.getoption("--ranks")
        sizes: list[Any] = [int(size) for size in asked.split(",")] if asked else [3]
        if metafunc.module.__name__.endswith(ON_SQUARES):
            sizes = sizes if asked else [4]
            sizes.append(pytest.param(9, marks=pytest.mark.exhaustive))
        metafunc.parametrize("world_size", sizes, scope="module")


def _world_as_before() -> Iterator[None]:
    before = asdict(WORLD)
    yield
    vars(WORLD).update(before)


@pytest.fixture(autouse=True)
def world_as_before() -> Iterator[None]:
    """A test that joins the ranks, if only as a single one, does so for itself alone."""
    yield from _world_as_before()


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Tests of other modules do not see what fixtures of a module joined and patched."""
    yield from _world_as_before()
    hooks.PATCHES.restore()
    pyg_functions._AWAITED.clear()


@pytest.fixture(scope="session")
def once_on_ranks(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., list[Any]]:
    """The values of a function on some ranks, run once; every test process gets the same.

    The tests of a module are spread over processes. What ranks keep between runs is of this one.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # that of this run, for all of its processes

    def run(
        function: Callable[..., Any], world_size: int, *arguments: Any, diverges: bool = False
    ) -> list[Any]:
        name = f"{function.__module__}.{function.__name__}-{world_size}"
        results = folder / name
        with FileLock(folder / f"{name}.lock"), pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
            if not results.exists():
                timeout = _SECONDS_OF_A_RANK * max(world_size, 3)
                done = forks.on_ranks(
                    function, world_size, *arguments, timeout=timeout, diverges=diverges
                )
                results.write_bytes(pickle.dumps(done))
        found: list[Any] = pickle.loads(results.read_bytes())
        return found

    return run
