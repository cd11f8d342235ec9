"""How much memory a process may have, and which tensors are in files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from fastgraph.machine.pages import is_elsewhere, is_of_file, usable_memory

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_the_lowest_limit_of_the_groups_is_what_may_be_used(tmp_path: Path) -> None:
    own = tmp_path / "own"
    groups = tmp_path / "cgroup"
    inner = groups / "memory" / "outer" / "inner"
    inner.mkdir(parents=True)

    def usable(text: str) -> int:
        own.write_text(text)
        return usable_memory(groups, own)

    first = "4:memory:/outer/inner\n3:cpuset:/\n"
    assert usable(first) == MACHINE
    (inner / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert usable(first) == MACHINE
    (inner / "memory.limit_in_bytes").write_text("7000\n")
    assert usable(first) == 7000
    (inner.parent / "memory.limit_in_bytes").write_text("5000\n")
    assert usable(first) == 5000
    (groups / "memory.max").write_text("3000\n")
    assert usable(first) == 5000
    assert usable("0::/unknown/here\n") == 3000  # that of the container
    (groups / "memory.max").write_text("max\n")
    assert usable("0::/\n") == MACHINE
    assert usable_memory(groups, tmp_path / "none") == MACHINE


def test_tensors_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "x.npy", np.arange(5000))
    mapped = torch.from_numpy(np.load(tmp_path / "x.npy", mmap_mode="c"))
    in_memory = torch.arange(5000)
    assert is_of_file(mapped[100:])
    assert not is_of_file(in_memory)
    assert not is_elsewhere(mapped)
    monkeypatch.setattr("fastgraph.machine.pages.usable_memory", lambda: 2 * mapped.nbytes - 2)
    assert is_elsewhere(in_memory, mapped)
    assert not is_elsewhere(in_memory)
    assert not is_elsewhere(mapped[1:])
