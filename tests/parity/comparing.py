"""Outcomes of cases without and with fastgraph, case by case, and the exceptions that are known."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from tests.parity.records import Event

EXCEPTIONS = Path(__file__).with_name("exceptions.toml")
_GOOD = ("passed", "failed as expected")
_NEITHER = ("skipped",)


@dataclass(frozen=True)
class Difference:
    """A case whose outcome is another with fastgraph.

    Attributes:
        case: its name.
        plain: how it ended without, and why.
        fastgraph: how it ended with fastgraph, and why.
        reason: that of the exception that covers it; empty where none does.
    """

    case: str
    plain: tuple[str, str]
    fastgraph: tuple[str, str]
    reason: str = ""

    @property
    def is_worse(self) -> bool:
        """True if fastgraph makes a case fail, or hides that it passes."""
        before, after = _rank(self.plain[0]), _rank(self.fastgraph[0])
        return after < before


def _rank(outcome: str) -> int:
    return 2 if outcome in _GOOD else 1 if outcome in _NEITHER else 0


@dataclass
class Part:
    """The cases of a file or folder.

    Attributes:
        name: its path within the sources.
        plain: number of cases by outcome, without fastgraph.
        fastgraph: the same with fastgraph.
    """

    name: str
    plain: dict[str, int] = field(default_factory=dict)
    fastgraph: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Known:
    """An exception: a case that may differ, on some versions, for a reason.

    Attributes:
        suite: of the case.
        case: its name, or that of the test or file that it belongs to.
        versions: requirements that all must hold, such as ``"torch>=2.13"``.
        reason: why it differs.
    """

    suite: str
    case: str
    versions: tuple[str, ...]
    reason: str

    def covers(self, suite: str, case: str, installed: Mapping[str, str]) -> bool:
        """True if a case of a suite may differ with these versions."""
        is_named = case == self.case or case.startswith((f"{self.case}[", f"{self.case}::"))
        return suite == self.suite and is_named and all(_holds(r, installed) for r in self.versions)


def _holds(requirement: str, installed: Mapping[str, str]) -> bool:
    asked = Requirement(requirement)
    return asked.name in installed and asked.specifier.contains(
        installed[asked.name].partition("+")[0], prereleases=True
    )


def exceptions(path: Path = EXCEPTIONS) -> list[Known]:
    """The table of exceptions.

    Raises:
        ValueError: an entry has no reason or no versions.
    """
    found = []
    for entry in tomllib.loads(path.read_text()).get("exception", []):
        known = Known(entry["suite"], entry["case"], tuple(entry["versions"]), entry["reason"])
        if not known.reason.strip() or not known.versions:
            raise ValueError(f"{path.name}: {known.case} must have a reason and versions")
        for requirement in known.versions:
            if not Requirement(requirement).specifier:
                raise ValueError(f"{path.name}: {known.case}: {requirement} names no version")
        found.append(known)
    return found


def installed_versions() -> dict[str, str]:
    """The versions that outcomes may depend on."""
    found = {}
    for name in ("torch", "torch-geometric", "dgl", "numpy", "scipy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def differences(
    suite: str,
    plain: Mapping[str, Event],
    fastgraph: Mapping[str, Event],
    known: Sequence[Known],
    installed: Mapping[str, str],
) -> list[Difference]:
    """The cases that end in another way, or print something else, in the order of their names."""
    found = []
    for case in sorted({*plain, *fastgraph}):
        before, after = plain.get(case), fastgraph.get(case)
        if before is not None and after is not None:
            if (before.outcome, before.output) == (after.outcome, after.output):
                continue
            ends = (before.outcome, before.why), (after.outcome, after.why)
            if before.outcome == after.outcome:
                ends = ends[0], ("prints something else", _first_change(before, after))
        else:
            ends = _ended(before), _ended(after)
        reasons = [k.reason for k in known if k.covers(suite, case, installed)]
        found.append(Difference(case, *ends, reasons[0] if reasons else ""))
    return found


def _ended(event: Event | None) -> tuple[str, str]:
    return (event.outcome, event.why) if event is not None else ("no such case", "")


def _first_change(before: Event, after: Event) -> str:
    lines = before.output.splitlines(), after.output.splitlines()
    for one, other in zip(*lines, strict=False):
        if one != other:
            return f"{one.strip()} | {other.strip()}"
    return f"{len(lines[0])} lines | {len(lines[1])} lines"


def counted(
    parts: Sequence[str], plain: Mapping[str, Event], fastgraph: Mapping[str, Event]
) -> list[Part]:
    """Cases by part and outcome; a case belongs to the longest part that its name begins with."""
    found = {name: Part(name) for name in parts}
    for way, events in (("plain", plain), ("fastgraph", fastgraph)):
        outcomes = {name: Counter[str]() for name in parts}
        for event in events.values():
            of = max((p for p in parts if event.case.startswith(p)), key=len, default=None)
            if of is not None:
                outcomes[of][event.outcome] += 1
        for name, counts in outcomes.items():
            setattr(found[name], way, dict(sorted(counts.items())))
    return list(found.values())


def as_json(parts: Sequence[Part], found: Sequence[Difference]) -> dict[str, Any]:
    """Both as what JSON can hold."""
    return {"parts": [asdict(p) for p in parts], "differences": [asdict(d) for d in found]}
