"""Comparisons of replicated tensors and random states, which must be the same on all ranks.

A program that draws from a generator without a seed, or from the order of a set, is another one on
each rank, and its results are those of none. So in the first steps of a training ranks compare 62
bits of whatever meets sharded tensors, and of what optimizers have changed.

Each comparison waits for the other ranks, so they end where training has gone through two steps. A
rank may take steps that others do not, of a model of its own. So each rank counts its steps, and
sends what is left with each comparison: as long as one has steps left, all compare. What a script
decides later, as by the time, shows at steps whose number is a power of two, and at its end.

What a device has is read in the first two steps only. In later ones the device computes 64 bits
itself, and the host looks at them a step later (:mod:`fastgraph.dist.tensor.deferred`).
"""

from __future__ import annotations

import functools
import pickle
import random
import sys
import weakref
import zlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.board import ADVICE, BOARD
from fastgraph.dist.ranks.own_device import HOST, random_state
from fastgraph.dist.ranks.world import (
    BEGINNING,
    WORLD,
    RanksDivergedError,
    frame_of_program,
    line_of_program,
)
from fastgraph.dist.tensor.contents import flat, kind_of
from fastgraph.dist.tensor.deferred import Deferred
from fastgraph.dist.tensor.memo import on_host
from fastgraph.machine import native

_STEPS = 2
_COMPARISONS = 1000

_ADVICE = (
    "draw it from torch, random or numpy.random, which all ranks share, or from a generator with a "
    "seed, and not from the order of a set or the time"
)


class Digests:
    """The comparisons that are left.

    Attributes:
        steps: of optimizers, of the rank that has most of them left; the same on all ranks, and 0
            where nothing is compared any more.
        comparisons: of tensors, for programs that take no step; the same on all ranks.
    """

    def __init__(self) -> None:
        self.steps = self.comparisons = 0
        self._steps_here = self._taken = 0
        self._has_compared = False  # since the last step
        self._is_watching = self._is_of_script = False
        self._all_have_steps = True
        self._last: weakref.ref[torch.optim.Optimizer] | None = None
        self._deferred = Deferred()
        self._is_later = False  # than the first steps, of a script: on all ranks, or on none

    def begin(self) -> None:
        """Compare from now on, on all ranks; a single one has nothing to compare with."""
        self.steps = self._steps_here = _STEPS if WORLD.size > 1 else 0
        self.comparisons, self._has_compared, self._taken = _COMPARISONS, False, 0
        self._deferred, self._is_later = Deferred(), False
        if not self._is_watching:
            register_optimizer_step_post_hook(self._after_step)
            self._is_watching = True

    def watch_script(self) -> None:
        """Compare random states and what optimizers have changed, too.

        For a script that knows nothing of ranks. One that does may well print by a library that
        draws, or take steps, on a single rank.
        """
        self._is_of_script = True

    def end(self) -> None:
        """Compare no more, on all ranks."""
        self.steps = self.comparisons = 0
        self._deferred = Deferred()

    def end_of_script(self) -> None:
        """Compare what was asked for, and the parameters of the optimizer that stepped last.

        Raises:
            RanksDivergedError: on all ranks, if one has done something else.
        """
        if WORLD.size == 1:
            return
        optimizer = None if self._last is None else self._last()
        parameters = -1
        if optimizer is not None:
            with torch._C.DisableTorchFunctionSubclass():
                parameters = _total(_parameters(optimizer))
        facts = BOARD.meet(parameters)
        if len({(number, digest) for number, digest, _ in facts}) > 1:
            numbers = [number for number, *_ in facts]
            raise RanksDivergedError(
                f"ranks have asked for different collectives, {numbers} of them: {ADVICE}"
            )
        self._read_deferred()
        of_parameters = {parameters for *_, parameters in facts}
        if len(of_parameters) > 1 and -1 not in of_parameters and self.comparisons > 0:
            assert optimizer is not None  # as on all ranks
            self._compare_parameters(optimizer, at_once=True)

    @property
    def is_on(self) -> bool:
        """True while ranks compare; all of them stop together."""
        return self.steps > 0 and not (WORLD.is_alone or WORLD.is_forked)

    def compare(self, x: object, name: str = "") -> None:
        """Compare a replicated tensor or some integers; all ranks together.

        Args:
            x: what meets a sharded tensor.
            name: in the program, if it is known.

        Raises:
            RanksDivergedError: on all ranks, if one has another one.
        """
        if not self.is_on or not isinstance(x, (Tensor, int)):
            return
        self.comparisons -= 1
        self._has_compared = True
        if self._is_of_script:
            self._compare_random_states()  # and learn whether any rank has a step left
            if not self.steps:
                return
        with torch._C.DisableTorchFunctionSubclass():
            tensor = x.detach() if isinstance(x, Tensor) else torch.tensor(x, device=HOST)
            self._compare(tensor, lambda: name or _name_of(x), at_once=not self._is_later)
        if self.comparisons <= 0:
            self.end()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if WORLD.is_alone or WORLD.is_forked:
            return
        self._last = weakref.ref(optimizer)
        self._read_deferred()
        self._taken += 1
        if self.is_on:
            if self._has_compared or self._is_of_script:  # else a step of what met no rows
                self._steps_here -= 1
                self._has_compared = False
            if self._is_of_script:
                self._compare_parameters(optimizer, at_once=not self._is_later)
                self._deferred.send()
        # Each rank of a script takes the same steps, or its end tells.
        if self._is_of_script and self.comparisons > 0 and _is_later_one(self._taken + 1):
            self.steps = self._steps_here = 1
            self._is_later = True

    def _compare_parameters(self, optimizer: torch.optim.Optimizer, *, at_once: bool) -> None:
        self._compare_random_states()
        tensors = _parameters(optimizer)
        kind = type(optimizer).__name__
        with torch._C.DisableTorchFunctionSubclass():
            now = [at_once or x.device == HOST for x in tensors]
            total = _total([x for x, is_due in zip(tensors, now, strict=True) if is_due])
            same_number, same_values = self._are_same([len(tensors), total])
            if not same_number:
                raise RanksDivergedError(f"{kind} has other numbers of parameters on some ranks")
            for position, (x, is_due) in enumerate(zip(tensors, now, strict=True)):
                name = functools.partial("parameter {} of {}".format, position, kind)
                if not is_due:
                    self._deferred.add(x, name(), line_of_program())
                elif not same_values:
                    (is_same,) = self._are_same([_digest(x)])
                    _conclude(x, is_same, name, line_of_program)

    def _compare(self, x: Tensor, name: Callable[[], str], *, at_once: bool) -> None:
        if not at_once and x.device != HOST:
            self._deferred.add(x, name(), line_of_program())
            return
        # A rank that has no step left reads nothing before it knows that another has one.
        digest = _digest(x) if self._steps_here else 0
        (is_same,) = self._are_same([digest])
        if self.steps and not self._all_have_steps:
            (is_same,) = self._are_same([digest or _digest(x)])
        if self.steps:
            _conclude(x, is_same, name, line_of_program)

    def _read_deferred(self) -> None:
        """Compare what a device has computed a step ago, unless there is nothing."""
        found = self._deferred.read()
        same = self._are_same([digest for digest, _ in found]) if found else []
        for is_same, (_, one) in zip(same, found, strict=True):
            _conclude(
                one.x, is_same, functools.partial(str, one.name), functools.partial(str, one.line)
            )

    def _compare_random_states(self) -> None:
        numpy, of_device = sys.modules.get("numpy"), random_state(WORLD.device)
        states = {
            "torch": torch.get_rng_state().numpy().tobytes(),
            str(WORLD.device): b"" if of_device is None else of_device.numpy().tobytes(),
            "random": pickle.dumps(random.getstate()),
            "numpy.random": b"" if numpy is None else pickle.dumps(numpy.random.get_state()),
        }
        same = self._are_same([zlib.crc32(state) for state in states.values()])
        for name, is_same in zip(states, same, strict=True):
            if not is_same:
                raise RanksDivergedError(
                    f"the random state of {name} is not the same on all ranks, at "
                    f"{line_of_program()}: they have drawn different numbers of times from it"
                )

    def _are_same(self, digests: list[int]) -> list[bool]:
        """For each of some numbers, whether it is the same on all ranks; they learn of steps."""
        row = torch.tensor([*digests, self._steps_here], dtype=torch.int64, device=HOST)
        table = transport.table_of(row)
        self.steps = int(table[:, -1].max())
        self._all_have_steps = int(table[:, -1].min()) > 0
        return (table[:, :-1] == table[0, :-1]).all(0).tolist()


