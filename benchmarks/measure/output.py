"""Where results are written."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "results"


def write(folder: Path, name: str, results: dict[str, Any], text: str) -> Path:
    """Write ``<date>-<name>.json`` and ``.md``; return the latter's path."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{datetime.now(UTC):%Y-%m-%d}-{name}"
    (folder / f"{stem}.json").write_text(json.dumps(results, indent=1) + "\n")
    path = folder / f"{stem}.md"
    path.write_text(text.rstrip() + "\n")
    return path
