"""Cache of verdicts on the kernels of a backend on this machine's devices, kept between runs.

A kernel that fails can take its process with it, or leave a GPU unusable to it, so that checks run
in a process of their own. What they found is kept in the cache directory, by everything on which it
depends; where nothing can be kept, the next process checks again.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import attrs
import torch

from fastgraph.machine import cache
from fastgraph.plugins.backend import FLOATING, VerifiedBackend
from fastgraph.verification.checking import Finding, operators

_LOGGER = logging.getLogger(__name__)

_KIND = "verdicts-2"
"""With another number where what is checked is changed, so that old verdicts are unknown."""

_TIMEOUT = 120.0
"""Seconds for a child, most of which are for loading torch and waking the device."""


class UnfinishedCheckError(RuntimeError):
    """A check did not come to its end."""


def failures(backend: VerifiedBackend) -> dict[tuple[str, torch.dtype], str]:
    """Why layers must not be routed to kernels of a backend, by operator and dtype.

    Asks the cache, and else checks. Both passes of an operator share a verdict.

    Args:
        backend: which must be known to the registry of a fresh process, too.

    Returns:
        An entry for each operator and dtype that failed on one of the devices. A check that did not
        end fails for all of them, and is not kept.
    """
    found: dict[tuple[str, torch.dtype], str] = {}
    for device, identity in backend.identities().items():
        try:
            findings = _findings(backend.name, device, identity)
        except UnfinishedCheckError as error:
            reason = f"{backend.name} could not be checked on {device}: {error}"
            found |= dict.fromkeys(itertools.product(operators(), FLOATING), reason)
            continue
        for finding in findings:
            if finding.failure is not None:
                reason = f"{backend.name} failed its check on {device}: {finding.failure}"
                found.setdefault((finding.operator, finding.dtype), reason)
    return found


def _findings(name: str, device: str, identity: str) -> list[Finding]:
    found = read(identity)
    if found is not None:
        return found
    # Ranks that start together on GPUs of one kind wait for the first of them.
    with cache.locked(_KIND, identity):
        found = read(identity)
        if found is None:
            found = check_in_child(name, device)
            keep(identity, found)
    return found


def keep(identity: str, findings: Iterable[Finding]) -> None:
    """Keep a verdict for other processes, where that is possible."""
    cache.write(_KIND, identity, [to_json(finding) for finding in findings])


def read(identity: str) -> list[Finding] | None:
    """The verdict on such a device and library, or ``None`` where none is known."""
    try:
        kept = cache.read(_KIND, identity)
        return None if kept is None else [from_json(item) for item in kept]
    except (AttributeError, LookupError, TypeError):
        return None


def to_json(finding: Finding) -> dict[str, Any]:
    """A finding as numbers and text."""
    return {**attrs.asdict(finding), "dtype": str(finding.dtype).removeprefix("torch.")}


def from_json(item: dict[str, Any]) -> Finding:
    """The reverse of :func:`to_json`."""
    return Finding(**{**item, "dtype": getattr(torch, item["dtype"])})


def check_in_child(name: str, device: str) -> list[Finding]:
    """The findings of ``python -m fastgraph check`` in a process of its own.

    Raises:
        UnfinishedCheckError: it ended early, or took too long.
    """
    _LOGGER.info("checking the kernels of %s on %s, once for this device", name, device)
    command = [sys.executable, "-m", "fastgraph", "check", "--json"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FASTGRAPH")}
    try:
        child = subprocess.run(
            [*command, "--backend", name, "--device", device],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            env={**environment, "FASTGRAPH": "0"},
        )
    except subprocess.TimeoutExpired:
        raise UnfinishedCheckError(f"the check took more than {_TIMEOUT:.0f} s") from None
    except OSError as error:
        raise UnfinishedCheckError(f"the check could not be started: {error}") from None
    try:
        return [from_json(item) for item in json.loads(child.stdout)]
    except (ValueError, LookupError, TypeError):
        last = (child.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UnfinishedCheckError(
            f"the check ended with status {child.returncode}: {last}"
        ) from None
