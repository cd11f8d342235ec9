"""Kernels that were timed for calls on a GPU are used without timing them again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fastgraph import Graph, settings
from fastgraph.backends.reference import ReferenceBackend
from fastgraph.cli.tune import kernels_table
from fastgraph.cli.tuning.kernels import time_kernels
from fastgraph.cli.tuning.measuring import Budget
from fastgraph.cli.tuning.recording import Given, OperatorCall, Program, Values
from fastgraph.machine import cache
from fastgraph.registry.registry import REGISTRY
from fastgraph.tune import choices
from fastgraph.tune.choices import Kept
from fastgraph.tune.fastest import Timed, keep
from tests.test_fastest import EDGES, Kernels, product

OF_PRODUCT = "spmm 5 torch.float32 True False sum False"


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept[str, str]:
    """Choices in a folder of their own, and the setting that asks for them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(settings, "_current", settings.current().replace(measure=True))
    monkeypatch.setattr(choices, "KERNELS", choices.KERNELS.again())
    return choices.KERNELS


@pytest.fixture
def graph() -> Graph:
    return Graph(EDGES, 20, 20)


def timed(graph: Graph, **seconds: float) -> Timed:
    return Timed("a device", graph, OF_PRODUCT, seconds)


@pytest.mark.parametrize(("seconds", "calls"), [({"rows": 2}, [1, 0]), ({"other": 1}, [0, 1])])
def test_what_was_timed_is_not_timed_again(
    seconds: dict[str, float], calls: list[int], graph: Graph, kept: Kept[str, str]
) -> None:
    keep([timed(graph, **{"rows": 3, "other": 3, **seconds})])
    for source in (kept, kept.again()):  # in another run, too
        chosen = {OF_PRODUCT: next(iter(seconds))}
        assert source.of("a device", Graph(EDGES, 20, 20)) == chosen
        assert source.of("another", graph) == {}
    kernels = Kernels()
    product(kernels, graph)
    assert (kernels.calls, kernels.measured) == (calls, 0)
    product(kernels, graph, width=7)
    assert kernels.measured == 2


def test_a_kernel_that_is_no_more_is_not_taken(graph: Graph, kept: Kept[str, str]) -> None:
    keep([timed(graph, gone=1.0)])
    kernels = Kernels()
    product(kernels, graph)
    assert kernels.measured == 2


def test_choices_for_other_calls_stay(graph: Graph, kept: Kept[str, str]) -> None:
    keep([timed(graph, rows=1.0)])
    others = [
        timed(graph, rows=1.0)._replace(kind="other"),
        timed(graph)._replace(device="b", seconds={"x": 1.0}),
    ]
    keep(others)
    source = kept.again()
    assert source.of("a device", graph) == {OF_PRODUCT: "rows", "other": "rows"}
    assert source.of("b", graph) == {OF_PRODUCT: "x"}


def test_a_file_that_is_no_choice_is_left_alone(graph: Graph, kept: Kept[str, str]) -> None:
    cache.write(kept.kind, "a device", {"a graph": 3})
    path = cache.path_of(kept.kind, "a device")
    assert kept.of("a device", graph) == {}
    assert json.loads(path.read_text())["content"] == {"a graph": 3}


class WithRival(ReferenceBackend):
    """The reference, whose products have a rival."""

    name = "with rival"

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def kernel(self, operator: str, device_type: str, dtype: torch.dtype) -> Any:
        if operator == "spmm":
            return self._kernels.spmm.__call__
        return super().kernel(operator, device_type, dtype)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    kernels = Kernels()
    monkeypatch.setitem(REGISTRY.backends, "with rival", WithRival(kernels))
    REGISTRY.select("with rival")
    yield kernels
    REGISTRY.select(None)


def test_calls_are_timed(kernels: Kernels, kept: Kept[str, str]) -> None:
    """Those of a device, as far as the budget goes, in both directions."""
    features = Values((20, 5), torch.float32, True)
    spmm = OperatorCall("spmm", (features, Given(0), None, None, 20, "sum", False))
    others = [spmm._replace(device="cuda"), OperatorCall("head_scores", (features, features))]
    program = Program({spmm: ["GINConv"], **{call: ["?"] for call in others}}, [EDGES], 2, False, 0)
    measure = settings.current().measure
    assert time_kernels(program, Budget(0.0), "cpu") == [(["GINConv"], [])]
    (found,) = time_kernels(program, Budget(60.0), "cpu")
    assert settings.current().measure is measure
    assert found.layers == ["GINConv"]
    assert [one.kind for one in found.timed] == [
        OF_PRODUCT,
        OF_PRODUCT.replace("sum False", "sum True"),
    ]
    assert all(one.seconds == {"rows": 2.0, "other": 1.0} for one in found.timed)
    cells = [list(column.cells) for column in kernels_table([found]).columns]
    assert cells[0] == ["GINConv"] * 2 and cells[3] == ["other 1000.000, rows 2000.000"] * 2
    keep(found.timed)
    measured = kernels.measured
    product(kernels, Graph(EDGES, 20, 20))
    assert kernels.measured == measured
    # What is kept is not asked while something is timed.
    time_kernels(program, Budget(60.0), "cpu")
    assert kernels.measured == measured + 4
