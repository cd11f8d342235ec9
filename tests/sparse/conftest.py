"""Values wait in these tests, few as they are."""

from __future__ import annotations

import pytest

from fastgraph.sparse import expression


@pytest.fixture(autouse=True)
def _values_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expression, "FEWEST_VALUES", 1)
