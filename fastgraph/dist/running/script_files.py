"""Files that a script writes: rank 0 has the real ones, other ranks have copies of their own.

On ranks other than the first, ``open`` for writing opens a file in a folder of the rank, where
``open`` for reading and ``os.stat`` find it again. So ``logging``, CSV writers, ``numpy.save``,
``SummaryWriter`` and whatever else opens its files by Python write once, and a rank that reads what
the script has written does not wait for another rank. Files are removed and renamed, and folders
are made and removed, by rank 0 for all.

The copy of a file that was there before the program begins as it was, unless rank 0 has changed it
by the time that another rank appends to it: then it has what this program appends.

Left alone are files that are a rank's own: those of fastgraph and of torch's compilers, what
``tempfile`` names, devices, and all that is opened by a number. So is what a library opens without
Python, as HDF5 and SQLite do.
"""

from __future__ import annotations

import builtins
import bz2
import contextlib
import errno
import functools
import io
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Protocol

from fastgraph.dist.ranks.world import WORLD
from fastgraph.plugins.patching import Patches

_STANDARD = (sysconfig.get_path("stdlib") + os.sep, "<frozen")
_INSTALLED = ("site-packages", "dist-packages")

_TOOLS = ("fastgraph.", "torch._", "torch.distributed.", "torch.utils.cpp_", "triton.")
"""Modules whose files are each rank's own."""

_STANDARD_TOOLS = ("tempfile", "multiprocessing", "concurrent", "importlib", "subprocess")

_SYSTEM = ("/dev/", "/proc/", "/sys/")

_TEMPORARY = re.compile(rf"{tempfile.gettempprefix()}[a-z0-9_]{{8}}(/|$)")


Location = str | bytes | os.PathLike[str] | os.PathLike[bytes]
File = Location | int
"""A file as Python takes it: its path, or the number under which it is open."""

Entry = os.DirEntry[str]


class Scan(Protocol):
    """The entries of a folder, to go through once."""

    def __enter__(self) -> Iterator[Entry]: ...

    def __exit__(self, *_: object) -> None: ...

    def __iter__(self) -> Iterator[Entry]: ...


