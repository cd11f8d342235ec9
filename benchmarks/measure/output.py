"""Where results are written and shown."""

from __future__ import annotations

import itertools
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

RESULTS = Path(__file__).parent.parent / "results"


def write(folder: Path, name: str, results: dict[str, Any], text: str) -> Path:
    """Write ``<date>-<name>.json`` and ``.md``; return the latter's path."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_to(folder / f"{_today()}-{name}", results, text)


def publish(console: Console, folder: Path, name: str, results: dict[str, Any], text: str) -> None:
    """The same, shown as well."""
    path = write(folder, name, results, text)
    console.print(Markdown(text))
    console.print(f"written to {path}")


def machine_table(facts: dict[str, Any]) -> list[str]:
    """The lines of a table in Markdown of what is known of the machine."""
    rows = (f"| {name} | {value} |" for name, value in facts.items())
    return ["| machine |  |", "| --- | ---: |", *rows]


def write_to(stem: Path, results: dict[str, Any], text: str) -> Path:
    """Write ``<stem>.json`` and ``.md``; return the latter's path."""
    Path(f"{stem}.json").write_text(json.dumps(results, indent=1) + "\n")
    path = Path(f"{stem}.md")
    path.write_text(text.rstrip() + "\n")
    return path


def _today() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d}"


class Record:
    """The results of a run so far, each line in the file as soon as it is known."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    @classmethod
    def fresh(cls, folder: Path, name: str) -> Record:
        """One that no earlier run has begun: ``<date>-<name>.jsonl``, with a number if it must."""
        stem = f"{_today()}-{name}"
        stems = itertools.chain([stem], (f"{stem}-{n}" for n in itertools.count(2)))
        return cls(next(path for s in stems if not (path := folder / f"{s}.jsonl").exists()))

    @property
    def stem(self) -> Path:
        """The path without the suffix, for what is made of the record."""
        return self.path.with_suffix("")

    def add(self, kind: str, value: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({kind: value}) + "\n")

    def mend(self) -> None:
        """Drop what a run that was killed has left of a line."""
        if self.path.exists():
            whole, _, _ = self.path.read_text().rpartition("\n")
            self.path.write_text(whole + "\n" if whole else "")

    def lines(self, kind: str) -> list[Any]:
        """All values of a kind, from this run and those that it continues."""
        if not self.path.exists():
            return []
        read = (json.loads(line) for line in self.path.read_text().splitlines())
        return [line[kind] for line in read if kind in line]
