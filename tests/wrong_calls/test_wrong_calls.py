"""A few wrong calls of a few classes, and that the harness finds what differs."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.outcomes import Outcome
from tests.wrong_calls import pyg
from tests.wrong_calls.cases import Case
from tests.wrong_calls.comparing import Difference, compared, is_nearer
from tests.wrong_calls.exceptions import MEANT, reason_of
from tests.wrong_calls.forking import outcomes

DOCS = Path(__file__).parents[2] / "docs"

# Of each kind of route, and of each kind of argument.
SAMPLE = {
    "GCNConv, weighted": ("right", "edge_weight: sparse", "edge_index: COO, empty"),
    "SAGEConv": ("x: a pair of mixed devices", "edge_index: CSR, too few columns"),
    "SimpleConv, max": ("edge_index: CSR, too many columns",),
    "GATConv, edges": ("right", "x: a pair of mixed devices", "edge_attr: scalar"),
    "RGCNConv": ("x: no channels", "edge_type: too large", "edge_type: float"),
    "FastRGCNConv": ("edge_type: on meta", "edge_index: on meta"),
    "LEConv": ("edge_weight: float64",),
    "GENConv, pair": ("x.0: bfloat16",),
    "GINEConv": ("edge_index: source too large", "edge_index: int16", "edge_attr: too short"),
}


@pytest.mark.repeats
@pytest.mark.parametrize("name", SAMPLE)
def test_wrong_calls_end_as_upstreams(name: str) -> None:
    module, cases = pyg.layer_and_cases(name)
    chosen = [case for case in cases if case.name in SAMPLE[name]]
    assert len(chosen) == len(SAMPLE[name])
    assert compared(name, module, chosen) == []


def outcome_of(*results: Tensor | None) -> Outcome:
    return Outcome("end", None, results)


@pytest.mark.parametrize("wrong", [torch.tensor([torch.nan, 2.0]), torch.tensor([1.3, 2.0]), None])
def test_no_other_result_is_nearer_than_upstreams(wrong: Tensor | None) -> None:
    """A result that is NaN, missing or farther from the exact one is a difference."""
    exact = outcome_of(torch.tensor([1.0, 2.0], dtype=torch.float64))
    upstream = outcome_of(torch.tensor([1.2, 2.0]))
    assert is_nearer(outcome_of(torch.tensor([1.1, 2.0])), upstream, exact)
    assert not is_nearer(outcome_of(wrong), upstream, exact)
    assert not is_nearer(outcome_of(torch.tensor([1.0, 2.0]).half()), upstream, exact)


class Ending(nn.Module):
    """Ends the process, or computes for ever."""

    def forward(self, how: str) -> Any:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hangs":
            end = time.process_time() + 30
            while time.process_time() < end:
                pass
        if how == "raises":
            raise KeyError(how)
        return torch.ones(1)


def test_calls_that_end_their_process() -> None:
    cases = [Case(how, ((how,), {})) for how in ("computes", "dies", "raises", "hangs", "last")]
    found = outcomes(Ending(), cases, 0.5, routed=False)
    assert found[1] == "died of SIGKILL" and found[3] == "ran for more than 0.5 s"
    assert [str(found[place]) for place in (0, 2, 4)] == [
        "1 results",
        "forward: KeyError: 'raises'",
        "1 results",
    ]


class Impostor(nn.Module):
    """Computes something else where fastgraph is on."""

    def forward(self, x: Tensor) -> Tensor:
        from fastgraph.routing.switch import SWITCH

        return x + 1 if SWITCH.active else x


def test_differences_are_found() -> None:
    case = Case("right", ((), {"x": torch.ones(2)}))
    (found,) = compared("Impostor", Impostor(), [case])
    assert found[:3] == ("Impostor", "right", "computes / computes")
    assert reason_of("pyg", found) is None


@pytest.mark.parametrize("meant", MEANT)
def test_what_is_meant_is_on_its_page(meant: Any) -> None:
    page = " ".join((DOCS / meant.page).read_text().split())
    assert meant.reason in page


def test_edits_that_are_not_counted_are_meant_unless_one_side_fails() -> None:
    found = Difference(
        "L", "x: doubled through .data between the passes", "computes / computes", ""
    )
    assert reason_of("pyg", found) == MEANT[1].reason
    assert reason_of("pyg", found._replace(kind="computes / died of SIGSEGV")) is None
