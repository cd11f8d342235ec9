"""Runs a program and writes down its steps: ``python -m fastgraph.cli.programs.child ORDER``.

The order is a JSON object, see :class:`Order`. Nothing here imports torch before the program does.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass
from types import CodeType, FrameType, ModuleType
from typing import Any

from wrapt import register_post_import_hook

from fastgraph.cli import runner
from fastgraph.comparison.dropout import drops_attention
from fastgraph.comparison.memory import resident, restart_peak
from fastgraph.dgl import fix_import
from fastgraph.upstream import dropping_classes


@dataclass(frozen=True)
class Order:
    """The instructions for a child process.

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
    """Writes an event for each optimizer step, with the losses that led to it, and one at exit.

    A program that steps where no one sees it, in compiled code or by hand, is taken to step at each
    of its calls of ``backward``; those events are written at exit.

    What the program does must be what it does without an observer. So nothing here is traced by
    ``torch.compile``, calls operators that a mode or a subclass of the program's could see, or
    waits for a GPU while a graph is captured.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._owner = os.getpid()
        self._file = open(order.events, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        self._steps = 0
        # Since the last step: when backward was called on which loss.
        self._losses: list[tuple[float, float]] = []
        self._memory = PeakMemory()
        self._dropping: set[str] | None = None

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
        self._watch_steps(torch)

    def _shift_seeds(self, torch: Any) -> None:
        upstream = torch.manual_seed

        @functools.wraps(upstream)
        def manual_seed(seed: int) -> Any:
            return upstream(int(seed) + self._order.shift)

        torch.manual_seed = torch.random.manual_seed = manual_seed

    def _watch_backward(self, torch: Any) -> None:
        upstream = torch.Tensor.backward
        is_compiling = torch.compiler.is_compiling

        def backward(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_compiling():
                self._backward(torch, tensor)
            return upstream(tensor, *args, **kwargs)

        _hide_from_dynamo(torch, backward.__code__, Observer._backward.__code__)
        torch.Tensor.backward = functools.wraps(upstream)(backward)

    def _watch_steps(self, torch: Any) -> None:
        optimizer = importlib.import_module("torch.optim.optimizer")
        is_compiling = torch.compiler.is_compiling

        def stepped(optimizer: Any, *_: Any) -> None:
            if not is_compiling():
                self._step(optimizer)

        _hide_from_dynamo(torch, stepped.__code__, Observer._step.__code__)
        optimizer.register_optimizer_step_post_hook(stepped)

    def _backward(self, torch: Any, tensor: Any) -> None:
        self._look_at_layers()
        loss = plain_value(torch, tensor)
        if loss is not None:
            self._losses.append((time.perf_counter(), loss))

    def _step(self, optimizer: Any) -> None:
        if is_within_step(optimizer):
            return
        self._look_at_layers()
        cuda = gpus()
        if cuda is not None and not cuda.is_current_stream_capturing():
            cuda.synchronize()  # a step ends when its kernels do
        now = time.perf_counter()
        losses = [loss for _, loss in self._losses]
        self._steps += 1
        self._losses.clear()
        self._write(
            "step",
            time=now,
            loss=sum(losses) / len(losses) if losses else None,
            peak=self._memory.since_last(),
        )

    def _look_at_layers(self) -> None:
        # Once, when the program trains: all that it trains exists then, and is in training mode.
        if self._dropping is None:
            self._dropping = dropping_layers()

    def _end(self) -> None:
        if self._steps == 0:
            for moment, loss in self._losses:
                self._write("step", time=moment, loss=loss, peak=self._memory.ever())
        status = sys.modules.get("fastgraph.routing.status")
        rows = [] if status is None else [vars(row) for row in status.STATUS.rows]
        compiled = status is not None and status.has_compiled()
        self._write(
            "end",
            peak=self._memory.ever(),
            on_gpu=gpus() is not None,
            layers=rows,
            dropping=sorted(self._dropping or ()),
            compiled=compiled,
        )
        self._file.close()


def _hide_from_dynamo(torch: Any, outer: CodeType, inner: CodeType) -> None:
    """Have ``torch.compile`` compile neither function, nor what the inner one calls.

    They are called where compiled code has broken off.
    """
    dynamo = torch._C._dynamo.eval_frame
    skip, default = dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT
    dynamo.set_code_exec_strategy(outer, dynamo._FrameExecStrategy(skip, default))
    dynamo.set_code_exec_strategy(inner, dynamo._FrameExecStrategy(skip, skip))


def plain_value(torch: Any, tensor: Any) -> float | None:
    """The number in a tensor; ``None`` where it has several, or where reading it may do more."""
    if (
        type(tensor) not in (torch.Tensor, torch.nn.Parameter)  # others define what reading does
        or torch._C._functorch.peek_interpreter_stack() is not None
    ):
        return None
    modes = sys.modules["torch.utils._python_dispatch"]._disable_current_modes
    with torch._C.DisableTorchFunction(), modes():
        if (
            tensor.layout != torch.strided
            or tensor.is_nested
            or not tensor.is_floating_point()
            or tensor.numel() != 1
            or tensor.is_meta
            or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
        ):
            return None
        return float(tensor.item())


def is_within_step(optimizer: Any) -> bool:
    """True if an optimizer's ``step`` was called by its own ``step``, both of which have hooks."""
    calls = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if module == "torch.optim.optimizer" and frame.f_locals.get("self") is optimizer:
            calls += 1
        frame = frame.f_back
    return calls > 1


def dropping_layers() -> set[str]:
    """Names of the classes of all live attention layers with a route whose dropout is active."""
    routed = dropping_classes()
    return {
        type(layer).__name__
        for layer in gc.get_objects()
        if issubclass(type(layer), routed) and drops_attention(layer)
    }


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
    fix_import()  # of DGL, without which there would be nothing to compare with
    runner.run(order.target, order.options)


if __name__ == "__main__":
    # What is defined here must be found where its module's name says, which the program gets.
    importlib.import_module("fastgraph.cli.programs.child").main(sys.argv[1])
