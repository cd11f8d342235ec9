"""Ranks in network namespaces of their own, whose links have a bandwidth and a latency.

Each rank has one link, to a bridge that all share: what a rank sends and what comes to it are
limited, each by itself, as by a network card. Nothing outside of these namespaces is changed or can
be reached from them. Needs root, ``ip`` and ``tc`` of iproute2, and a kernel with veth, bridges and
``sch_tbf``; for latencies ``sch_netem``, too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

_PREFIX = "fastgraph"
_LINK = "eth0"
_SUBNET = "10.77.0"
_MOST_RANKS = 200

_BURST_SECONDS = 0.001
_SMALLEST_BURST = 2**17  # bytes; the kernel hands over segments of up to 64 KiB
_QUEUE = 2**25  # bytes, more than all sockets of a rank hold: nothing is dropped

# Throughput is that of the link from the first byte on, also after a pause for computing, and in
# both directions: windows hold what waits while acknowledgements queue behind data.
_TCP = {
    "net.ipv4.tcp_congestion_control": "reno",
    "net.ipv4.tcp_slow_start_after_idle": "0",
    "net.ipv4.tcp_rmem": "4096 4194304 8388608",
    "net.ipv4.tcp_wmem": "4096 4194304 8388608",
}


class NetworkError(RuntimeError):
    """This machine cannot have such a network."""


@dataclass(frozen=True)
class Network:
    """Namespaces, one for each rank.

    Attributes:
        prefixes: the words to put before the command of each rank, for
            :func:`fastgraph.dist.ranks.spawning.run_on_ranks` or for ``torchrun``, one on each
            rank.
        addresses: of each rank.
    """

    prefixes: list[list[str]]
    addresses: list[str]


@contextlib.contextmanager
def network(ranks: int, megabits: float | None, milliseconds: float = 0.0) -> Iterator[Network]:
    """Namespaces for some ranks, as long as the block lasts.

    Args:
        ranks: how many.
        megabits: that a rank sends in a second, and that it gets; ``None``: no limit.
        milliseconds: that what a rank sends takes longer.

    Raises:
        ValueError: a number that there cannot be.
        NetworkError: this machine cannot have it, and why not; nothing is left of it.
    """
    if not 1 <= ranks <= _MOST_RANKS:
        raise ValueError(f"ranks must be from 1 to {_MOST_RANKS}, got {ranks}")
    if megabits is not None and not megabits > 0:
        raise ValueError(f"megabits must be above 0, got {megabits}")
    if not milliseconds >= 0:
        raise ValueError(f"milliseconds must not be below 0, got {milliseconds}")
    _check_rights()
    _remove_left_over()
    bridge, *names = (f"{_PREFIX}-{os.getpid()}-{i}" for i in ("bridge", *range(ranks)))
    made: list[str] = []
    try:
        for name in (bridge, *names):
            _run("ip", "netns", "add", name)
            made.append(name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", bridge, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", bridge, "link", "set", "bridge", "up")
        addresses = [f"{_SUBNET}.{rank + 1}" for rank in range(ranks)]
        for rank, (name, address) in enumerate(zip(names, addresses, strict=True)):
            port = f"port{rank}"
            ends = (port, "type", "veth", "peer", "name", _LINK, "netns", name)
            _run("ip", "-n", bridge, "link", "add", *ends)
            _run("ip", "-n", bridge, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", _LINK)
            _run("ip", "-n", name, "link", "set", _LINK, "up")
            for setting, value in _TCP.items():
                _run("ip", "netns", "exec", name, "sysctl", "-qw", f"{setting}={value}")
            _limit(name, _LINK, megabits, milliseconds)
            _limit(bridge, port, megabits, 0.0)
        of_rank = ["env", f"GLOO_SOCKET_IFNAME={_LINK}"]
        yield Network([["ip", "netns", "exec", name, *of_rank] for name in names], addresses)
    finally:
        for name in reversed(made):
            _run("ip", "netns", "del", name)


def _limit(namespace: str, device: str, megabits: float | None, milliseconds: float) -> None:
    """Limit what leaves a device; what it may do at once is what it sends in a millisecond."""
    place = ["root", "handle", "1:"]
    if megabits is not None:
        burst = max(_SMALLEST_BURST, int(megabits * 1e6 / 8 * _BURST_SECONDS))
        limits = ["rate", f"{megabits:g}mbit", "burst", str(burst), "limit", str(_QUEUE)]
        _add(namespace, device, place, ["tbf", *limits])
        place = ["parent", "1:1", "handle", "2:"]
    if milliseconds:
        packets = str(_QUEUE // 1000)
        _add(namespace, device, place, ["netem", "delay", f"{milliseconds}ms", "limit", packets])


def _add(namespace: str, device: str, place: list[str], kind: list[str]) -> None:
    try:
        _run("tc", "-n", namespace, "qdisc", "add", "dev", device, *place, *kind)
    except NetworkError as error:
        raise NetworkError(f"{error}. Has this kernel sch_{kind[0]}?") from None


def _check_rights() -> None:
    if os.geteuid() != 0:
        raise NetworkError("network namespaces are made by root; this is another user")
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        raise NetworkError(f"{' and '.join(missing)} of iproute2 must be installed")


def _remove_left_over() -> None:
    """Of processes that were killed, as these could not do it."""
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        prefix, _, rest = name.partition("-")
        process = rest.partition("-")[0]
        if prefix == _PREFIX and process.isdigit() and not os.path.exists(f"/proc/{process}"):
            _run("ip", "netns", "del", name)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
