"""The device of a rank, and the libraries by which ranks send what is on it.

What ranks plan and agree on is the host's, and goes through gloo. What is on a GPU goes from one to
another through NCCL, where each rank of a machine has one for itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

HOST = torch.device("cpu")

_LIBRARIES = {"cuda": "nccl"}
"""By kind of device; of others gloo is asked, which may refuse."""


class OwnDevice(NamedTuple):
    """The device that a rank should have.

    Attributes:
        device: the CPU, or one with a number.
        through: the library by which ranks send what is on it.
        notice: what people must know who wait for it, or nothing.
    """

    device: torch.device
    through: str = "gloo"
    notice: str = ""

    @property
    def backend(self) -> str:
        """As ``torch.distributed`` spells it."""
        if self.device == HOST:
            return self.through
        return f"cpu:gloo,{self.device.type}:{self.through}"


def own_device(environment: Mapping[str, str] = os.environ) -> OwnDevice:
    """The device of this rank, by its number on this machine; that of a single process, too.

    Args:
        environment: in which ``torchrun`` has left ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``.
    """
    kind = _kind()
    if kind is None:
        return OwnDevice(HOST)
    module = torch.get_device_module(kind)
    place = environment.get("LOCAL_RANK")
    return chosen(
        kind,
        module.device_count(),
        module.current_device() if place is None else int(place),
        int(environment.get("LOCAL_WORLD_SIZE", 1)),
        has_library=dist.is_available() and dist.is_nccl_available(),
    )


def chosen(kind: str, count: int, place: int, ranks: int, *, has_library: bool) -> OwnDevice:
    """The device of a rank among those of its machine.

    Args:
        kind: of devices.
        count: how many there are.
        place: the number of the rank on its machine.
        ranks: how many ranks the machine has.
        has_library: whether torch has the library for such devices.
    """
    if not count:
        return OwnDevice(HOST)
    device, library = torch.device(kind, place % count), _LIBRARIES.get(kind, "gloo")
    cost = "what they exchange is copied to the host, sent by gloo, and copied back"
    if ranks > count:
        return OwnDevice(
            device,
            notice=f"{ranks} ranks on this machine share {count} devices of kind {kind}, for which "
            f"{library} wants one each: {cost}; start {count} ranks, or pass backend='gloo' and "
            "stay on the CPU",
        )
    if library == "nccl" and not has_library:
        return OwnDevice(device, notice=f"this torch has no NCCL for its GPUs: {cost}")
    return OwnDevice(device, library)


def through(device: torch.device) -> str:
    """The library by which the ranks that have joined send what is on a device; empty for none."""
    config = str(dist.get_backend_config())
    by_kind = dict(part.split(":") for part in config.split(",") if ":" in part)
    return by_kind.get(device.type, "" if by_kind else config)


def usable_memory(device: torch.device) -> int:
    """Bytes of a device, which is not the CPU, that this process has taken or may take."""
    module = torch.get_device_module(device)
    free, _ = module.mem_get_info(device)
    return int(free + module.memory_reserved(device))


def random_state(device: torch.device) -> Tensor | None:
    """The state of a device's generator of random numbers, bytes on the host; none of the CPU's."""
    if device == HOST:
        return None
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Have a device, which is not the CPU, go on from such a state."""
    torch.get_device_module(device).set_rng_state(state, device)


class Later:
    """A copy on the host of what a device has computed, which nobody waits for when it is made.

    Args:
        x: on a device that is not the CPU.
    """

    def __init__(self, x: Tensor) -> None:
        # From memory that the system may move, CUDA would have the host wait for the copy.
        is_pinned = x.device.type == "cuda"
        self._values = torch.empty(x.shape, dtype=x.dtype, device=HOST, pin_memory=is_pinned)
        self._values.copy_(x.detach(), non_blocking=True)
        self._arrived = torch.get_device_module(x.device).Event()
        self._arrived.record()

    def is_there(self) -> bool:
        """True if the device has gone beyond them."""
        return bool(self._arrived.query())

    def read(self) -> Tensor:
        """The values, for which the host waits unless the device has gone beyond them by now."""
        self._arrived.synchronize()
        return self._values


def _kind() -> str | None:
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type == "cpu" else found.type
