"""The device of each rank, and scores from its data until something was measured."""

from __future__ import annotations

import math
import os
import platform
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fastgraph.comparison.memory import resident
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.own_device import HOST, usable_memory
from fastgraph.dist.ranks.world import WORLD
from fastgraph.machine.processor import cpu_model, cpuinfo

_COPIED_BYTES = 64 * 2**20
"""More than caches hold, and copied in less than the shortest quota of a usual period, 100 ms."""

_COPIES = 7

_PROC = Path("/proc")


@dataclass(frozen=True)
class Device:
    """Facts about what a rank computes on.

    Attributes:
        kind: ``"cpu"``, ``"cuda"``, or another one that torch names.
        name: the model of the hardware.
        host: the name of the machine.
        cores: CPU: how many cores' time the process may use, by its threads, its affinity and the
            quotas of its control groups; CUDA: streaming multiprocessors.
        threads: CPU: of torch; CUDA: as many as cores.
        clock: in Hz; 0 if the system does not say.
        bandwidth: of memory, bytes a second, read and written; 0 if it was not measured. CPU:
            measured, with the other ranks at the same time; CUDA: of the data sheet.
        memory: bytes that ranks on this host have together; CUDA: of the device, of a rank's own
            those that are free or this process has.
        limit: bytes of address space that this process may have at most; infinite without a limit.
    """

    kind: str
    name: str
    host: str
    cores: float
    threads: int
    clock: float
    bandwidth: float
    memory: int
    limit: float

    @property
    def usable_bandwidth(self) -> float:
        """The bandwidth that quotas leave."""
        return self.bandwidth * min(1.0, self.cores / self.threads)

    def identity(self, ranks_on_host: int) -> str:
        """A text that names all that measurements of speed on this device depend on.

        Neither the bandwidth, which is another one at each measurement, nor memory.
        """
        return f"{self.kind} {self.name} x{self.cores:.2f} of {ranks_on_host} on a machine"


def devices(*, bandwidth: bool = True) -> list[Device]:
    """The devices on which ranks compute, in their order. All ranks must call it.

    Ranks on one CPU have measured the same memory and the same clock, some of them while something
    else was going on: the highest values are those of all.

    Args:
        bandwidth: whether that of memory is measured, which takes 128 MiB and a moment.
    """
    own = cpu(bandwidth) if WORLD.device == HOST else of_rank(WORLD.device)
    found = [Device(**facts) for facts in transport.gather_objects(asdict(own))]

    def highest(one: Device) -> Device:
        alike = [other for other in found if _hardware(other) == _hardware(one)]
        return replace(
            one,
            bandwidth=max(other.bandwidth for other in alike),
            clock=max(other.clock for other in alike),
        )

    return [highest(one) for one in found]


def _hardware(device: Device) -> tuple[str, str, str, int]:
    return device.kind, device.name, device.host, device.threads


def cpu(bandwidth: bool = True) -> Device:
    """The CPU, as far as this process may use it.

    Args:
        bandwidth: whether that of memory is measured, by all ranks at the same time.
    """
    threads = torch.get_num_threads()
    allowed = len(os.sched_getaffinity(0))
    cores = min(threads, allowed, cpu_quota())
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(
        kind="cpu",
        name=cpu_model(),
        host=platform.node(),
        cores=float(cores),
        threads=threads,
        clock=clock(),
        bandwidth=_bandwidth() if bandwidth else 0.0,
        memory=int(min(physical, memory_limit())),
        limit=math.inf if soft == resource.RLIM_INFINITY else float(soft),
    )


class Properties(Protocol):
    """The facts of a GPU that every version of torch has."""

    name: str
    multi_processor_count: int
    total_memory: int


def cuda(properties: Properties, host: str = "") -> Device:
    """A GPU, by what ``torch.cuda.get_device_properties`` gives.

    Its bandwidth is that of the data sheet: two transfers of the bus in each clock of the memory.
    """
    clocks = {
        name: 1e3 * float(getattr(properties, name, 0))  # torch has kHz, or nothing
        for name in ("clock_rate", "memory_clock_rate")
    }
    bus = float(getattr(properties, "memory_bus_width", 0)) / 8
    return Device(
        kind="cuda",
        name=properties.name,
        host=host or platform.node(),
        cores=float(properties.multi_processor_count),
        threads=properties.multi_processor_count,
        clock=clocks["clock_rate"],
        bandwidth=2 * clocks["memory_clock_rate"] * bus,
        memory=int(properties.total_memory),
        limit=math.inf,
    )


def of_rank(device: torch.device) -> Device:
    """The device of this rank, which is not the CPU, with the memory that it has left for us."""
    properties = torch.get_device_module(device).get_device_properties(device)
    return replace(cuda(properties), kind=device.type, memory=usable_memory(device))


class InUse(NamedTuple):
    """Bytes of this process, where it computes.

    Attributes:
        now: that are in use.
        peak: at most until now.
        space: of the address space, for a rank that computes on the CPU.
    """

    now: int
    peak: int
    space: int


