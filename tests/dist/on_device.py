"""Scripts as if their authors had said the stand-in device, where on a GPU they would say that."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import fastgraph
from fastgraph.registry import registry
from fastgraph.routing.conditions import INDIFFERENT_MODES
from tests import late_collectives, standin

IsAuthor = Callable[[str], bool]
"""Tells by the name of a module whether what it makes is for the device."""

SAID = "the host has waited for: "
"""Begins a line about what rank 0 has waited for, of which a program has not asked."""

_FIRST = 2
"""Steps in which ranks compare all that they have alike, and make what later ones use."""

_BETWEEN = ("torch", "functools", "contextlib")
_HOOKS = "fastgraph.dist.tensor.hooks"


class MadeOnDevice(TorchFunctionMode):
    """Factories that some modules call without a device give tensors on the stand-in.

    Those that our modules call without one are errors: a program may set any default
    (``torch.set_default_device``), and what ranks plan by is the host's all the same.
    """

    def __init__(self, is_author: IsAuthor) -> None:
        super().__init__()
        self._is_author = is_author

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _device_constructors() and kwargs.get("device") is None:
            author = _author(sys._getframe(1))
            assert author.partition(".")[0] != "fastgraph", f"{author}: {func} without a device"
            if self._is_author(author):
                kwargs["device"] = standin.DEVICE
        return func(*args, **kwargs)


INDIFFERENT_MODES.append(MadeOnDevice)


def _is_not_ours(name: str) -> bool:
    return name.partition(".")[0] not in ("fastgraph", "tests")


def install(is_author: IsAuthor = _is_not_ours) -> None:
    """Have the rest of this script's tensors be on the device, and routed layers compute there.

    Args:
        is_author: of tensors that are made without a device.

    When it ends, it prints what the host has waited for in warm steps of its optimizers, though
    neither the script nor PyG has asked for it.
    """
    late_collectives.install()
    registry.DEVICE_TYPES = (*registry.DEVICE_TYPES, standin.DEVICE)  # type: ignore[assignment]
    fastgraph.disable()
    fastgraph.enable(backend="reference")
    from_numpy = torch.from_numpy

    def of_script(array: Any) -> torch.Tensor:
        found = from_numpy(array)
        is_own = _author(sys._getframe(1)) == "__main__"
        return found.to(standin.DEVICE) if is_own else found

    torch.from_numpy = of_script
    MadeOnDevice(is_author).__enter__()
    watch()


def _author(frame: FrameType) -> str:
    """The module that calls a function of torch, maybe through others of torch."""
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] not in _BETWEEN and name not in (_HOOKS, __name__):
            return str(name)
        frame = frame.f_back
    return ""


def watch() -> None:
    """Look after each step of an optimizer for collectives and waits that should not be."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    waits: list[str] = []
    standin.WAITS, steps = waits, 0

    def after_step(*_: object) -> None:
        nonlocal steps
        assert not late_collectives.GOING_ON, "nobody has waited for a collective"
        if steps >= _FIRST:
            for wait in waits:
                if not wait.endswith(standin.ELSEWHERE):
                    print(SAID + wait)
        steps += 1
        waits.clear()

    register_optimizer_step_post_hook(after_step)
