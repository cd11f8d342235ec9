"""Times of kernels beside plain torch, on the same device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import attrs
import torch

from fastgraph.backends import reference
from fastgraph.plugins.backend import Backend
from fastgraph.tune.fastest import seconds_on_gpu
from fastgraph.verification.cases import typical
from fastgraph.verification.checking import Finding, prepare

_REPEATS = 5


def speeds(backend: Backend, device: torch.device) -> dict[str, float]:
    """By how many times kernels are faster than the reference, which is what layers do without.

    Args:
        backend: whose kernels.
        device: where.

    Returns:
        For each operator the time of plain torch over that of its kernels, both passes together, in
        float32 on a graph of 5,000 nodes and 50,000 edges with 4 heads of 16 channels; none for an
        operator that is plain torch.
    """
    plain: dict[str, float] = {}
    ours: dict[str, float] = {}
    for name, case in typical().items():
        kernel = backend.kernel(name, device.type, torch.float32)
        if kernel is None or kernel is getattr(reference, name):
            continue
        operator = name.removesuffix("_backward")
        for total, function in ((plain, getattr(reference, name)), (ours, kernel)):
            call = prepare(function, case, device, torch.float32, lambda x: x)
            total[operator] = total.get(operator, 0.0) + _seconds(call, device)
    return {operator: plain[operator] / ours[operator] for operator in ours}


def without_slower(findings: Sequence[Finding], found: dict[str, float]) -> list[Finding]:
    """Findings in which operators fail, in all dtypes, that are slower than plain torch."""
    return [
        attrs.evolve(finding, failure=f"{found[finding.operator]:.2f} times as fast as torch")
        if finding.failure is None and found.get(finding.operator, 1.0) < 1.0
        else finding
        for finding in findings
    ]


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of a call once it was warmed up; the least of several, as others may use the machine."""
    call()
    if device.type == "cuda":
        with torch.cuda.device(device):
            return seconds_on_gpu(call)
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