def in_use() -> InUse:
    """The memory of this rank: resident on the CPU, on a device what tensors have."""
    if WORLD.device == HOST:
        return InUse(resident() or 0, resident("VmHWM") or 0, address_space())
    module = torch.get_device_module(WORLD.device)
    now, peak = (f(WORLD.device) for f in (module.memory_allocated, module.max_memory_allocated))
    return InUse(int(now), int(peak), 0)


def scores(found: Sequence[Device]) -> list[float]:
    """The shares of ranks by the facts of their devices; they add up to 1.

    Half of an epoch is taken to be arithmetic, which goes with cores times clock, and half to wait
    for memory. What is not known of one of the devices is left out.
    """
    measures: list[Callable[[Device], float]] = [lambda device: device.usable_bandwidth]
    if len({device.kind for device in found}) == 1:  # a core of one kind is none of another
        measures.append(lambda device: device.cores)
        if all(device.clock for device in found):
            measures[-1] = lambda device: device.cores * device.clock
    seconds = [0.0] * len(found)
    for measure in measures:
        values = [measure(device) for device in found]
        if all(value > 0 for value in values):
            seconds = [s + max(values) / v for s, v in zip(seconds, values, strict=True)]
    speeds = [1 / s if s else 1.0 for s in seconds]
    return [speed / sum(speeds) for speed in speeds]


def on_host(found: Sequence[Device], rank: int) -> int:
    """The number of ranks on the host of a rank."""
    return sum(device.host == found[rank].host for device in found)


def identities(found: Sequence[Device]) -> list[str]:
    """The identities of all ranks' devices."""
    return [device.identity(on_host(found, rank)) for rank, device in enumerate(found)]


def memory_of_a_rank(found: Sequence[Device]) -> float:
    """Bytes that the rank with the least memory may use; ranks on one host share what it has."""
    return min(
        min(device.limit, device.memory / on_host(found, rank)) for rank, device in enumerate(found)
    )


def _bandwidth() -> float:
    transport.barrier()
    return copied_bytes_per_second()


def copied_bytes_per_second() -> float:
    """The fastest of some copies in memory: bytes read and written in a second."""
    source: Tensor = torch.ones(_COPIED_BYTES // 8, dtype=torch.float64, device=HOST)
    target = torch.empty_like(source)
    best = math.inf
    for _ in range(_COPIES):
        started = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - started)
    return 2 * _COPIED_BYTES / best


def address_space() -> int:
    """Bytes of the address space of this process, which a limit of it counts; 0 if unknown."""
    pages = (_read(_PROC / "self/statm") or "0").split()[0]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def clock() -> float:
    """The highest clock of the CPU in Hz; where the system does not say, its present one, or 0."""
    core = min(os.sched_getaffinity(0))
    file = Path(f"/sys/devices/system/cpu/cpu{core}/cpufreq/cpuinfo_max_freq")
    text = _read(file)
    return 1e3 * float(text) if text else 1e6 * float(cpuinfo("cpu MHz") or 0)


def cpu_quota() -> float:
    """Cores' time that the control groups of this process leave it; infinite without a quota."""
    quotas = [math.inf]
    for folder, version in _control_groups("cpu"):
        names = ("max",) if version == 2 else ("cfs_quota_us", "cfs_period_us")
        numbers = [_read(folder / f"cpu.{name}") or "-1" for name in names]
        quota, _, period = " ".join(numbers).partition(" ")
        if quota != "max" and float(quota) > 0:
            quotas.append(float(quota) / float(period))
    return min(quotas)


def memory_limit() -> float:
    """Bytes that the control groups of this process leave it; infinite without a limit."""
    limits = [math.inf]
    for folder, version in _control_groups("memory"):
        text = _read(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")) or "max"
        if text != "max":
            limits.append(float(text))
    return min(limits)


def _control_groups(controller: str) -> Iterator[tuple[Path, int]]:
    """The folders of a controller's groups that hold this process, with the version of cgroups.

    Limits of all of them hold together. What is mounted may begin below the root.
    """
    paths = {}
    for line in (_read(_PROC / "self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            paths[name] = path
    for line in (_read(_PROC / "self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        root, mounted = before.split()[3:5]
        kind, _, options = after.split(maxsplit=2)
        is_second = kind == "cgroup2"
        if not is_second and (kind != "cgroup" or controller not in options.split(",")):
            continue
        group = paths.get("" if is_second else controller)
        if group is None:
            continue
        version = 2 if is_second else 1
        inner = group[len(root) :] if root != "/" and group.startswith(root) else group
        folder = Path(mounted) / inner.strip("/")
        while folder.is_relative_to(mounted):
            yield folder, version
            folder = folder.parent


def _read(file: Path) -> str | None:
    """The text of a file of the system, if there is one."""
    try:
        return file.read_text().strip()
    except OSError:
        return None
