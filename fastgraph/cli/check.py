"""``python -m fastgraph check``: verification of the kernels on this machine's devices."""

from __future__ import annotations

import json
import time

import click
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastgraph.plugins.backend import Backend, VerifiedBackend
from fastgraph.registry.registry import REGISTRY
from fastgraph.verification import checking, speed, verdicts
from fastgraph.verification.checking import Finding


def print_check(device: str | None, backend: str | None, as_json: bool) -> int:
    """Check backends on devices, and print what was found.

    Args:
        device: as torch names it; default: the CPU, and one GPU of each kind.
        backend: name of a backend; default: those that layers are routed to on the device.
        as_json: print a list of findings for another program.

    Returns:
        The exit status: 1 if anything failed.

    Raises:
        click.UsageError: an unknown device or backend, or one that cannot be used.
    """
    REGISTRY.select(None)
    found: list[Finding] = []
    console = Console()
    for one, place in _chosen(device, backend):
        start = time.perf_counter()
        findings = list(checking.check(one, torch.device(place)))
        faster = speed.speeds(one, torch.device(place))
        if isinstance(one, VerifiedBackend):
            findings = speed.without_slower(findings, faster)
            _keep(one, place, findings)
        found += findings
        if not as_json:
            seconds = time.perf_counter() - start
            console.print(_table(f"{one.name} on {place}, {seconds:.1f} s", findings, faster))
    if as_json:
        click.echo(json.dumps([verdicts.to_json(finding) for finding in found]))
    else:
        for finding in found:
            if finding.failure is not None:
                console.print(Text(f"{finding.operator}, {finding.dtype}: {finding.failure}"))
    return int(any(finding.failure is not None for finding in found))


def _chosen(device: str | None, name: str | None) -> list[tuple[Backend, str]]:
    """Backends and where to check them."""
    if name is not None and name not in REGISTRY.backends:
        raise click.UsageError(
            f"--backend must be one of {', '.join(REGISTRY.backends)}, got {name!r}"
        )
    candidates = [
        backend
        for backend in REGISTRY.backends.values()
        if backend.name == name or (name is None and backend.priority >= 0)
    ]
    for backend in candidates:
        why_not = backend.unavailable()
        if why_not is not None and name is not None:
            raise click.UsageError(f"backend {name!r} is unavailable: {why_not}")
    devices = ["cpu", *_gpus()] if device is None else [device]
    pairs = [
        (backend, place)
        for place in devices
        for backend in candidates
        if backend.unavailable() is None
        and backend.kernel("spmm", _kind(place), torch.float32) is not None
    ]
    if not pairs:
        raise click.UsageError(f"no backend has kernels for {', '.join(devices)}")
    return pairs


def _kind(device: str) -> str:
    try:
        return torch.device(device).type
    except RuntimeError as error:
        raise click.UsageError(f"--device: {error}") from None


def _gpus() -> list[str]:
    """One GPU of each kind for which there are kernels."""
    return [
        device
        for backend in REGISTRY.backends.values()
        if isinstance(backend, VerifiedBackend) and backend.unavailable() is None
        for device in backend.identities()
    ]


def _keep(backend: VerifiedBackend, device: str, findings: list[Finding]) -> None:
    """Keep the verdict where the first call on such a device will ask for it."""
    identity = backend.identities().get(device)
    if identity is not None:
        verdicts.keep(identity, findings)


def _table(title: str, findings: list[Finding], faster: dict[str, float]) -> Table:
    table = Table("operator", title=title, title_justify="left")
    dtypes = list(dict.fromkeys(finding.dtype for finding in findings))
    for dtype in dtypes:
        table.add_column(str(dtype).removeprefix("torch."), justify="right")
    table.add_column("calls", justify="right")
    table.add_column("speed", justify="right")
    by_operator: dict[str, dict[torch.dtype, Finding]] = {}
    for finding in findings:
        by_operator.setdefault(finding.operator, {})[finding.dtype] = finding
    for operator, of_dtypes in by_operator.items():
        cells = [_cell(of_dtypes.get(dtype)) for dtype in dtypes]
        calls = sum(finding.calls for finding in of_dtypes.values())
        table.add_row(
            operator, *cells, str(calls), f"{faster[operator]:.1f}" if operator in faster else ""
        )
    table.caption = "errors over what is allowed, the largest of all calls; speed over torch's"
    table.caption_justify = "left"
    return table


def _cell(finding: Finding | None) -> Text:
    if finding is None:
        return Text("no kernel")
    return Text(f"{finding.error:.2f}") if finding.failure is None else Text("FAILED", "red")