class ScriptFiles:
    """The files of a script on a rank that is not the first one.

    Args:
        folder: for the rank's copies, by the paths of the files that they stand for; is made.
        started: when no rank had begun with the script, in seconds since the epoch.
    """

    def __init__(self, folder: Path, started: float) -> None:
        self._folder = folder.resolve()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._removed: set[Path] = set()
        self._started = started
        # Found now: it is tried out by making and removing a file, under a lock.
        self._temporary = tempfile.gettempdir() + os.sep
        # All ranks were started in one folder, whoever has named it.
        self._common = os.path.join(os.getcwd(), "")

    def install(self, patches: Patches) -> None:
        """Replace the functions of Python that open, find, make, rename and remove files."""
        upstream = builtins.open
        opening = self._opening(upstream)
        for module in (builtins, io):
            patches.replace(module, "open", opening)
        patches.replace(bz2, "_builtin_open", opening)
        openers = getattr(sys.modules.get("numpy.lib._datasource"), "_file_openers", None)
        if openers is not None:  # of text files, which numpy keeps from its import on
            openers._file_openers[None] = opening
        for name in ("stat", "lstat", "chmod", "utime", "truncate"):
            patches.replace(os, name, self._finding(getattr(os, name)))
        for owner, name in ((os, "remove"), (os, "unlink"), (os, "rmdir"), (shutil, "rmtree")):
            patches.replace(owner, name, self._removing(getattr(owner, name)))
        for name in ("rename", "replace"):
            patches.replace(os, name, self._renaming(getattr(os, name)))
        patches.replace(os, "mkdir", self._making(os.mkdir))
        patches.replace(os, "listdir", self._listing(os.listdir))
        patches.replace(os, "scandir", self._scanning(os.scandir))
        numpy = sys.modules.get("numpy")
        if numpy is not None:  # has kept the function that opens files
            patches.replace(numpy, "savetxt", self._writing(numpy.savetxt))

    def _opening(self, upstream: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(upstream)
        def opening(file: File, mode: str = "r", *args: object, **kwargs: object) -> object:
            copy = self._copy_of(file)
            if copy is None or isinstance(file, int):
                return upstream(file, mode, *args, **kwargs)
            if set("wax+").isdisjoint(mode):
                return upstream(self._found(file, copy), mode, *args, **kwargs)
            if not _is_of_script(sys._getframe(1)):
                return upstream(file, mode, *args, **kwargs)
            self._prepare(file, copy, begins_empty=not {"w", "x"}.isdisjoint(mode))
            return upstream(copy, mode, *args, **kwargs)

        return opening

    def _writing(self, upstream: Callable[..., None]) -> Callable[..., None]:
        """A function that opens the file that is its first argument by itself."""

        @functools.wraps(upstream)
        def write(file: Location, *args: object, **kwargs: object) -> None:
            copy = self._copy_of(file)
            if copy is not None:
                self._prepare(file, copy, begins_empty=True)
            upstream(file if copy is None else copy, *args, **kwargs)

        return write

    def _prepare(self, file: Location, copy: Path, *, begins_empty: bool) -> None:
        """Make the folder of a copy, which begins with what there is of the file."""
        copy.parent.mkdir(parents=True, exist_ok=True)
        is_known = copy in self._removed or copy.exists()
        if not begins_empty and not is_known and self._was_there(file):
            shutil.copyfile(file, copy)
        self._removed.discard(copy)

    def _finding(self, upstream: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(upstream)
        def find(path: File, *args: object, **kwargs: object) -> object:
            copy = None if kwargs.get("dir_fd") is not None else self._copy_of(path)
            found = path if copy is None else self._found(path, copy)
            return upstream(found, *args, **kwargs)

        return find

    def _listing(
        self, upstream: Callable[..., Sequence[str | bytes]]
    ) -> Callable[..., Sequence[str | bytes]]:
        @functools.wraps(upstream)
        def listdir(path: File = ".") -> Sequence[str | bytes]:
            if self._folder_of(path) is None:
                return upstream(path)
            return [entry.name for entry in os.scandir(path)]

        return listdir

    def _scanning(self, upstream: Callable[..., Scan]) -> Callable[..., Scan]:
        @functools.wraps(upstream)
        def scandir(path: File = ".") -> Scan:
            folder = self._folder_of(path)
            if folder is None:
                return upstream(path)
            entries = {entry.name: entry for entry in upstream(folder)}
            with contextlib.suppress(FileNotFoundError), upstream(path) as of_first_rank:
                for entry in of_first_rank:
                    if folder / entry.name not in self._removed:
                        entries.setdefault(entry.name, entry)
            return _Entries(entries.values())

        return scandir

    def _folder_of(self, path: File) -> Path | None:
        """This rank's copy of a folder, if there is something in it that is the rank's own."""
        copy = None if isinstance(path, bytes) else self._copy_of(path)
        return None if copy is None or not copy.is_dir() else copy

    def _removing(self, upstream: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(upstream)
        def remove(path: File, *args: object, **kwargs: object) -> None:
            copy = None if kwargs.get("dir_fd") is not None else self._copy_of(path)
            if copy is None or not _is_of_script(sys._getframe(1)):
                return upstream(path, *args, **kwargs)
            self._removed.add(copy)
            if copy.is_dir():
                shutil.rmtree(copy)
            else:
                copy.unlink(missing_ok=True)

        return remove

    def _renaming(self, upstream: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(upstream)
        def rename(src: File, dst: File, *args: object, **kwargs: object) -> None:
            source, target = self._copy_of(src), self._copy_of(dst)
            if source is None or target is None or not _is_of_script(sys._getframe(1)):
                return upstream(src, dst, *args, **kwargs)
            self._removed.add(source)
            self._removed.discard(target)
            if source.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                upstream(source, target)

        return rename

    def _making(self, upstream: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(upstream)
        def mkdir(path: Location, *args: object, **kwargs: object) -> None:
            copy = None if kwargs.get("dir_fd") is not None else self._copy_of(path)
            if copy is None or not _is_of_script(sys._getframe(1)):
                return upstream(path, *args, **kwargs)
            if copy not in self._removed and self._was_there(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(path))
            self._removed.discard(copy)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.mkdir()

        return mkdir

    def _was_there(self, path: Location) -> bool:
        """True if there was such a file before the program; rank 0 may have made it just now."""
        try:
            return os.stat(path).st_ctime < self._started
        except FileNotFoundError:
            return False

    def _copy_of(self, file: File) -> Path | None:
        """The place of this rank's copy of a file, or ``None`` for files that are a rank's own."""
        if WORLD.is_alone or not isinstance(file, (str, bytes, os.PathLike)):
            return None
        path = os.path.abspath(os.fsdecode(file))
        folder, temporary = str(self._folder), self._temporary
        if path == folder or path.startswith((*_SYSTEM, folder + os.sep)):
            return None
        if path.startswith(temporary) and _TEMPORARY.match(path, len(temporary)):
            is_common = _TEMPORARY.match(self._common, len(temporary))
            if not (is_common and path.startswith(self._common)):
                return None
        return self._folder / path.lstrip(os.sep)

    def _found(self, file: File, copy: Path) -> File:
        """The copy, if the script has written or removed the file, and else the file itself."""
        return copy if copy in self._removed or copy.exists() else file


class _Entries(Iterator[Entry]):
    """Entries of a folder as ``os.scandir`` gives them."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries = iter(entries)

    def __next__(self) -> Entry:
        return next(self._entries)

    def __enter__(self) -> Iterator[Entry]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free nothing, as nothing is open."""


def _is_of_script(frame: FrameType | None) -> bool:
    """True if a call is the script's, by whatever library; False where a tool is at its own files.

    Args:
        frame: of the caller.
    """
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        file = frame.f_code.co_filename
        if name.partition(".")[0] in _STANDARD_TOOLS:
            return False
        if not file.startswith(_STANDARD) or any(part in file for part in _INSTALLED):
            return not f"{name}.".startswith(_TOOLS)
        frame = frame.f_back
    return True
