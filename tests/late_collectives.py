"""Collectives of tensors on the stand-in device, as NCCL does them: late, and not all.

A result is not there when a collective returns: its memory is NaN until it arrives, at any later
operation of the device, in any order, at the latest when it is waited for. Which, a generator of
each rank draws. Nobody may change or free what is being sent or received until then, or wait for
it on another stream than that which has begun it, as nothing of ours records its memory there. No
collective begins while one of another communicator is going on: on GPUs two of these have no
order, and may wait for each other. The host does not wait, and nothing tells it that a collective
has ended. What NCCL refuses is refused. Between processes it is gloo that sends, from copies in
host memory.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests import standin

_SENT = frozenset(
    (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool),
    )
)
"""Dtypes that NCCL knows."""


class Issued(NamedTuple):
    """A collective that this rank has issued.

    Attributes:
        kind: the function of ``torch.distributed``.
        device: of its tensors.
        shape: of what it gives.
        ranks: how many take part.
    """

    kind: str
    device: str
    shape: list[int]
    ranks: int


ISSUED: list[Issued] = []

_TIMES_SLOWER = 10
"""Than an operation by elements: what the device does not spend computing, by its clock."""

_GATHERS = ("all_gather_single", "all_gather_into_tensor")


class _Buffer:
    """Memory of a tensor on the device, which others have to keep."""

    def __init__(self, x: Tensor) -> None:
        self._storage = StorageWeakRef(x.untyped_storage())
        self._dtype = x.dtype
        self._place = x.storage_offset(), x.shape, x.stride()

    def on_host(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        assert storage is not None, "memory was freed while it was sent or received"
        empty = standin.on_device(torch.empty(0, dtype=self._dtype, device="cpu"))
        return standin.on_host(empty.set_(storage, *self._place))


class Late:
    """The handle of a collective, which ends when the device is told to wait for it.

    Args:
        group: its communicator.
        works: by which others send.
        received: what they have sent, in memory of the host, and where it goes.
        sent: tensors, with copies that others receive.
    """

    def __init__(
        self,
        group: object,
        works: Sequence[dist.Work],
        received: Sequence[tuple[Tensor, Tensor]],
        sent: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        self.group, self._works = group, works
        self._received = [(found, _Buffer(result)) for found, result in received if result.numel()]
        self._sent = [(_Buffer(given), copy) for given, copy in sent if given.numel()]
        self._stream = torch.get_device_module(standin.DEVICE).current_stream()
        for _, result in self._received:
            result.on_host().view(-1).view(torch.uint8).fill_(255)  # which is NaN
        GOING_ON.append(self)

    def arrive(self) -> None:
        """Have the result be there."""
        for work in self._works:
            work.wait()
        for found, result in self._received:
            result.on_host().copy_(found)
        self._works, self._found = [], self._received
        self._received = []

    def is_completed(self) -> bool:
        """False: the host is not told."""
        return False

    def wait(self, timeout: object = None) -> bool:
        """Have the device wait."""
        assert timeout is None, "a host waits for nothing that its device receives"
        assert self in GOING_ON, "it was waited for before"
        GOING_ON.remove(self)
        stream = torch.get_device_module(standin.DEVICE).current_stream()
        assert stream is self._stream, "it was begun on another stream"
        for given, copy in self._sent:
            assert torch.equal(given.on_host(), copy), "it was changed while it was sent"
        self.arrive()
        for found, _ in self._found:
            standin.CLOCK.advance(_TIMES_SLOWER * found.numel())
        return True


GOING_ON: list[Late] = []
"""Collectives that were begun and not waited for yet."""

_DRAWN = random.Random()

OFTEN = 0.3
"""The probability that an operation finds that a result has arrived."""


def _arrive() -> None:
    """Have some results arrive, those that were asked for last maybe first."""
    for late in [late for late in GOING_ON if _DRAWN.random() < OFTEN]:
        late.arrive()


def _begin(group: object) -> None:
    others = [late for late in GOING_ON if late.group is not group]
    assert not others, "a collective of another communicator is going on"
    _arrive()


def install() -> None:
    """Have a rank that has joined compute on the stand-in device, whose collectives are late."""
    from fastgraph.dist.ranks import transport
    from fastgraph.dist.ranks.world import WORLD

    standin.install()
    _DRAWN.seed(WORLD.rank)
    standin.BETWEEN.append(_arrive)
    WORLD.device, WORLD.through = torch.device(standin.DEVICE, 0), "late"
    for kind in ("all_reduce", "all_to_all_single", *_GATHERS):
        upstream = getattr(dist, kind, None)
        if upstream is not None:
            setattr(dist, kind, _taken_over(kind, upstream))
    transport._gather_parts = next(getattr(dist, kind) for kind in _GATHERS if hasattr(dist, kind))
    dist.all_gather = _gathered_parts
    dist.broadcast_object_list = _of_host(dist.broadcast_object_list)


def _of_host(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def collective(*args: Any, device: torch.device | None = None, **kwargs: Any) -> Any:
        # Without a device torch takes the host, if the group has a library for it.
        assert device is None or device.type == "cpu", "objects are the host's"
        return upstream(*args, device=device, **kwargs)

    return collective


def _taken_over(kind: str, upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def collective(result: Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        ranks = dist.get_world_size(kwargs.get("group"))
        ISSUED.append(Issued(kind, result.device.type, list(result.shape), ranks))
        if result.device.type != standin.DEVICE:
            return upstream(result, *args, async_op=async_op, **kwargs)
        given, rest = (result, args) if kind == "all_reduce" else (args[0], args[1:])
        for x in (result, given):
            _refuse(kind, x)
        group = kwargs.get("group")
        _begin(group)
        copy = standin.on_host(given).clone()
        received = copy.clone() if given is result else torch.empty_like(standin.on_host(result))
        sent = [] if given is result else [(given, copy)]
        between = (received, *rest) if given is result else (received, copy, *rest)
        works = [upstream(*between, async_op=True, **kwargs)]
        late = Late(group, works, [(received, result)], sent)
        return late if async_op else late.wait()

    return collective


def _gathered_parts(results: list[Tensor], given: Tensor, async_op: bool = False) -> Any:
    """``all_gather`` of parts of any sizes, which gloo has not."""
    rows = sum(len(result) for result in results)
    shape = [rows, *given.shape[1:]]
    ISSUED.append(Issued("all_gather", given.device.type, shape, len(results)))
    for x in (*results, given):
        _refuse("all_gather", x)
    _begin(None)
    copy = standin.on_host(given).clone()
    received = [torch.empty_like(standin.on_host(result)) for result in results]
    received[dist.get_rank()].copy_(copy)
    works = [dist.broadcast(x, i, async_op=True) for i, x in enumerate(received) if x.numel()]
    late = Late(None, works, list(zip(received, results, strict=True)), [(given, copy)])
    return late if async_op else late.wait()


def _refuse(kind: str, x: Tensor) -> None:
    if x.device.type != standin.DEVICE:
        raise RuntimeError(f"{kind}: No backend type associated with device type {x.device.type}")
    if x.dtype not in _SENT:
        raise TypeError(f"{kind}: Unconvertible NCCL type {x.dtype}")
    if not x.is_contiguous() or x.layout != torch.strided:
        raise ValueError(f"{kind}: Tensors must be contiguous")
