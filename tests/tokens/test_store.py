"""Stores of local nodes: shards, what is resumed after a kill, and what is refused."""

from __future__ import annotations

import errno
import functools
import json
import os
import pickle
import random
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgraph import manifest
from fastgraph.tokens import (
    HopFeatures,
    TokenStore,
    local_nodes,
    open_graph,
    write_context,
    write_graph,
    write_tokens,
    writing,
)
from fastgraph.tokens.graph_files import graph_of_edges

NODES, K = 203, 7


def edges() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 180, (2, 700), generator=generator)


def write(folder: Path, **options: Any) -> Path:
    return write_tokens(edges(), folder, K, **{"num_nodes": NODES, "block_rows": 10, **options})


@pytest.fixture(scope="module")
def expected() -> Tensor:
    return local_nodes(edges(), K, num_nodes=NODES)


@pytest.mark.parametrize("shards", [1, 3, 16])
def test_shards_hold_the_rows_of_one(tmp_path, expected, shards) -> None:
    for shard in random.Random(0).sample(range(1, shards + 1), shards):
        write(tmp_path / "s", shard=shard, shards=shards, block_rows=None if shard == 1 else 10)
    store = TokenStore(tmp_path / "s", verify=True)
    assert (store.num_nodes, store.k, store.seed, store.nodes) == (NODES, K, 0, None)
    assert len(store) == NODES
    some = torch.tensor([202, 0, 0, 77, 5, 150])
    assert torch.equal(store.lookup(some), expected[some])
    assert torch.equal(store.lookup(torch.arange(NODES, dtype=torch.int32)), expected)
    assert store.lookup(some[:0]).shape == (0, K)
    one = write(tmp_path / "one").parent
    assert store.sha256() == TokenStore(one).sha256()
    assert store.counts == TokenStore(one).counts
    again = pickle.loads(pickle.dumps(store))
    assert torch.equal(again.lookup(some), expected[some])
    assert "rows=203" in repr(again)


def test_counts_are_those_of_python(tmp_path) -> None:
    degree = torch.bincount(edges()[1], minlength=NODES)
    two_hops = torch.zeros(NODES, dtype=torch.int64).index_add_(0, edges()[1], degree[edges()[0]])
    store = TokenStore(write(tmp_path / "s", hub_cap=None).parent)
    assert store.counts["candidates"] == int(degree.sum() + two_hops.sum())
    assert store.counts["none"] >= NODES - 180
    assert store.counts["thinned"] == 0
    capped = TokenStore(write(tmp_path / "t", hub_cap=4).parent)
    assert capped.counts["thinned"] == int((degree > 4).sum())
    assert capped.counts["candidates"] < store.counts["candidates"]


@pytest.mark.parametrize("form", ["ids", "mask"])
@pytest.mark.parametrize("shards", [1, 3])
def test_some_nodes_have_rows(tmp_path, expected, shards, form) -> None:
    ids = torch.tensor([150, 3, 77, 3, 202])
    chosen = (
        ids if form == "ids" else torch.zeros(NODES, dtype=torch.bool).index_fill_(0, ids, True)
    )
    for shard in range(1, shards + 1):
        write(tmp_path / "s", nodes=chosen, shard=shard, shards=shards)
    store = TokenStore(tmp_path / "s", verify=True)
    assert store.nodes.tolist() == [3, 77, 150, 202]
    assert len(store) == 4
    assert torch.equal(store.lookup(ids), expected[ids])
    mask = torch.zeros(NODES, dtype=torch.bool).index_fill_(0, ids, True)
    assert torch.equal(store.lookup(mask), expected[mask])
    assert torch.equal(local_nodes(edges(), K, nodes=mask, num_nodes=NODES), expected[mask])
    for node in (4, 203, -1):
        with pytest.raises(IndexError, match=f"nodes holds {node}, which has no row"):
            store.lookup(torch.tensor([3, node]))


def test_no_nodes_and_more_shards_than_rows(tmp_path) -> None:
    write(tmp_path / "s", nodes=torch.empty(0, dtype=torch.int64))
    store = TokenStore(tmp_path / "s")
    assert len(store) == 0
    with pytest.raises(IndexError, match="nodes holds 0"):
        store.lookup(torch.tensor([0]))
    for shard in (1, 2, 3):
        write(tmp_path / "t", nodes=torch.tensor([9]), shard=shard, shards=3)
    assert TokenStore(tmp_path / "t", verify=True).nodes.tolist() == [9]


class _Killer:
    """Ends the process at a point of what is written."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self) -> None:
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)


def _fork() -> int:
    """As ``os.fork``; the child has one thread, as it would wait for those of its parent's pool."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
    return child