DIGESTS = Digests()

BEGINNING.append(DIGESTS.begin)


def _is_later_one(step: int) -> bool:
    """True for the steps after the first ones in which scripts compare."""
    return WORLD.size > 1 and step > _STEPS and step & (step - 1) == 0


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters that all ranks have whole."""
    groups = [group["params"] for group in optimizer.param_groups]
    return [p.detach() for group in groups for p in group if type(p) is nn.Parameter]


def _total(tensors: list[Tensor]) -> int:
    return sum(map(_digest, tensors)) % 2**62


def _conclude(x: Tensor, is_same: bool, name: Callable[[], str], line: Callable[[], str]) -> None:
    if is_same or (x.is_floating_point() and transport.agree(_is_rounded(on_host(x)))):
        return
    raise RanksDivergedError(
        f"{name()} of shape {list(x.shape)} and {x.dtype} is not the same on all ranks, at "
        f"{line()}: {_ADVICE}"
    )


def _is_rounded(x: Tensor) -> bool:
    """True if it is that of rank 0 but for rounding, as that of another processor may be."""
    of_first: Tensor = transport.broadcast(x)
    if of_first.shape != x.shape or of_first.dtype != x.dtype:
        return False
    if not x.numel():
        return True
    tolerance = torch.finfo(x.dtype).eps ** 0.5
    most = tolerance * float(of_first.abs().nan_to_num(0.0, 0.0, 0.0).max())
    return torch.allclose(x, of_first, rtol=tolerance, atol=most, equal_nan=True)


def _digest(x: Tensor) -> int:
    """62 bits of a tensor, which the host reads."""
    kind = kind_of(x)
    if x.layout != torch.strided:
        return kind
    x = on_host(x)
    if native.is_available():
        content = native.library().checksum(flat(x))
    else:
        content = zlib.crc32(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return int((content ^ (kind << 31)) & (2**62 - 1))


def _name_of(x: object) -> str:
    """The name of a tensor in the function of the program that is running."""
    frame = frame_of_program()
    for scope in (frame.f_locals, frame.f_globals):
        for name, value in list(scope.items()):
            if value is x and isinstance(x, Tensor):
                return name
            if isinstance(value, nn.Module):
                held = (*value.named_parameters(), *value.named_buffers())
                for key, tensor in held:
                    if tensor is x:
                        return f"{name}.{key}"
    return "a tensor" if isinstance(x, Tensor) else "an index"
