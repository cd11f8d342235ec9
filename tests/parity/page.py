"""The page of what was found last, without and with fastgraph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.parity.comparing import Difference
from tests.parity.suites import SUITES

ROOT = Path(__file__).parents[2]
FOUND = Path(__file__).with_name("found.json")
PAGE = ROOT / "docs" / "parity.md"

_INTRODUCTION = """\
# Upstream's own tests

PyG's and DGL's own tests and example scripts are run without and with fastgraph, for graphs of any
size, though by default those as small as theirs are left to upstream, and compared case by case.
`make parity` does so and writes this page; with `PYG_SOURCE=...` and
`DGL_SOURCE=...` it takes git directories of upstream instead of cloning them,
and runs the tests of the tag of the installed version, or of the newest one before it.

<!-- not run: it takes an hour -->
```sh no-run
make parity PYG_SOURCE=~/pytorch_geometric PARITY_ARGS="--parts test/nn/conv --examples"
```

`--stand-ins` has PyG's examples train on small random graphs in place of their data sets,
`--epochs N` for so many epochs at most, and `--sampler` gives PyG our sampler without fastgraph,
too, as examples that need one end there otherwise. What is not run keeps what was found of it.

A case has the same random seed both times. Timeouts and crashes are outcomes, too, and an
interrupted run goes on where it ended. Of examples the printed text is compared, without times.
A case that passes without fastgraph and not with it must be in `tests/parity/exceptions.toml`,
with the versions for which that holds and the reason, or `make parity` fails.
"""


def rendered(found: Mapping[str, Any]) -> str:
    """The page, in Markdown.

    Args:
        found: by suite, what ``python -m tests.parity run`` has left.
    """
    parts = [_INTRODUCTION]
    for name, entry in found.items():
        parts.append(_section(SUITES[name].title, entry))
    return "\n".join(parts)


def _section(title: str, entry: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in entry["versions"].items())
    differing = [*entry["tests"]["differences"], *entry["examples"]["differences"]]
    worse = [d for d in map(_difference, differing) if d.is_worse]
    better = [d for d in map(_difference, differing) if not d.is_worse]
    lines = [f"## {title}", "", f"Sources of the tag `{entry['tag']}`; {versions}.", ""]
    lines += _counts("tests", entry["tests"]["parts"])
    if entry["examples"]["parts"]:
        lines += _counts("examples", entry["examples"]["parts"])
        if options := entry["examples"].get("options"):
            lines += [f"Examples ran with `{' '.join(options)}`.", ""]
    lines += [_verdict(worse, better), ""]
    if worse:
        lines += ["| case | without | with fastgraph | reason |", "| --- | --- | --- | --- |"]
        lines += [*(_row(d) for d in worse), ""]
    if better:
        lines += ["| no worse | without | with fastgraph |", "| ---: | --- | --- |"]
        lines += [*_changes(better), ""]
    return "\n".join(lines)


def _difference(entry: Mapping[str, Any]) -> Difference:
    return Difference(
        entry["case"], tuple(entry["plain"]), tuple(entry["fastgraph"]), entry["reason"]
    )


def _counts(kind: str, parts: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [f"| {kind} | pass without | pass with | rate with | other outcomes with |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    for part in parts:
        plain, ours = part["plain"], part["fastgraph"]
        run = sum(ours.values()) - ours.get("skipped", 0)
        others = ", ".join(f"{n} {o}" for o, n in ours.items() if o != "passed")
        passed = ours.get("passed", 0)
        rate = f"{passed / run:.1%}" if run else ""
        lines.append(
            f"| {part['name']} | {plain.get('passed', 0):,} | {passed:,} | {rate} | {others} |"
        )
    return [*lines, ""]


def _verdict(worse: Sequence[Difference], better: Sequence[Difference]) -> str:
    if not worse and not better:
        return "No case ends in another way."
    explained = sum(bool(d.reason) for d in worse)
    return (
        f"{len(worse)} cases end worse with fastgraph, {explained} of them for a known reason; "
        f"{len(better)} end in another way that is no worse."
    )


def _changes(better: Sequence[Difference]) -> list[str]:
    """Numbers of cases by how they end without and with fastgraph."""
    ends = Counter((_ended(*d.plain), _ended(*d.fastgraph)) for d in better)
    return [f"| {n} | {before} | {after} |" for (before, after), n in ends.most_common()]


def _row(d: Difference) -> str:
    cells = [f"`{d.case}`", _ended(*d.plain), _ended(*d.fastgraph), d.reason]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _ended(outcome: str, why: str) -> str:
    short = why if len(why) <= 100 else f"{why[:97]}..."
    return f"{outcome}: `{short.replace('`', chr(39))}`" if short else outcome
