"""Ranks for the tests of sharded graphs, as in ``tests/dist``."""

from __future__ import annotations

from tests.dist.conftest import once_on_ranks, pytest_generate_tests

__all__ = ["once_on_ranks", "pytest_generate_tests"]
