"""What is known of the kernels of a backend on the devices of this machine, kept between runs.

A kernel that fails can take its process with it, or leave a GPU unusable to it, so that checks run
in a process of their own. What they found is kept in the cache directory, by everything on which it
depends; where nothing can be kept, the next process checks again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import filelock
import platformdirs
import torch

from fastgraph.registry.backend import FLOATING, VerifiedBackend
from fastgraph.verification.checking import Finding, operators

_LOGGER = logging.getLogger(__name__)

_FORMAT = 1
"""Of the files, and of what is checked: a change of either makes old files unknown."""

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
    path = path_of(identity)
    found = read(path, identity)
    if found is not None:
        return found
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Ranks that start together on GPUs of one kind wait for the first of them.
            stack.enter_context(filelock.FileLock(path.with_suffix(".lock")))
        except OSError as error:
            _LOGGER.info("no verdicts can be kept in %s: %s", path.parent, error)
        found = read(path, identity)
        if found is None:
            found = check_in_child(name, device)
            keep(identity, found)
    return found


def keep(identity: str, findings: Iterable[Finding]) -> None:
    """Keep a verdict for other processes, where that is possible."""
    path = path_of(identity)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, identity, findings)
    except OSError as error:
        _LOGGER.info("a verdict cannot be kept as %s: %s", path, error)


def path_of(identity: str) -> Path:
    """Where the verdict of such a device and library is kept."""
    digest = hashlib.sha256(f"{_FORMAT} {identity}".encode()).hexdigest()[:24]
    return platformdirs.user_cache_path("fastgraph") / "verdicts" / f"{digest}.json"


def read(path: Path, identity: str) -> list[Finding] | None:
    """What a file holds, or ``None`` where it does not exist or is not such a verdict."""
    try:
        kept = json.loads(path.read_bytes())
        if kept["format"] != _FORMAT or kept["identity"] != identity:
            return None
        return [from_json(item) for item in kept["findings"]]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def write(path: Path, identity: str, findings: Iterable[Finding]) -> None:
    """Keep a verdict; readers see all of it, or nothing.

    Raises:
        OSError: it cannot be written.
    """
    kept = {
        "format": _FORMAT,
        "identity": identity,
        "findings": [to_json(finding) for finding in findings],
    }
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        temporary = Path(folder) / path.name
        temporary.write_text(json.dumps(kept, indent=1))
        temporary.replace(path)


def to_json(finding: Finding) -> dict[str, Any]:
    """A finding as numbers and text."""
    return {**attrs.asdict(finding), "dtype": str(finding.dtype).removeprefix("torch.")}


def from_json(item: dict[str, Any]) -> Finding:
    """The reverse of :func:`to_json`."""
    return Finding(**{**item, "dtype": getattr(torch, item["dtype"])})


def check_in_child(name: str, device: str) -> list[Finding]:
    """What ``python -m fastgraph check`` finds in a process of its own.

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
