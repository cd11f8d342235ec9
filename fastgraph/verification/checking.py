"""Kernels of a backend beside the reference in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fastgraph.backends import reference
from fastgraph.plugins.backend import FLOATING, Backend, Kernel, accumulator
from fastgraph.registry.operators import SIGNATURES
from fastgraph.verification.cases import Case, cases

_FACTOR = 2
"""By how much a kernel's error may exceed that of the reference in the same dtype."""

_ROUNDINGS = 256
"""How many roundings of the accumulating dtype, of the largest value of a result, are allowed
besides: sums in another order and another exponential have others, and the reference in float64 is
judged by itself. A term that is wrong or missing is further off, in float32 a hundred times; in
short dtypes that can be said of all calls together only."""

_WIDE = ("stats", "grad_logsum")
"""Arguments in the dtype in which sums are accumulated."""


@attrs.frozen
class Finding:
    """The outcome of the calls of one operator, both passes, in one dtype.

    Attributes:
        operator: its name.
        dtype: of its tensors.
        calls: how many were made.
        error: the largest of them: of the norm of the expected tensor, as a multiple of what is
            allowed. Up to 1 it passes.
        failure: what failed first, or ``None``.
    """

    operator: str
    dtype: torch.dtype
    calls: int
    error: float
    failure: str | None


def operators() -> list[str]:
    """The operators that are judged: a forward pass together with its backward pass."""
    return [name for name in SIGNATURES if not name.endswith("_backward")]


def check(
    backend: Backend, device: torch.device, dtypes: Sequence[torch.dtype] = FLOATING
) -> Iterator[Finding]:
    """Call every kernel that a backend has for a device, on small awkward graphs.

    Args:
        backend: whose kernels are called.
        device: where.
        dtypes: in which.

    Yields:
        A finding for each operator and dtype for which there are kernels. A ``RuntimeError`` that a
        kernel raises is a failure; after one that makes a GPU unusable to the process the operators
        behind it fail, too. What ends the process is for the caller to notice.

    Raises:
        torch.OutOfMemoryError: another program has the device's memory.
    """
    for dtype in dtypes:
        by_operator: dict[str, list[Case]] = {}
        for case in cases(dtype):
            by_operator.setdefault(case.operator.removesuffix("_backward"), []).append(case)
        for operator, of_operator in by_operator.items():
            if backend.kernel(operator, device.type, dtype) is not None:
                yield _judge(backend, device, dtype, operator, of_operator)


def _judge(
    backend: Backend,
    device: torch.device,
    dtype: torch.dtype,
    operator: str,
    of_operator: Iterable[Case],
) -> Finding:
    calls, largest = 0, 0.0
    failure: str | None
    for case in of_operator:
        kernel = backend.kernel(case.operator, device.type, dtype)
        if kernel is None:  # of a backward pass, which another backend then computes
            continue
        calls += 1
        try:
            found = _call(kernel, case, device, dtype)
        except torch.OutOfMemoryError:  # says nothing about the kernel
            raise
        except RuntimeError as raised:  # what torch raises of a device; others are for the caller
            error, failure = torch.inf, f"{type(raised).__name__}: {raised}"
        else:
            error, failure = _compare(case, found, dtype)
        largest = max(largest, error)
        if failure is not None:
            where = f"{case.operator} ({case.description})"
            return Finding(operator, dtype, calls, largest, f"{where}: {failure}")
    return Finding(operator, dtype, calls, largest, None)


def _call(kernel: Kernel, case: Case, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """The tensors that a kernel returns, on the CPU."""
    returned = prepare(kernel, case, device, dtype, _misaligned)()
    tensors = returned if isinstance(returned, (tuple, list)) else (returned,)
    return [tensor.cpu() for tensor in tensors if tensor is not None]


def prepare(
    kernel: Kernel,
    case: Case,
    device: torch.device,
    dtype: torch.dtype,
    place: Callable[[Tensor], Tensor],
) -> Callable[[], Any]:
    """A call of a kernel, with its arguments in a dtype on a device.

    Args:
        kernel: what to call.
        case: with what.
        device: where.
        dtype: in what.
        place: what becomes of a tensor that a user gives.
    """
    names = SIGNATURES[case.operator].positional

    def convert(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [convert(name, one) for one in value]
        if not isinstance(value, Tensor):
            return value
        if value.is_floating_point():
            value = value.to(accumulator(dtype) if name in _WIDE else dtype)
        value = value.to(device)
        # What one pass leaves to the other lies where it was allocated.
        return value if name in ("stats", "record") else place(value)

    if case.graph is not None:
        names = names[1:]
    arguments = [convert(name, v) for name, v in zip(names, case.arguments, strict=True)]
    keywords = {name: convert(name, value) for name, value in case.keywords.items()}
    graph = [] if case.graph is None else [case.graph.on(device)]
    return functools.partial(kernel, *graph, *arguments, **keywords)


def _misaligned(value: Tensor) -> Tensor:
    """A contiguous copy that begins one element behind an aligned address."""
    buffer = value.new_empty(value.numel() + 1)
    return buffer[1:].view(value.shape).copy_(value)


def _compare(case: Case, found: Sequence[Tensor], dtype: torch.dtype) -> tuple[float, str | None]:
    """The largest error as a multiple of what is allowed, and what is wrong."""
    cpu = torch.device("cpu")
    kernel: Kernel = getattr(reference, case.operator)
    expected = _call(kernel, case, cpu, torch.float64)
    plain = expected if dtype == torch.float64 else _call(kernel, case, cpu, dtype)
    if len(found) != len(expected):
        return torch.inf, f"{len(found)} results instead of {len(expected)}"
    largest = 0.0
    for number, (value, exact, same_dtype) in enumerate(zip(found, expected, plain, strict=True)):
        wrong = f"result {number} "
        if value.shape != same_dtype.shape or value.dtype != same_dtype.dtype:
            return torch.inf, (
                f"{wrong}is {list(value.shape)} of {value.dtype}, "
                f"not {list(same_dtype.shape)} of {same_dtype.dtype}"
            )
        if not value.is_floating_point():
            if not torch.equal(_plain_record(case, value, dtype), same_dtype):
                return torch.inf, f"{wrong}differs"
            continue
        scale = float(exact.abs().max()) if exact.numel() else 0.0
        allowed = _FACTOR * _error(same_dtype, exact) + scale * _roundings(value.dtype)
        error = _error(value, exact)
        # Written so that NaN fails.
        ratio = 0.0 if error == 0 else error / allowed if allowed > 0 else torch.inf
        if not ratio <= 1:
            return torch.inf if ratio != ratio else ratio, (
                f"{wrong}is off by {error:.1e}, {allowed:.1e} is allowed"
            )
        largest = max(largest, ratio)
    return largest, None


def _plain_record(case: Case, record: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of ties in a record, 1 in place of the right edge."""
    *arguments, ties = case.arguments
    if ties != "split":
        return record
    alone = case._replace(arguments=(*arguments, "winner"))
    _, winner = _call(reference.segment_reduce, alone, torch.device("cpu"), dtype)
    return torch.where((record < 0) & (~record == winner), 1, record)


def _roundings(dtype: torch.dtype) -> float:
    """Of the accumulating dtype, and one of the result, relative to its largest value."""
    return _ROUNDINGS * torch.finfo(accumulator(dtype)).eps + torch.finfo(dtype).eps / 2


def _error(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact.double()).abs().max()) if value.numel() else 0.0
