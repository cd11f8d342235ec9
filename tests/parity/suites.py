"""The suites of upstream that are run, and where their sources come from."""

from __future__ import annotations

import os
import subprocess
import tarfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from packaging.version import InvalidVersion, Version


@dataclass(frozen=True)
class Suite:
    """The tests and examples of a library.

    Attributes:
        name: as the command takes it.
        title: of the library.
        distribution: by which the installed version is known.
        url: from which sources are cloned, where no path is given.
        folders: of the sources that are unpacked; the library itself is the installed one.
        parts: what is run where nothing else is said, each a file or a folder of tests.
        examples: folders whose scripts are run where ``--examples`` names none.
        paths: folders that its tests expect on python's path.
        options: of pytest, where the sources configure none.
    """

    name: str
    title: str
    distribution: str
    url: str
    folders: tuple[str, ...]
    parts: tuple[str, ...]
    examples: tuple[str, ...]
    paths: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


SUITES = {
    "pyg": Suite(
        "pyg",
        "PyG",
        "torch-geometric",
        "https://github.com/pyg-team/pytorch_geometric",
        ("test", "examples", "pyproject.toml"),
        ("test",),
        ("examples",),
    ),
    "dgl": Suite(
        "dgl",
        "DGL",
        "dgl",
        "https://github.com/dmlc/dgl",
        ("tests", "examples/pytorch", "examples/sparse"),
        ("tests/python/common", "tests/python/pytorch"),
        ("examples/sparse",),
        ("tests",),
        ("-v",),
    ),
}


def unpacked(suite: Suite, source: str | None, folder: Path) -> tuple[Path, str]:
    """The sources of the installed version, in a folder of their own.

    Args:
        suite: whose sources.
        source: a git directory, with or without a work tree; ``None`` clones.
        folder: below which they are unpacked, once.

    Returns:
        The folder, and the tag: that of the installed version, or else the newest one before it.

    Raises:
        ValueError: the source has no such tag, or is no git directory.
    """
    installed = version(suite.distribution)
    if source is None:
        clone = folder / f"{suite.name}.git"
        if not clone.exists():
            command = ["git", "clone", "--quiet", "--bare", "--filter=blob:none", suite.url]
            subprocess.run([*command, str(clone)], check=True)
        source = str(clone)
    elif (Path(source) / ".git").exists():
        source = str(Path(source) / ".git")
    tag = tag_for(installed, _git(source, "tag").split())
    target = folder / f"{suite.name}-{tag}"
    if not target.exists():
        archive = folder / f"{suite.name}-{tag}.tar"
        _git(source, "archive", f"--output={archive.resolve()}", tag, *suite.folders)
        partial = folder / f"{suite.name}-{tag}.part"
        with tarfile.open(archive) as files:
            files.extractall(partial, filter="data")
        os.replace(partial, target)
        archive.unlink()
    return target, tag


def tag_for(installed: str, tags: list[str]) -> str:
    """The tag of a version, or else the newest one before it.

    Raises:
        ValueError: there is none.
    """
    wanted = Version(Version(installed).public)
    known = {}
    for tag in tags:
        try:
            known[Version(tag)] = tag
        except InvalidVersion:  # tags of other things
            continue
    before = [v for v in known if v <= wanted and not v.is_prerelease]
    if not before:
        raise ValueError(f"the source must have a tag of {installed} or before, got {tags}")
    return known[max(before)]


def _git(directory: str, *words: str) -> str:
    done = subprocess.run(
        ["git", f"--git-dir={directory}", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ValueError(f"{directory} must be a git directory of upstream: {done.stderr.strip()}")
    return done.stdout
