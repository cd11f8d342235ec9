"""Attention by the kernels for other instruction sets than the best one of this machine.

Their vectors are wider than registers, and compilers pass them in memory.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from fastgraph.machine import native
from tests.graphs import Case, hub_edges, random_edges

from .test_heads import (
    OPERATORS,
    Inputs,
    error_ratios,
    inputs_of,
    operator,
    upstream,
    with_gradients,
)

CASES = (
    Case("few", random_edges(40, 40, 90), 40, 40),
    Case("many", random_edges(40, 40, 900), 40, 40),
    Case("cut", hub_edges(40, 9000), 40, 40),
)


def _ours(name: str, case: Case, inputs: Inputs) -> Tensor:
    return operator(name)(*inputs, case.edge_index)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("level", native.available_levels()[:-1])
def test_attention_is_as_close_as_upstream(
    level: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_default_library", lambda: native.library(level))
    for case in CASES:
        exact = inputs_of(name, case, channels=12)
        rounded = [t.float() for t in exact]
        by_upstream = functools.partial(upstream, name, case=case)
        by_us = functools.partial(_ours, name, case)
        truth = with_gradients(by_upstream, [t.double() for t in rounded])
        single = with_gradients(by_us, rounded)
        assert max(error_ratios(single, with_gradients(by_upstream, rounded), truth)) < 3
        for found, expected in zip(
            with_gradients(by_us, exact), with_gradients(by_upstream, exact), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
