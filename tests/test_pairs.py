"""The choice of tests that together meet each pair of values."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tests import pairs


@dataclass(eq=False)
class Item:
    """The attributes of a test by which it is chosen."""

    nodeid: str
    params: dict[str, Any]

    @property
    def callspec(self) -> SimpleNamespace:
        return SimpleNamespace(params=self.params)


def product(name: str, **values: Any) -> list[Item]:
    """The tests of a function with parameters, where ``a`` brings another along with it."""
    together = {value: object() for value in values["a"]}
    given = [
        dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())
    ]
    return [Item(f"{name}[{i}]", p | {"with_a": together[p["a"]]}) for i, p in enumerate(given)]


def met(items: list[Item], *names: str) -> set[tuple[Any, ...]]:
    return {tuple(item.params[name] for name in names) for item in items}


def test_each_subject_meets_all_pairs_with_few_tests() -> None:
    items = product("f", a=range(5), b="pqrs", c=(False, True), d=(None, 1, 2), backend=("x", "y"))
    out = pairs.left_out(items)  # type: ignore[arg-type]
    kept = [item for item in items if item not in out]
    for first, second in itertools.combinations("abcd", 2):
        names = ("backend", first, second)
        assert met(kept, *names) == met(items, *names)
    assert len(items) == 240 and 40 <= len(kept) <= 52  # 5 x 4 pairs of a and b for each backend


def test_products_of_two_and_of_ranks_are_whole() -> None:
    two = product("f", a=range(5), b="pqrs", backend=("x", "y"))
    ranks = product("g", a=range(3), b="pqr", c=range(3), world_size=(2, 3))
    assert not pairs.left_out([*two, *ranks])  # type: ignore[list-item]
