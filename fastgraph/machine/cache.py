"""Cache of facts about this machine, kept between runs: JSON files, and no pickles.

Fitted estimators, for one, could only be kept as pickles, which execute what they say when they are
loaded and belong to one version of a library; so what they were fitted to is kept instead.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import platformdirs

_LOGGER = logging.getLogger(__name__)


def path_of(kind: str, identity: str) -> Path:
    """Where content of this kind is, by everything on which it depends.

    A kind whose content comes to mean something else gets another name.
    """
    digest = hashlib.sha256(identity.encode()).hexdigest()[:24]
    return platformdirs.user_cache_path("fastgraph") / kind / f"{digest}.json"


@contextlib.contextmanager
def locked(kind: str, identity: str) -> Iterator[None]:
    """Within, no other process is here for the same; where nothing can be kept, any may be."""
    path = path_of(kind, identity).with_suffix(".lock")
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(filelock.FileLock(path))
        except OSError as error:
            _LOGGER.info("nothing can be kept in %s: %s", path.parent, error)
        yield


Json = Any  # as it is in a file, which may be of another version: None where there is none


def read(kind: str, identity: str) -> Json:
    """The cached content, or ``None`` where there is nothing, or nothing that can be used."""
    try:
        found = json.loads(path_of(kind, identity).read_bytes())
        is_whole = found["sha256"] == _digest(found["identity"], found["content"])
        return found["content"] if is_whole and found["identity"] == identity else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def write(kind: str, identity: str, content: object) -> None:
    """Keep content, where that is possible; readers see all of it, or what was there before."""
    path = path_of(kind, identity)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            temporary = Path(folder) / path.name
            kept = {"identity": identity, "content": content}
            sealed = {**kept, "sha256": _digest(identity, content)}
            temporary.write_text(json.dumps(sealed, indent=1))
            temporary.replace(path)
    except OSError as error:
        _LOGGER.info("nothing can be kept as %s: %s", path, error)


def _digest(identity: str, content: object) -> str:
    return hashlib.sha256(json.dumps([identity, content], sort_keys=True).encode()).hexdigest()
