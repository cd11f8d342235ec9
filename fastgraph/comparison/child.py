"""Runs a program and writes down its steps: ``python -m fastgraph.comparison.child ORDER``.

The order is a JSON object, see :class:`Order`. Nothing here imports torch before the program does.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

from wrapt import register_post_import_hook

from fastgraph.cli import runner
from fastgraph.comparison.dropout import drops_attention
from fastgraph.comparison.memory import resident, restart_peak


@dataclass(frozen=True)
class Order:
    """What a child is to do.

    Attributes:
        events: file to append one JSON object a line to.
        seed: for torch, numpy and random, before the program starts.
        shift: added to the seed that the program itself gives to ``torch.manual_seed``.
        target: the program.
        options: how to enable fastgraph; without effect under ``FASTGRAPH=0``.
    """

    events: str
    seed: int
    shift: int
    target: runner.Target
    options: runner.Options

    def to_json(self) -> str:
        """The argument of the child."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Order:
        """Read what :meth:`to_json` wrote."""
        fields = json.loads(text)
        target = runner.Target(**fields.pop("target"))
        return cls(target=target, options=runner.Options(**fields.pop("options")), **fields)


class Observer:
    """Writes an event for each optimizer step, with the losses that led to it, and one at exit."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._owner = os.getpid()
        self._file = open(order.events, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        self._losses: list[float] = []
        self._memory = PeakMemory()
        self._dropping: set[str] = set()
        self._remove_layer_hook: Callable[[], None] | None = None

    def install(self) -> None:
        """Watch the program from the moment it imports torch."""
        random.seed(self._order.seed)
        register_post_import_hook(self._seed_numpy, "numpy")
        register_post_import_hook(self._watch_torch, "torch")
        atexit.register(self._end)

    def _write(self, kind: str, **fields: Any) -> None:
        # A child made by os.fork(), as a data loader's worker, has copies of everything here.
        if os.getpid() == self._owner and not self._file.closed:
            self._file.write(json.dumps({"kind": kind, **fields}) + "\n")

    def _seed_numpy(self, numpy: ModuleType) -> None:
        numpy.random.seed(self._order.seed)

    def _watch_torch(self, torch: Any) -> None:
        torch.manual_seed(self._order.seed)
        if self._order.shift:
            self._shift_seeds(torch)
        self._watch_backward(torch)
        optimizer = importlib.import_module("torch.optim.optimizer")
        optimizer.register_optimizer_step_post_hook(self._step)
        # Layers are looked at until the first step; later calls cost nothing.
        handle = torch.nn.modules.module.register_module_forward_pre_hook(self._look_at_layer)
        self._remove_layer_hook = handle.remove

    def _shift_seeds(self, torch: Any) -> None:
        upstream = torch.manual_seed

        @functools.wraps(upstream)
        def manual_seed(seed: int) -> Any:
            return upstream(int(seed) + self._order.shift)

        torch.manual_seed = torch.random.manual_seed = manual_seed

    def _watch_backward(self, torch: Any) -> None:
        upstream = torch.Tensor.backward

        @functools.wraps(upstream)
        def backward(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if tensor.numel() == 1:
                self._losses.append(float(tensor.detach()))
            return upstream(tensor, *args, **kwargs)

        torch.Tensor.backward = backward

    def _look_at_layer(self, layer: Any, _: Any) -> None:
        if drops_attention(layer):
            self._dropping.add(type(layer).__name__)

    def _step(self, *_: Any) -> None:
        cuda = gpus()
        if cuda is not None:
            cuda.synchronize()  # a step ends when its kernels do
        now = time.perf_counter()
        if self._remove_layer_hook is not None:
            self._remove_layer_hook()
            self._remove_layer_hook = None
        loss = sum(self._losses) / len(self._losses) if self._losses else None
        self._write("step", time=now, loss=loss, peak=self._memory.since_last())
        self._losses.clear()

    def _end(self) -> None:
        status = sys.modules.get("fastgraph.routing.status")
        rows = [] if status is None else [vars(row) for row in status.STATUS.rows]
        compiled = status is not None and status.has_compiled()
        self._write(
            "end",
            peak=self._memory.ever(),
            on_gpu=gpus() is not None,
            layers=rows,
            dropping=sorted(self._dropping),
            compiled=compiled,
        )
        self._file.close()


def gpus() -> Any:
    """The ``torch.cuda`` that the program uses, or ``None`` while it uses no GPU."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


class PeakMemory:
    """Most bytes in memory: on all GPUs together once the program uses one, resident before.

    What is resident is counted by the operating system; 0 where it does not.
    """

    def __init__(self) -> None:
        self._ever = 0
        self._on_gpus = False

    def since_last(self) -> int:
        """Since the last such question, or since the start where the count cannot be restarted."""
        self.ever()
        cuda = gpus()
        if cuda is None:
            found = resident("VmHWM") or 0
            return found if restart_peak() else self._ever
        found = _allocated(cuda)
        for device in range(cuda.device_count()):
            cuda.reset_peak_memory_stats(device)
        return found

    def ever(self) -> int:
        """Since the start."""
        cuda = gpus()
        if cuda is not None and not self._on_gpus:
            self._on_gpus, self._ever = True, 0
        found = (resident("VmHWM") or 0) if cuda is None else _allocated(cuda)
        self._ever = max(self._ever, found)
        return self._ever


def _allocated(cuda: Any) -> int:
    return sum(cuda.max_memory_allocated(device) for device in range(cuda.device_count()))


def main(text: str) -> None:
    """Run the program in place of this one."""
    order = Order.from_json(text)
    Observer(order).install()
    runner.run(order.target, order.options)


if __name__ == "__main__":
    main(sys.argv[1])
