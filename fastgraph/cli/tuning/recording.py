"""The calls of fused operators that a script makes in a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgraph.watching import Seen, Watcher, watch

_MOST_TENSORS = 64
"""Of indices, after which a script has shown enough that never comes to a backward pass."""


class Values(NamedTuple):
    """A floating-point argument, whose values make no difference to the time of a call."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class Given(NamedTuple):
    """An argument that is one of the tensors of a :class:`Program`."""

    number: int


class OperatorCall(NamedTuple):
    """Calls that are alike.

    Attributes:
        operator: as torch names it, without its namespace.
        arguments: in the order of its schema: :class:`Values`, :class:`Given`, and all else as it
            is.
        device: ``cpu`` or ``cuda``, where its tensors are.
    """

    operator: str
    arguments: tuple[Any, ...]
    device: str = "cpu"


class Program(NamedTuple):
    """The operator calls of one step of a script.

    Attributes:
        calls: the names of the layers that make each of them, once for each time.
        tensors: of integers.
        threads: that torch uses in the script.
        allow_tf32: torch's setting for products of matrices on GPUs.
        elsewhere: calls on other devices than the CPU and GPUs.
    """

    calls: dict[OperatorCall, list[str]]
    tensors: list[Tensor]
    threads: int
    allow_tf32: bool
    elsewhere: int


class _Recorder(Watcher):
    """Keeps the calls of the last step that was seen."""

    def __init__(self) -> None:
        self._calls: dict[OperatorCall, list[str]] = {}
        self._tensors: list[Tensor] = []
        self._elsewhere = 0
        self._before = self._calls, self._tensors, self._elsewhere
        super().__init__()

    def forget(self) -> None:
        if self._calls:
            self._before = self._calls, self._tensors, self._elsewhere
        self._calls, self._tensors = {}, []
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._elsewhere = 0

    @property
    def is_watching(self) -> bool:
        return True

    def operator_called(self, operator: str, args: Sequence[Any], seconds: float) -> None:
        device = next(x.device.type for x in args if isinstance(x, Tensor))
        if device not in ("cpu", "cuda"):
            self._elsewhere += 1
            return
        if len(self._tensors) > _MOST_TENSORS:
            raise Seen
        call = OperatorCall(operator, tuple(self._argument(x) for x in args), device)
        layer = type(self.modules[-1]).__name__ if self.modules else operator
        self._calls.setdefault(call, []).append(layer)

    def _argument(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.is_floating_point():
            return Values(tuple(value.shape), value.dtype, value.requires_grad)
        # The tensors are kept, so that no two of them have one address.
        key = value.data_ptr(), value.dtype, value.shape, value.stride()
        if key not in self._numbers:
            self._numbers[key] = len(self._tensors)
            self._tensors.append(value)
        return Given(self._numbers[key])

    def step_seen(self, losses: Sequence[Tensor]) -> None:
        pass

    def program(self) -> Program:
        """The step before a backward pass, or all that a script did that has none."""
        seen = self._calls, self._tensors, self._elsewhere
        calls, tensors, elsewhere = seen if self._calls else self._before
        return Program(
            calls,
            [x.cpu().contiguous() for x in tensors],
            torch.get_num_threads(),
            torch.backends.cuda.matmul.allow_tf32,
            elsewhere,
        )


def record(script: Path, arguments: Sequence[str]) -> Program:
    """Run a script until a step of it was seen, or it ends."""
    recorder = _Recorder()
    watch(recorder, script, arguments)
    return recorder.program()
