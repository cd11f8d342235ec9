"""The ranks that run one program together, and what they have agreed on."""

from __future__ import annotations

import atexit
import importlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist

from fastgraph.dist.ranks.own_device import (
    HOST,
    OwnDevice,
    own_device,
    random_state,
    set_random_state,
    through,
)
from fastgraph.layers.arguments import check_flags, check_kinds
from fastgraph.upstream import PACKAGES

RANDOM_MODES = ("rows", "exact")

DEFAULT_TIMEOUT = timedelta(minutes=30)

LIBRARIES = ("fastgraph", "torch", "runpy", "functools", "contextlib", *PACKAGES)


class RanksDivergedError(RuntimeError):
    """Ranks asked for different collectives: the program did different things on them."""


class CollectiveError(RuntimeError):
    """A collective did not end, as after a time-out or the death of another rank."""


@dataclass
class World:
    """The ranks of this program.

    Attributes:
        rank: the number of this process.
        size: how many processes there are; 1 needs no process group.
        random: how random numbers for sharded tensors are drawn, see :func:`init`.
        check: whether the ranks compare every collective before they issue it.
        is_ready: whether :func:`init` was called.
        is_alone: True while ranks work one by one, see :func:`alone`.
        is_forked: whether this process is a fork of a rank, as workers of data loaders are, and
            takes no part in collectives.
        device: on which sharded tensors may be, besides the CPU.
        through: the library by which ranks send what is on it.
    """

    rank: int = 0
    size: int = 1
    random: str = "rows"
    check: bool = False
    is_ready: bool = False
    is_alone: bool = False
    is_forked: bool = False
    device: torch.device = HOST
    through: str = "gloo"


WORLD = World()

BEGINNING: list[Callable[[], None]] = []
"""Functions that are called when ranks have joined."""


def _forked() -> None:
    WORLD.is_forked = True


os.register_at_fork(after_in_child=_forked)


@contextmanager
def alone() -> Iterator[None]:
    """Work that a rank does while the others are elsewhere, so that a collective would hang.

    Within, graphs stay whole, files are written as on one process, and a collective is an error.
    """
    before, WORLD.is_alone = WORLD.is_alone, True
    try:
        yield
    finally:
        WORLD.is_alone = before


def init(
    *,
    backend: str = "auto",
    timeout: timedelta = DEFAULT_TIMEOUT,
    random: str = "rows",
    check: bool = False,
) -> World:
    """Join the ranks that ``torchrun`` has started; without it, be the only one.

    All ranks go on with the random states of rank 0 (torch on the host and on the device of the
    rank, ``random`` and numpy), as a program that sets no seed would otherwise be another one on
    each.

    Args:
        backend: of ``torch.distributed``, unless a process group exists already. ``"auto"``: gloo
            on the host, and for a GPU, which is that of ``LOCAL_RANK``, NCCL beside it
            (``"cpu:gloo,cuda:nccl"``). Where ranks share a GPU or torch has no NCCL, rows on GPUs
            go through the host by gloo, and a notice says so. ``"gloo"``: sharded tensors stay on
            the CPU.
        timeout: for a collective, after which the rank raises :class:`CollectiveError`.
        random: ``"rows"``: each row of a sharded tensor gets its random numbers from a seed that
            all ranks share and the row's global position, so that they do not depend on the number
            of ranks. ``"exact"``: what one process would draw from torch's generator, at the cost
            of drawing the whole on each rank.
        check: compare a fingerprint of each collective (kind, shape, line of the program) before it
            is issued, and name the lines that differ. Slow.

    Returns:
        The world, for its ``rank`` and ``size``.

    Raises:
        TypeError: an argument of another type.
        ValueError: an unknown ``random`` or ``backend``, or a ``timeout`` that is over at once; or
            a process group that sends nothing on hosts.
        RanksDivergedError: this rank and rank 0 have other kinds of devices, or send what is on
            them by other libraries.
    """
    _check_arguments(backend, timeout, random, check)
    own = OwnDevice(HOST) if backend == "gloo" else own_device()
    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if own.notice and os.environ.get("LOCAL_RANK") == "0":
            print(f"fastgraph.dist: {own.notice}", file=sys.stderr)
        join(own.backend if backend == "auto" else backend, timeout=timeout)
    WORLD.device, WORLD.through = own.device, own.through
    if dist.is_initialized():
        WORLD.rank, WORLD.size = dist.get_rank(), dist.get_world_size()
        if not through(HOST):
            raise ValueError(
                "ranks plan on their hosts, for which the process group must have gloo, got "
                f"{dist.get_backend_config()}: make it by {own.backend!r}, or let init() make it"
            )
        WORLD.through = through(own.device)
        if not WORLD.through:  # a group that others have made, for the CPU alone
            WORLD.device, WORLD.through = HOST, "gloo"
    if WORLD.device != HOST:
        torch.get_device_module(WORLD.device).set_device(WORLD.device)
    WORLD.random, WORLD.check, WORLD.is_ready = random, check, True
    WORLD.is_forked = False
    if WORLD.size > 1:
        share_random_states()
    for begin in BEGINNING:
        begin()
    return WORLD


