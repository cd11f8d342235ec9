"""Tracing messages that are functions of users, and what came of it for each state of a layer."""

from __future__ import annotations

import copy
import importlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from fastgraph.edge_programs.reading import Guard, Reading, hooked_module, is_reading
from fastgraph.edge_programs.traced import Traced
from fastgraph.layers.prepared import Prepared, state_of
from fastgraph.machine.forks import lock_across_forks
from fastgraph.machine.randomness import kept_random_states
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.conditions import plain_tensor

_saving_hooks = torch._C._autograd._top_saved_tensors_default_hooks

MOST_TRACES = 16
"""Of one layer. A layer that is another one at every call gains nothing from them."""

_MOST_KNOWN, MOST_STATES = 256, 32
"""Descriptions of arguments whose outcomes are kept, and states of layers for each of them."""


class State(Protocol):
    """The state in which an outcome holds."""

    def holds(self, now: Any) -> bool:
        """True if the state is the same now."""
        ...


@dataclass(frozen=True)
class Known:
    """The outcome of tracing, and the state in which it holds."""

    state: State
    outcome: Prepared | Refusal


class Outcomes:
    """Outcomes of tracing messages, by keys that describe what was traced."""

    def __init__(self) -> None:
        self._known: OrderedDict[object, list[Known]] = OrderedDict()
        self._traces: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._lock = lock_across_forks()

    def get(self, key: object, now: Any) -> Known | None:
        """The outcome under a key that holds now, if there is one."""
        for known in self._known.get(key, ()):
            if known.state.holds(now):
                return known
        return None

    def made(self, key: object, owner: Any, make: Callable[[], Known]) -> Prepared | Refusal:
        """The outcome of a call that traces, which is kept.

        Args:
            key: what describes the message and its arguments, to :meth:`get` it again.
            owner: of the message, a layer or code.
            make: traces it.
        """
        if is_reading():
            return Refusal("it is part of a message that is traced")
        if isinstance(owner, nn.Module):
            if any(isinstance(child, torch.jit.ScriptModule) for child in owner.modules()):
                return Refusal("its layer has scripted modules")
            if (path := hooked_module(owner)) is not None:
                return Refusal(f"its message is no edge program: {path} has hooks")
        with self._lock:
            count = self._traces.get(owner, 0)
            if count >= MOST_TRACES:
                return Refusal("its message or its layer is another one at every call")
            self._traces[owner] = count + 1
            found = _beside_others(make)
            states = self._known.setdefault(key, [])
            states.insert(0, found)
            del states[MOST_STATES:]
            self._known.move_to_end(key)
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        return found.outcome

    def count(self, owner: Any) -> int:
        """How often messages of an owner were traced."""
        return self._traces.get(owner, 0)

    def states(self) -> list[list[Known]]:
        """All that is kept, the states of each key together."""
        return list(self._known.values())

    def clear(self) -> None:
        """Forget all outcomes."""
        self._known.clear()


def _beside_others(make: Callable[[], Known]) -> Known:
    """The result of a function, in another thread if others look at what this one does.

    A profiler has the place that tracing needs. Hooks of saved tensors, as of a checkpoint, would
    count and keep those of tracing, and their code would be read as the message's. Of several ranks
    one alone may have some, and all must trace what one of them traces.
    """
    if sys.getprofile() is None and _saving_hooks(True) is None:
        return make()
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(make).result()


def hook_refusal() -> Refusal | None:
    """Why no message is traced where others look at each call of a module."""
    if _has_any_global_hook():
        return Refusal("a hook of all modules is set")
    return None


def state_refusal_of(layer: nn.Module | None, device: torch.device) -> Refusal | None:
    """Why parameters and buffers of a layer cannot be those of a program."""
    for name, tensor in state_of(layer).items():
        refusal = plain_tensor(name, tensor)
        if refusal is None and not (tensor.device == device and tensor.layout is torch.strided):
            refusal = Refusal(f"{name} is not a dense tensor on the device of the features")
        if refusal is not None:
            return refusal
    return None


def read_message(
    read: Callable[[], tuple[Sequence[Reading], Traced | Refusal]], layer: nn.Module | None
) -> tuple[list[Guard], Traced | Refusal]:
    """The program of a message, unless its code reads what may change unnoticed, and its guards.

    Args:
        read: traces the message, whose functions are read meanwhile.
        layer: that it belongs to, if it does.
    """
    # The first mode of torch imports its compiler, whose code is none of the message.
    importlib.import_module("torch._dynamo")
    with kept_random_states():  # what a message draws; it is refused afterwards
        readings, traced = read()
        guards = [reading.guard(layer) for reading in readings]
        if _reason(readings) is not None:
            # Code that torch ran for the first time may have named what the message does not read.
            readings, traced = read()
            guards = [reading.guard(layer) for reading in readings]
    reason = _reason(readings)
    if reason is not None:
        return guards, Refusal(f"its message is no edge program: {reason}")
    if isinstance(traced, Traced):
        # Others are set to what is no value of edges, or only under a condition.
        left = {name for reading in readings for name in reading.left}
        others = left - set(map(str, traced.kept))
        if others:
            reason = f"it sets the attribute {min(others)}"
            return guards, Refusal(f"its message is no edge program: {reason}")
    return guards, traced


def _reason(readings: Sequence[Reading]) -> str | None:
    return next((r.reason for r in readings if r.reason is not None), None)


def stand_in(module: nn.Module) -> Any:
    """A copy of a layer and its modules, with the same tensors and the same attributes.

    Tracing puts other tensors in its place, which no other thread is to see.
    """
    made = object.__new__(type(module))
    made.__dict__.update(module.__dict__)
    for store in ("_parameters", "_buffers", "_modules"):
        made.__dict__[store] = copy.copy(module.__dict__[store])
    for name, child in module._modules.items():
        if child is not None:
            made.__dict__["_modules"][name] = stand_in(child)
    return made
