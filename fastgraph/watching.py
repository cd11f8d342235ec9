"""Watching what the first steps of a script call, on one process.

The script runs as it is until its third backward pass. What it does before the second one is
forgotten: graphs are sorted and kernels chosen then.
"""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fastgraph import enabling
from fastgraph.interpreter import FIRST_ENTRY
from fastgraph.routing.conditions import INDIFFERENT_MODES

STEPS = 2
"""After which a step is as all others will be."""


class Seen(BaseException):
    """Ends the script, whose handlers of exceptions are not asked."""


class Watcher(TorchFunctionMode):
    """Is told of the calls of modules and fused operators, and of backward passes.

    Attributes:
        backward_passes: that have begun.
        modules: whose calls are running, the outermost first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.backward_passes = 0
        self.modules: list[nn.Module] = []
        self.forget()

    def forget(self) -> None:
        """A step has ended that is not like the others."""
        raise NotImplementedError

    def operator_called(self, operator: str, args: Sequence[Any], seconds: float) -> None:
        """A fused operator was called, and took so long."""
        raise NotImplementedError

    def step_seen(self, losses: Sequence[Tensor]) -> None:
        """A step has come to the backward pass of these losses."""
        raise NotImplementedError

    @property
    def is_watching(self) -> bool:
        """True if calls of operators are looked at now."""
        return bool(self.modules)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "namespace", None) != "fastgraph" or not self.is_watching:
            return func(*args, **(kwargs or {}))
        started = time.perf_counter()
        found = func(*args, **(kwargs or {}))
        seconds = time.perf_counter() - started
        self.operator_called(func.name().partition("::")[2], args, seconds)
        return found

    def module_called(
        self, call: Callable[..., Any], module: nn.Module, *args: Any, **options: Any
    ) -> Any:
        """A call of a module; those within others are part of it."""
        self.modules.append(module)
        try:
            return call(module, *args, **options)
        finally:
            self.modules.pop()

    def before_backward(self, tensors: Any) -> None:
        """A backward pass begins, the last one of which ends the script."""
        self.backward_passes += 1
        if self.backward_passes <= STEPS:
            self.forget()
            return
        self.step_seen([tensors] if isinstance(tensors, Tensor) else list(tensors))
        raise Seen


INDIFFERENT_MODES.append(Watcher)  # it is told of operators, which others would not call


def watch(watcher: Watcher, script: Path, arguments: Sequence[str]) -> None:
    """Run a script with fastgraph enabled, until a step of it was seen or it ends."""
    backward, call = torch.autograd.backward, nn.Module.__call__

    def watched(tensors: Any, *args: Any, **options: Any) -> None:
        watcher.before_backward(tensors)
        backward(tensors, *args, **options)

    def called(module: nn.Module, *args: Any, **options: Any) -> Any:
        return watcher.module_called(call, module, *args, **options)

    torch.autograd.backward = watched
    nn.Module.__call__ = called  # type: ignore[method-assign]
    sys.argv = [str(script), *arguments]
    FIRST_ENTRY.replace(str(script.resolve().parent))
    enabling.enable()
    try:
        with watcher:
            runpy.run_path(str(script), run_name="__main__")
    except Seen:
        pass
    finally:
        torch.autograd.backward = backward
        nn.Module.__call__ = call  # type: ignore[method-assign]