def _check_arguments(backend: object, timeout: object, random: object, check: object) -> None:
    """See :func:`init`."""
    if random not in RANDOM_MODES:
        raise ValueError(f"random must be one of {list(RANDOM_MODES)}, got {random!r}")
    check_kinds(str, backend=backend)
    check_kinds(timedelta, timeout=timeout)
    check_flags(check=check)
    assert isinstance(backend, str) and isinstance(timeout, timedelta)
    known = ["auto", *dist.Backend.backend_list] if dist.is_available() else ["auto"]
    for part in backend.split(","):  # such as cpu:gloo
        if part.rpartition(":")[2].lower() not in known:
            raise ValueError(
                f"backend: expected one of {known}, or as 'cpu:gloo,cuda:nccl', got {backend!r}"
            )
    if timeout <= timedelta():
        raise ValueError(f"timeout: expected a time above 0, got {timeout!r}")


def join(
    backend: str,
    *,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """``torch.distributed.init_process_group``, and leave the group when the process ends.

    Threads of a group free the tensors of its last collectives. If that happens while the
    interpreter ends, it brings the process down, so they have to have ended before.
    """
    # Defaults of its functions are the group that exists when it is imported, and would keep that.
    importlib.import_module("torch.distributed.nn.functional")
    dist.init_process_group(
        backend, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size
    )
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def share_random_states() -> None:
    """Have all ranks go on with the random states of rank 0.

    They are torch's, that of the rank's device, ``random``'s and numpy's.

    Raises:
        RanksDivergedError: rank 0 has another kind of device, or sends by another library.
    """
    if WORLD.size == 1:
        return
    numpy = sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    own = f"{WORLD.device.type} by {WORLD.through}"
    of_device = random_state(WORLD.device)
    states = [(own, torch.get_rng_state(), of_device, random.getstate(), of_numpy)]
    dist.broadcast_object_list(states, 0, device=HOST)
    of_first, of_torch, of_device, of_random, of_numpy = states[0]
    if own != of_first:
        raise RanksDivergedError(
            f"rank {WORLD.rank} would compute on {own}, and rank 0 on {of_first}: give all ranks "
            "devices of one kind, one each, or pass backend='gloo' and stay on the CPU"
        )
    torch.set_rng_state(of_torch)
    if of_device is not None:
        set_random_state(WORLD.device, of_device)
    random.setstate(of_random)
    if numpy is not None and of_numpy is not None:
        numpy.random.set_state(of_numpy)


def frame_of_program() -> FrameType:
    """The frame of the user's program that is running."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] in LIBRARIES:
        if frame.f_back is None:
            break
        frame = frame.f_back
    return frame


def line_of_program() -> str:
    """The line of the user's program that is running, as ``file:line``."""
    frame = frame_of_program()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
