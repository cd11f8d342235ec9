"""Calls that are slower than plain torch on a device are not routed there."""

from __future__ import annotations

import time
from typing import Any

import torch

from fastgraph.backends import reference
from fastgraph.verification.checking import Finding
from fastgraph.verification.speed import speeds, without_slower

CPU = torch.device("cpu")


class Planted:
    """Two operators of the reference, of which one takes its time."""

    name = "planted"
    priority = 500

    def unavailable(self) -> str | None:
        return None

    def kernel(self, operator: str, device_type: str, dtype: torch.dtype) -> Any:
        if operator == "edge_softmax":
            return reference.edge_softmax
        if operator != "head_scores":
            return None

        def slow(*arguments: Any) -> Any:
            time.sleep(0.2)
            return reference.head_scores(*arguments)

        return slow


def test_a_slow_kernel_is_noticed_and_plain_torch_is_not_compared_with_itself() -> None:
    found = speeds(Planted(), CPU)
    assert list(found) == ["head_scores"]
    assert 0 < found["head_scores"] < 1


def test_findings_of_slower_operators_fail_in_all_dtypes() -> None:
    findings = [
        Finding("spmm", torch.float32, 3, 0.5, None),
        Finding("gatv2", torch.float32, 3, 0.5, None),
        Finding("gatv2", torch.float16, 3, 2.0, "off"),
        Finding("gatv2", torch.float64, 3, 0.5, None),
        Finding("edge_softmax", torch.float32, 3, 0.5, None),
    ]
    judged = without_slower(findings, {"spmm": 1.5, "gatv2": 0.8})
    slow = "0.80 times as fast as torch"
    assert [finding.failure for finding in judged] == [None, slow, "off", slow, None]
