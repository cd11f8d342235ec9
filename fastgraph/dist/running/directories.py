"""Directories that a script makes on every rank, and that only one of them finds missing."""

from __future__ import annotations

import functools
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from fastgraph.dist.hooks import PATCHES
from fastgraph.dist.world import WORLD

_SECONDS = 1.0
"""For a rank that has made a directory to say so."""


def make_directories_together() -> None:
    """Have ``os.mkdir``, and what calls it, succeed where another rank was first.

    A rank that makes a directory says so in the store by which ranks have found each other. One
    that finds the directory there looks whether it was made by its own call on another rank: the
    first of the calls for this path, the second, ... Where it was there before it is an error on
    all of them. No rank waits for another one's call, which may not come.
    """
    if WORLD.size > 1:
        store = dist.distributed_c10d._get_default_store()
        PATCHES.replace(os, "mkdir", _together(os.mkdir, PrefixStore("directories", store)))


def _together(mkdir: Callable[..., None], store: Store) -> Callable[..., None]:
    calls: Counter[str] = Counter()

    @functools.wraps(mkdir)
    def make(path: Any, *args: Any, **kwargs: Any) -> None:
        if "dir_fd" in kwargs or WORLD.is_forked:
            return mkdir(path, *args, **kwargs)
        name = os.path.realpath(os.fsdecode(path))
        key = f"{calls[name]} {name}"
        try:
            mkdir(path, *args, **kwargs)
        except FileExistsError:
            if not _is_said(store, key):
                raise
        else:
            store.set(key, "made")
        calls[name] += 1

    return make


def _is_said(store: Store, key: str) -> bool:
    until = time.monotonic() + _SECONDS
    while not store.check([key]):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True
