"""Measurements that are kept between runs, in the cache directory.

As JSON, of numbers alone. What fits them (estimators of scikit-learn) can only be kept as a pickle,
which executes what it says when it is loaded, and belongs to one version of the library; fitting
some dozens of measurements again takes less than a second.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import platformdirs

_LOGGER = logging.getLogger(__name__)

_FORMAT = 1
"""Of the files, and of what the numbers mean: a change of either makes old files unknown."""


def path_of(kind: str, identity: str) -> Path:
    """Where the measurements of this kind are, by everything on which they depend."""
    digest = hashlib.sha256(f"{_FORMAT} {identity}".encode()).hexdigest()[:24]
    return platformdirs.user_cache_path("fastgraph") / kind / f"{digest}.json"


def read(kind: str, identity: str) -> Any:
    """What was kept, or ``None`` where there is nothing, or nothing that can be used."""
    try:
        found = json.loads(path_of(kind, identity).read_bytes())
        if found["format"] != _FORMAT or found["identity"] != identity:
            return None
        return found["measurements"]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def write(kind: str, identity: str, measurements: Any) -> None:
    """Keep measurements, where that is possible; readers see all of them, or the ones before."""
    path = path_of(kind, identity)
    content = {"format": _FORMAT, "identity": identity, "measurements": measurements}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
        with os.fdopen(handle, "w") as file:
            json.dump(content, file)
        os.replace(temporary, path)
    except OSError as error:
        _LOGGER.info("no measurements can be kept as %s: %s", path, error)
