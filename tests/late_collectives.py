"""Collectives of tensors on the stand-in device, as NCCL does them: late, and not all.

A result is not there when a collective returns: its memory is NaN until it was waited for. Nobody
may change what is being sent until then. The host does not wait, and nothing tells it that a
collective has ended. What NCCL refuses is refused. Between processes it is gloo that sends, from
copies in host memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

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
    """

    kind: str
    device: str
    shape: list[int]


ISSUED: list[Issued] = []

_TIMES_SLOWER = 10
"""Than an operation by elements: what the device does not spend computing, by its clock."""

_GATHERS = ("all_gather_single", "all_gather_into_tensor")


class Late:
    """The handle of a collective, which ends when the device is told to wait for it."""

    def __init__(
        self,
        works: Sequence[dist.Work],
        received: Sequence[tuple[Tensor, Tensor]],
        sent: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        self._works, self._received, self._sent = works, received, sent

    def is_completed(self) -> bool:
        """False: the host is not told."""
        return False

    def wait(self, timeout: object = None) -> bool:
        """Have the device wait."""
        assert timeout is None, "a host waits for nothing that its device receives"
        for work in self._works:
            work.wait()
        for given, copy in self._sent:
            assert torch.equal(standin.on_host(given), copy), "it was changed while it was sent"
        for found, result in self._received:
            standin.on_host(result).copy_(found)
            standin.CLOCK.advance(_TIMES_SLOWER * found.numel())
        return True


def install() -> None:
    """Have a rank that has joined compute on the stand-in device, whose collectives are late."""
    from fastgraph.dist.ranks import transport
    from fastgraph.dist.ranks.world import WORLD

    standin.install()
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
        ISSUED.append(Issued(kind, result.device.type, list(result.shape)))
        if result.device.type != standin.DEVICE:
            return upstream(result, *args, async_op=async_op, **kwargs)
        given, rest = (result, args) if kind == "all_reduce" else (args[0], args[1:])
        for x in (result, given):
            _refuse(kind, x)
        copy = standin.on_host(given).clone()
        received = copy.clone() if given is result else torch.empty_like(standin.on_host(result))
        _spoil(result)
        sent = [] if given is result else [(given, copy)]
        between = (received, *rest) if given is result else (received, copy, *rest)
        late = Late([upstream(*between, async_op=True, **kwargs)], [(received, result)], sent)
        return late if async_op else late.wait()

    return collective


def _gathered_parts(results: list[Tensor], given: Tensor, async_op: bool = False) -> Any:
    """``all_gather`` of parts of any sizes, which gloo has not."""
    rows = sum(len(result) for result in results)
    ISSUED.append(Issued("all_gather", given.device.type, [rows, *given.shape[1:]]))
    for x in (*results, given):
        _refuse("all_gather", x)
    copy = standin.on_host(given).clone()
    received = [torch.empty_like(standin.on_host(result)) for result in results]
    received[dist.get_rank()].copy_(copy)
    for result in results:
        _spoil(result)
    works = [dist.broadcast(x, i, async_op=True) for i, x in enumerate(received) if x.numel()]
    late = Late(works, list(zip(received, results, strict=True)), [(given, copy)])
    return late if async_op else late.wait()


def _spoil(result: Tensor) -> None:
    if result.numel():
        standin.on_host(result).view(-1).view(torch.uint8).fill_(255)  # which is NaN


def _refuse(kind: str, x: Tensor) -> None:
    if x.device.type != standin.DEVICE:
        raise RuntimeError(f"{kind}: No backend type associated with device type {x.device.type}")
    if x.dtype not in _SENT:
        raise TypeError(f"{kind}: Unconvertible NCCL type {x.dtype}")
    if not x.is_contiguous() or x.layout != torch.strided:
        raise ValueError(f"{kind}: Tensors must be contiguous")
