"""Comparing every call of a routed layer while a program runs: ``FASTGRAPH=compare``."""

from __future__ import annotations

import copy
import functools
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fastgraph.comparison.errors import TensorError
from fastgraph.comparison.modules import compare_accuracy, inconclusive
from fastgraph.comparison.runs import is_comparing, untouched_randomness
from fastgraph.ending import print_at_exit
from fastgraph.machine.forks import lock_across_forks
from fastgraph.plugins.framework import is_message_passing
from fastgraph.routing.conditions import execution_mode
from fastgraph.routing.status import STATUS, caller_level, has_compiled

NOT_COMPARED = "calls within torch.compile are not compared"


class DivergenceError(RuntimeError):
    """A layer's output or gradient is farther from float64 than upstream's allows.

    Attributes:
        layer: name of the layer within the module that was called; empty for that module itself.
        error: the first tensor that differs.
    """

    def __init__(self, layer: str, kind: str, error: TensorError) -> None:
        self.layer = layer
        self.error = error
        super().__init__(
            f"{_named(kind, layer)}: {_described(error)} differs from upstream in float64 by "
            f"{error.ours:.2e} of its largest magnitude at {list(error.worst)}; upstream's own "
            f"error is {error.upstream:.2e} and {error.limit:.2e} is allowed"
        )


def _named(kind: str, layer: str) -> str:
    return f"{kind} {layer!r}" if layer else kind


def _described(error: TensorError) -> str:
    return error.name if error.kind == "output" else f"the {error.kind} {error.name}"


class Tally:
    """Counts of all comparisons, in all threads: printed at exit, as nothing else reports them."""

    def __init__(self) -> None:
        self._lock = lock_across_forks()
        self._calls = 0
        self._worst: tuple[str, TensorError] | None = None

    def add(self, layer: str, tensors: Sequence[TensorError]) -> None:
        """Count a call of a layer."""
        worst = max(tensors, key=lambda tensor: tensor.share)
        with self._lock:
            self._calls += 1
            if self._worst is None or worst.share > self._worst[1].share:
                self._worst = layer, worst

    def __str__(self) -> str:
        text = "fastgraph compared no calls: no routed layer ran"
        if self._worst is not None:
            layer, error = self._worst
            calls = "1 call" if self._calls == 1 else f"{self._calls} calls"
            text = (
                f"fastgraph compared {calls} of routed layers with upstream: the "
                f"largest error is {error.share:.2g} of what is allowed, in {_described(error)} of "
                f"{layer}"
            )
        return f"{text}; {NOT_COMPARED}" if has_compiled() else text


_TALLY = Tally()


class _Calls(threading.local):
    """The calls of modules that are under way in a thread."""

    def __init__(self) -> None:
        self.stack: list[nn.Module] = []


class Watch:
    """Runs each call of an outermost message-passing layer again, both ways and in float64.

    Only calls that were routed are compared. The layer is copied before the call, so that what it
    keeps from one call to the next is compared as well.
    """

    def __init__(self) -> None:
        self._calls = _Calls()
        self._upstream: Callable[..., Any] | None = None
        self._is_announced = False

    def start(self) -> None:
        """Watch all modules from now on, and say at exit what was compared. Idempotent."""
        if self._upstream is not None:
            return
        if not self._is_announced:
            self._is_announced = True
            print_at_exit(lambda: f"{_TALLY}\n")
        # torch's global hooks see no keyword arguments before a call, and none at all after one
        # that failed.
        upstream = self._upstream = nn.Module.__call__

        @functools.wraps(upstream)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or is_comparing():
                return upstream(module, *args, **kwargs)
            return self._call(upstream, module, args, kwargs)

        nn.Module.__call__ = call  # type: ignore[method-assign]

    def stop(self) -> None:
        """Watch nothing any more, and put torch's own function back. Idempotent."""
        if self._upstream is not None:
            nn.Module.__call__ = self._upstream  # type: ignore[method-assign]
            self._upstream = None

    def _call(
        self,
        upstream: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        calls = self._calls
        is_layer = is_message_passing(module) and execution_mode() is None
        copied = None
        if is_layer and not any(is_message_passing(outer) for outer in calls.stack):
            with untouched_randomness(0, ()):
                copied = copy.deepcopy(module)
        routed = _routed()
        calls.stack.append(module)
        try:
            output = upstream(module, *args, **kwargs)
        finally:
            calls.stack.pop()
        if copied is not None and _routed() > routed:
            _check(module, copied, args, kwargs, calls.stack[0] if calls.stack else module)
        return output


def _routed() -> int:
    return sum(row.routed for row in STATUS.rows)


def _check(
    module: nn.Module,
    copied: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    root: nn.Module,
) -> None:
    accuracy = compare_accuracy(copied, args, kwargs)
    name = next((name for name, found in root.named_modules() if found is module), "")
    reason = inconclusive(accuracy)
    if reason is not None:
        warnings.warn(
            f"fastgraph cannot compare {type(module).__name__}: {reason}", stacklevel=caller_level()
        )
        return
    _TALLY.add(_named(type(module).__name__, name), accuracy.tensors)
    for error in accuracy.tensors:
        if not error.ok:
            raise DivergenceError(name, type(module).__name__, error)


WATCH = Watch()
