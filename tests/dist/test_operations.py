"""Single operations on sharded tensors, beside the same on one process."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fastgraph.dist as fgd
from tests import forks
from tests.dist import probes
from tests.dist.comparing import deviation
from tests.dist.graphs import NUM_NODES, graph, one_has_a_single_node, one_is_empty, uneven

# Sums are taken in another order; values are of order 1 to 1e3.
TOLERANCE = 1e-12


class Found(NamedTuple):
    """The outcome of a probe: an error, or how far it is off; and the operations that gathered."""

    error: str
    gathers: frozenset[str]


OF_GROUPS = tuple(
    name for name, probe in probes.PROBES.items() if probe.run.__module__ == probes.groups.__name__
)


ORDER = torch.randperm(NUM_NODES, generator=torch.Generator().manual_seed(2))


def compare_on_this_rank(
    names: Collection[str],
    layout: Callable[[int], Tensor] = uneven,
    order: Tensor | None = None,
) -> dict[str, Found]:
    torch.set_default_dtype(torch.float64)
    probes.m.make()
    plain = graph()
    sharded = fgd.shard(graph(), parts=layout(fgd.init().size), order=order)
    found = {}
    for name in names:
        probe = probes.PROBES[name]
        expected = outcome(probe, plain)
        fgd.COUNTS.reset()
        try:
            values = outcome(probe, sharded)
            error = difference(expected, values)
        except Exception:
            error = traceback.format_exc()
        found[name] = Found(error, frozenset(fgd.COUNTS.gathers))
    return found


def outcome(probe: probes.Probe, data: Any) -> list[Tensor | None]:
    torch.manual_seed(0)
    for parameter in probes.m.parameters():
        parameter.grad = None
    value = probe.run(data)
    if value.requires_grad:
        value.square().sum().backward()
    gathers = fgd.COUNTS.gathers.copy()
    results = [fgd.whole(value).detach(), *(p.grad for p in probes.m.parameters())]
    fgd.COUNTS.gathers.clear()
    fgd.COUNTS.gathers.update(gathers)
    return results


def difference(expected: list[Tensor | None], found: list[Tensor | None]) -> str:
    norm = sum(float(grad.square().sum()) for grad in expected[1:] if grad is not None) ** 0.5
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        what = "the value" if i == 0 else f"gradient {i - 1}"
        wrong = deviation(a, b, TOLERANCE, None if i == 0 else norm)
        if wrong:
            return f"{what} {wrong}"
    return ""


@pytest.fixture(scope="module")
def found(
    world_size: int, once_on_ranks: Any, request: pytest.FixtureRequest
) -> list[dict[str, Found]]:
    """The outcomes of the probes that were chosen, as by ``-k``, on each rank.

    Rows of a rank are in an order of their own, unlike in other modules.
    """
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    parameters = [test.callspec.params for test in tests if test.module is request.module]
    chosen = {given["name"] for given in parameters if "name" in given}
    names = tuple(name for name in probes.PROBES if name in chosen)
    found: list[dict[str, Found]] = once_on_ranks(
        compare_on_this_rank, world_size, names, uneven, ORDER
    )
    return found


@pytest.mark.parametrize("name", probes.PROBES)
def test_an_operation_gives_what_it_gives_on_one_process(
    found: list[dict[str, Found]], name: str
) -> None:
    for rank, of_rank in enumerate(found):
        assert not of_rank[name].error, f"rank {rank}: {of_rank[name].error}"


@pytest.mark.parametrize("name", probes.PROBES)
def test_what_is_gathered_is_known(found: list[dict[str, Found]], name: str) -> None:
    for of_rank in found:
        assert of_rank[name].gathers <= probes.PROBES[name].gathers


@pytest.mark.parametrize("layout", [one_is_empty, one_has_a_single_node])
def test_groups_are_those_of_one_process_where_a_rank_has_none(
    world_size: int, layout: Callable[[int], Tensor]
) -> None:
    for of_rank in forks.on_ranks(compare_on_this_rank, world_size, OF_GROUPS, layout):
        for name, (error, gathers) in of_rank.items():
            assert not error, f"{name}: {error}"
            assert gathers <= probes.PROBES[name].gathers, name