def killed(at: int, run: Callable[[], object]) -> bool:
    """True if a child was killed at one of the points before or amid what it writes."""
    child = _fork()
    if child == 0:
        try:
            point = _Killer(at)
            write_some, sync, unlink = os.write, os.fdatasync, Path.unlink

            def half(descriptor: int, content: memoryview) -> int:
                point()
                # In parts, with a point between them.
                return write_some(descriptor, content[: max(len(content) // 2, 1)])

            def half_dump(value: Any, stream: Any) -> None:
                text = json.dumps(value)
                stream.write(text[: len(text) // 2])
                stream.flush()
                point()
                stream.write(text[len(text) // 2 :])

            os.write = half
            os.fdatasync = lambda descriptor: (point(), sync(descriptor), point())[1]
            json.dump = half_dump
            Path.unlink = lambda path, **options: (point(), unlink(path, **options))[1]
            run()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize(
    "attempts", [range(3), pytest.param(range(3, 50), marks=pytest.mark.exhaustive)]
)
def test_a_killed_process_is_resumed_to_the_same_bytes(tmp_path, attempts) -> None:
    options = {"nodes": torch.arange(0, NODES, 2), "hub_cap": 4}
    whole = write(tmp_path / "whole", **options)
    digest = TokenStore(tmp_path / "whole").sha256()
    rows = (whole / "rows.npy").read_bytes()
    points = random.Random(1)
    for attempt in attempts:
        folder = tmp_path / str(attempt)
        most = (3, 60, 200)[attempt % 3]
        kills = 0
        run = functools.partial(write, folder, resume=True, **options)
        while killed(points.randrange(most), run):
            kills += 1
            if not (folder / "shard-00001-of-00001" / "manifest.json").exists():
                with pytest.raises(manifest.FileFormatError):
                    TokenStore(folder)
            most += 60
        store = TokenStore(folder, verify=True)
        assert store.sha256() == digest
        assert store.counts == TokenStore(tmp_path / "whole").counts
        assert (store.folder / whole.name / "rows.npy").read_bytes() == rows
        assert {p.name for p in (folder / whole.name).iterdir()} == {
            p.name for p in whole.iterdir()
        }
        assert kills or attempt % 3  # the first points are met by all


def kill_after_blocks(folder: Path, blocks: int, **options: Any) -> Path:
    """A shard that is not finished."""
    assert killed(10**9, lambda: write(folder, progress=_stop_after(blocks), **options))
    return folder / "shard-00001-of-00001"


def _stop_after(blocks: int) -> Callable[[int, int], None]:
    return lambda done, total: os.kill(os.getpid(), signal.SIGKILL) if done >= 10 * blocks else None


def test_what_is_there_is_refused_or_resumed(tmp_path) -> None:
    shard = kill_after_blocks(tmp_path / "s", 5)
    with pytest.raises(FileExistsError, match="resume"):
        write(tmp_path / "s")
    with pytest.raises(manifest.FileFormatError, match="not finished"):
        TokenStore(tmp_path / "s")
    told: list[tuple[int, int]] = []
    write(tmp_path / "s", resume=True, progress=lambda *args: told.append(args))
    assert told[0] == (50, NODES)
    assert told[-1] == (NODES, NODES)
    rows = shard / "rows.npy"
    before = rows.stat().st_mtime_ns
    assert write(tmp_path / "s", resume=True) == shard
    assert rows.stat().st_mtime_ns == before
    good = rows.read_bytes()
    rows.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(manifest.FileFormatError, match="SHA-256"):
        write(tmp_path / "s", resume=True)
    rows.write_bytes(good)
    with pytest.raises(FileExistsError):
        write(tmp_path / "s")


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seed": 1}, "seed"),
        ({"k": K + 1}, "k"),
        ({"variant": "release"}, "variant"),
        ({"direction": "both"}, "direction"),
        ({"hub_cap": 5}, "hub_cap"),
        ({"num_nodes": NODES + 1}, "graph"),
        ({"graph": edges().flip(1)[:, :-1]}, "graph"),
        ({"nodes": torch.tensor([1])}, "nodes"),
        ({"shards": 2, "shard": 2}, "shards"),
    ],
)
def test_another_sample_is_an_error(tmp_path, change, name, finished) -> None:
    if finished:
        write(tmp_path / "s")
    else:
        kill_after_blocks(tmp_path / "s", 2)
    options = {"graph": edges(), "k": K, "num_nodes": NODES, **change}
    graph, k = options.pop("graph"), options.pop("k")
    with pytest.raises(manifest.FileFormatError, match=rf"expected {name} .* another sample"):
        write_tokens(graph, tmp_path / "s", k, resume=True, **options)


def test_files_that_are_cut_or_foreign_are_errors(tmp_path) -> None:
    shard = kill_after_blocks(tmp_path / "s", 5)
    rows, journal = shard / "rows.npy", shard / "journal.jsonl"
    good_rows, good_journal = rows.read_bytes(), journal.read_bytes()
    for bad in (good_rows[:300], good_rows[:200] + b"?" + good_rows[201:]):
        rows.write_bytes(bad)
        with pytest.raises(manifest.FileFormatError, match=r"rows\.npy: expected rows 0 to 10"):
            write(tmp_path / "s", resume=True)
    rows.write_bytes(b"?" + good_rows[1:])
    with pytest.raises(manifest.FileFormatError, match=r"rows\.npy: expected the rows of this"):
        write(tmp_path / "s", resume=True)
    rows.unlink()
    with pytest.raises(manifest.FileFormatError, match=r"rows\.npy: .* got no file"):
        write(tmp_path / "s", resume=True)
    rows.write_bytes(good_rows + b"not yet in the journal")
    journal.write_bytes(b"no json\n" + good_journal)
    with pytest.raises(manifest.FileFormatError, match=r"journal\.jsonl: expected"):
        write(tmp_path / "s", resume=True)
    for foreign_line in (b"{}\n", b"[]\n", good_journal + b'{"rows": 60}\n', good_journal + b"3\n"):
        journal.write_bytes(foreign_line)
        with pytest.raises(manifest.FileFormatError, match=r"journal\.jsonl: expected \["):
            write(tmp_path / "s", resume=True)
    journal.write_bytes(good_journal + b'{"rows": 60, "sha')
    write(tmp_path / "s", resume=True)
    whole = TokenStore(tmp_path / "s", verify=True)
    assert whole.sha256() == TokenStore(write(tmp_path / "t").parent).sha256()
    foreign = tmp_path / "u" / "shard-00001-of-00001"
    foreign.mkdir(parents=True)
    (foreign / "thesis.txt").touch()
    with pytest.raises(manifest.FileFormatError, match=r"expected a shard, got thesis\.txt"):
        write(tmp_path / "u", resume=True)


def test_a_store_that_is_not_what_was_written_is_refused(tmp_path) -> None:
    with pytest.raises(manifest.FileFormatError, match="expected a folder of shards"):
        TokenStore(tmp_path)
    first = write(tmp_path / "s", shard=1, shards=3)
    write(tmp_path / "s", shard=3, shards=3)
    with pytest.raises(manifest.FileFormatError, match="got none of number 2"):
        TokenStore(tmp_path / "s")
    write(tmp_path / "s", shard=2, shards=3)
    other = write(tmp_path / "t", shard=2, shards=3, seed=8)
    second = tmp_path / "s" / other.name
    second.rename(tmp_path / "kept")
    other.rename(second)
    with pytest.raises(manifest.FileFormatError, match="expected seed 0, got 8"):
        TokenStore(tmp_path / "s")
    second.rename(tmp_path / "other")
    (tmp_path / "kept").rename(second)
    rows = first / "rows.npy"
    good = rows.read_bytes()
    rows.write_bytes(good[:-1])
    with pytest.raises(manifest.FileFormatError, match="cut off"):
        TokenStore(tmp_path / "s")
    rows.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(manifest.FileFormatError, match="SHA-256"):
        TokenStore(tmp_path / "s", verify=True)
    rows.write_bytes(good)
    first.rename(tmp_path / "s" / "shard-00002-of-00009")
    with pytest.raises(manifest.FileFormatError, match="got number 1 of 3"):
        TokenStore(tmp_path / "s")


def test_a_full_disk_is_resumed(tmp_path, monkeypatch, expected) -> None:
    # A limit of the process is a full disk to the file: the kernel writes no more than fits.
    child = _fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            write(tmp_path / "s")
        except OSError as error:
            os._exit(7 if error.errno == errno.EFBIG and "resume" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

    def full(descriptor: int, content: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(writing.os, "write", full)
        with pytest.raises(OSError, match="No space left on device: what was written is kept"):
            write(tmp_path / "s", resume=True)
    write(tmp_path / "s", resume=True)
    assert torch.equal(TokenStore(tmp_path / "s").lookup(torch.arange(NODES)), expected)


def test_one_process_writes_a_shard(tmp_path) -> None:
    def meanwhile(done: int, total: int) -> None:
        with pytest.raises(BlockingIOError, match="another process"):
            write(tmp_path / "s", resume=True)

    write(tmp_path / "s", progress=meanwhile)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"k": 0}, ValueError, "k must be"),
        ({"shard": 0}, ValueError, "shard must be"),
        ({"shard": 4, "shards": 3}, ValueError, r"shard must be in \[1, 3\]"),
        ({"shards": 0}, ValueError, "shards must be"),
        ({"shards": "3"}, TypeError, "shards must be an int"),
        ({"block_rows": -1}, ValueError, "block_rows must be"),
        ({"block_rows": []}, TypeError, r"block_rows must be an int, got \[\]"),
        ({"resume": "no"}, TypeError, "resume: expected a bool, got 'no'"),
        ({"progress": 1}, TypeError, "progress: expected a function or None, got 1"),
        ({"nodes": torch.tensor([NODES])}, IndexError, r"nodes must be in \[0, 203\)"),
        ({"nodes": torch.tensor([-1])}, IndexError, "nodes must be in"),
        ({"nodes": torch.tensor([0.5])}, TypeError, "nodes must be int64, int32 or a mask"),
        ({"nodes": torch.ones(4, dtype=torch.bool)}, ValueError, "mask of 203 nodes, got 4"),
        ({"nodes": torch.ones(1, 1, dtype=torch.int64)}, ValueError, "one dimension"),
        ({"nodes": [1]}, TypeError, "nodes must be a tensor"),
        *(
            (
                {"graph": (torch.tensor([0, 1, 1]), torch.arange(size)), "num_nodes": None, **rows},
                ValueError,
                f"colptr must run from 0 to {size}, the number of edges, got 0 to 1",
            )
            for size in (0, 2)
            for rows in ({}, {"nodes": torch.empty(0, dtype=torch.int64)}, {"hub_cap": 1})
        ),
    ],
)
def test_bad_arguments_are_named_before_anything_is_written(tmp_path, change, error, text) -> None:
    options = {"graph": edges(), "k": K, "num_nodes": NODES, **change}
    with pytest.raises(error, match=text):
        write_tokens(options.pop("graph"), tmp_path / "s", options.pop("k"), **options)
    assert not (tmp_path / "s").exists()


def test_bad_lookups_are_named(tmp_path) -> None:
    store = TokenStore(write(tmp_path / "s").parent)
    for nodes, error in (
        ([0], TypeError),
        (None, TypeError),
        (torch.tensor([0.0]), TypeError),
        (torch.tensor([True]), ValueError),
        (torch.tensor(0), ValueError),
        (torch.tensor([203]), IndexError),
        (torch.tensor([-1]), IndexError),
    ):
        with pytest.raises(error, match="nodes"):
            store.lookup(nodes)


def test_memory_is_that_of_a_block(tmp_path) -> None:
    """Of a graph in files, whose lists and rows are each larger than what is allocated."""
    size, degree = 60_000, 40
    graph = graph_of_edges(
        torch.stack(
            [torch.randint(0, size, (size * degree,)), torch.arange(size).repeat_interleave(degree)]
        ),
        size,
        "in",
    )
    write_graph(tmp_path / "graph", graph)
    files = sum(path.stat().st_size for path in (tmp_path / "graph").iterdir())
    del graph
    read_end, write_end = os.pipe()
    child = _fork()
    if child == 0:

        def anonymous() -> int:
            lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
            return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))

        begin = anonymous()
        peak = [0]
        write_tokens(
            open_graph(tmp_path / "graph"),
            tmp_path / "s",
            100,
            nodes=torch.arange(0, size, 4),
            hub_cap=39,
            block_rows=500,
            progress=lambda done, total: peak.__setitem__(0, max(peak[0], anonymous())),
        )
        os.write(write_end, str(peak[0] - begin).encode())
        os._exit(0)
    os.waitpid(child, 0)
    kib = int(os.read(read_end, 100))
    rows = (tmp_path / "s" / "shard-00001-of-00001" / "rows.npy").stat().st_size
    assert files > 9 << 20
    assert rows > 5 << 20
    assert kib << 10 < 4 << 20


@pytest.mark.parametrize("folder", [None, 1, b"x", ["x"]])
@pytest.mark.parametrize(
    "function",
    [
        TokenStore,
        HopFeatures,
        open_graph,
        lambda folder: write_tokens(edges(), folder, K),
        lambda folder: write_context(edges(), torch.ones(NODES, 2), folder),
    ],
)
def test_what_is_no_folder_is_named(function, folder) -> None:
    with pytest.raises(TypeError, match=r"^folder: expected a path, got "):
        function(folder)


@pytest.mark.parametrize("function", [TokenStore, HopFeatures])
def test_whether_files_are_verified_is_a_bool(tmp_path, function) -> None:
    with pytest.raises(TypeError, match=r"^verify: expected a bool, got 1"):
        function(tmp_path, verify=1)
