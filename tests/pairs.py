"""Of the product of three parameters and more, tests that together meet each pair of values.

What breaks is mostly one value, or two that meet (D. R. Kuhn, D. R. Wallace, A. M. Gallo, Software
Fault Interactions and Implications for Software Testing, IEEE Transactions on Software Engineering
30(6), 2004). Tests are chosen greedily, as many new pairs as there are first (D. M. Cohen et al.,
The AETG System, IEEE Transactions on Software Engineering 23(7), 1997).
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable

import pytest

SUBJECTS = ("backend", "lib")
"""Parameters that say whose code runs: each value of them meets all pairs of the others."""

TOGETHER = "world_size"
"""Where it is a parameter, ranks compute for all tests at once, and a test less spares nothing."""

Value = tuple[str, int]
"""A parameter's name and the identity of one of its values, which all tests of a function share."""


def left_out(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Tests whose pairs of values others of the same function meet."""
    groups: dict[tuple[str, ...], list[pytest.Item]] = defaultdict(list)
    for item in items:
        call = getattr(item, "callspec", None)
        if call is not None and TOGETHER not in call.params:
            subjects = (str(call.params.get(name)) for name in SUBJECTS)
            groups[item.nodeid.partition("[")[0], *subjects].append(item)
    return {item for group in groups.values() for item in set(group) - chosen(group)}


def chosen(group: list[pytest.Item]) -> set[pytest.Item]:
    """Tests of one function that together meet all pairs which those of the group meet."""
    given = [[(name, id(value)) for name, value in params_of(item)] for item in group]
    factors = independent(given)
    if len(factors) < 3:
        return set(group)
    pairs = [
        set(itertools.combinations([value for value in values if value[0] in factors], 2))
        for values in given
    ]
    found, met = set(), set[tuple[Value, Value]]()
    # How many pairs a test adds only falls: one that adds as many as before is the best.
    waiting = [(-len(new), number) for number, new in enumerate(pairs)]
    heapq.heapify(waiting)
    while waiting:
        before, number = heapq.heappop(waiting)
        now = -len(pairs[number] - met)
        if now == before:
            met |= pairs[number]
            found.add(group[number])
        elif now < 0:
            heapq.heappush(waiting, (now, number))
    return found


def params_of(item: pytest.Item) -> Iterable[tuple[str, object]]:
    params: dict[str, object] = item.callspec.params  # type: ignore[attr-defined]
    return params.items()


def independent(given: list[list[Value]]) -> set[str]:
    """Names of parameters that vary, one of those that vary together."""
    columns: dict[str, list[int]] = defaultdict(list)
    for values in given:
        for name, value in values:
            columns[name].append(value)
    classes: dict[tuple[int, ...], str] = {}
    for name, column in columns.items():
        numbers: dict[int, int] = {}
        classes.setdefault(tuple(numbers.setdefault(v, len(numbers)) for v in column), name)
    return {name for numbers, name in classes.items() if len(set(numbers)) > 1}
