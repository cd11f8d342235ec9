"""A module that runs once and is as if it had not: what it holds is put back afterwards."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def borrowed(module: nn.Module) -> Iterator[nn.Module]:
    """Lend a module for a call, after which it holds what it held before.

    Its modules keep their identity, so nothing in them need be copied but tensors: parameters are
    replaced by others over the same memory, which have no gradients, and other tensors by copies.
    Put back are attributes of modules, with the lists, tuples, dictionaries and sets in them.
    Objects of other kinds are the caller's own, and keep what the call changes in them.

    Args:
        module: any module.

    Yields:
        The module to be called: the same, unless it is scripted, when it is a copy.
    """
    state = _State()
    try:
        yield state.lend(module)
    finally:
        state.restore()


class _State:
    """Stand-ins of tensors, and how containers and modules become what they were."""

    def __init__(self) -> None:
        self._tensors: dict[int, Any] = {}  # the memo of ``copy.deepcopy``
        self._met: dict[int, Any] = {}
        self._undo: list[Callable[[], object]] = []
        self._alive: list[Any] = []  # so that no other object gets the number of one of these

    def lend(self, value: Any) -> Any:
        """The stand-in of a value: itself, with other tensors in it, or a copy."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if not isinstance(value, (nn.Module, dict, list, tuple, set, deque)):
            return value
        known = self._met.get(id(value))
        if known is None:
            self._alive.append(value)
            self._met[id(value)] = value  # which may hold itself
            known = self._met[id(value)] = self._lend(value)
        return known

    def restore(self) -> None:
        """Put everything back, the latest change first."""
        while self._undo:
            self._undo.pop()()

    def _lend(self, value: Any) -> Any:
        if isinstance(value, torch.jit.ScriptModule):
            return copy.deepcopy(value, self._tensors)
        if isinstance(value, nn.Module):
            cls = type(value)  # a lazy module becomes another by its first call
            self._undo.append(lambda: object.__setattr__(value, "__class__", cls))
            self.lend(vars(value))
        elif isinstance(value, dict):
            content = dict(value)
            self._undo.append(lambda: _refill(value, value.update, content))
            for key, part in content.items():
                lent = self.lend(part)
                if lent is not part:
                    value[key] = lent
        elif isinstance(value, tuple):
            parts = [self.lend(part) for part in value]
            if any(part is not own for part, own in zip(parts, value, strict=True)):
                return value._make(parts) if hasattr(value, "_make") else type(value)(parts)
        elif isinstance(value, set):
            members = set(value)
            self._undo.append(lambda: _refill(value, value.update, members))
        else:
            items = list(value)
            self._undo.append(lambda: _refill(value, value.extend, items))
            for position, part in enumerate(items):
                value[position] = self.lend(part)
        return value

    def _tensor(self, value: Tensor) -> Tensor:
        if type(value) is nn.Parameter:
            if id(value) not in self._tensors:
                self._alive.append(value)
                self._tensors[id(value)] = nn.Parameter(value.detach(), value.requires_grad)
            found: Tensor = self._tensors[id(value)]
            return found
        if value.is_leaf:
            return copy.deepcopy(value, self._tensors)
        # What autograd has made, of a call before, torch refuses to copy.
        if id(value) not in self._tensors:
            self._alive.append(value)
            self._tensors[id(value)] = copy.deepcopy(value.detach().requires_grad_())
        result: Tensor = self._tensors[id(value)]
        return result


def _refill(container: Any, fill: Callable[[Any], object], content: Any) -> None:
    container.clear()
    fill(content)
