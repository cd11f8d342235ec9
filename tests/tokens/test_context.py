"""Context features in files, beside the operator on the whole graph, and what is refused."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fastgraph import ops
from fastgraph.manifest import FileFormatError
from fastgraph.tokens import HopFeatures, NeighborLists, context, write_context
from fastgraph.tokens.byte_counts import byte_count
from fastgraph.tokens.context import _ROW_BYTES, _Plan

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def edges_of(name: str) -> tuple[Tensor, int]:
    generator = torch.Generator().manual_seed(11)

    def drawn(high: int, size: int) -> Tensor:
        return torch.randint(0, high, (size,), generator=generator)

    if name == "one node":
        return torch.zeros(2, 3, dtype=torch.int64), 1
    if name == "no edges":
        return torch.zeros(2, 0, dtype=torch.int64), 7
    if name == "hubs":  # rows that kernels cut, loops in them, duplicates, isolated nodes
        hub = torch.stack([drawn(200, 9000), drawn(2, 9000) * 60])
        return torch.cat([hub, torch.arange(90).expand(2, -1), drawn(220, 800).view(2, -1)], 1), 240
    return drawn(100, 1600).view(2, -1), 100


def lists_of(edge_index: Tensor, num_nodes: int) -> NeighborLists:
    order = edge_index[1].argsort(stable=True)
    ptr = torch.zeros(num_nodes + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(edge_index[1], minlength=num_nodes), 0, out=ptr[1:])
    return NeighborLists(ptr, edge_index[0][order])


def of_gcn(x: Tensor, edge_index: Tensor, hops: int) -> Tensor:
    parts = [x]
    for _ in range(hops):
        parts.append(ops.gcn(parts[-1], edge_index))
    return torch.stack(parts, dim=1)


def least_memory(lists: NeighborLists, shape: tuple[int, int, int], dtype: torch.dtype) -> int:
    with pytest.raises(ValueError, match="memory must be at least") as error:
        _Plan.within(0, lists, shape, dtype)
    return int(str(error.value).split("at least ")[1].split(" ")[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["one node", "no edges", "hubs", "random"])
def test_bits_are_those_of_gcn(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    edge_index, num_nodes = edges_of(name)
    ptr, index = lists_of(edge_index, num_nodes)
    for hops, channels in ((1, 1), (2, 3), (3, 2)):
        x = torch.randn(num_nodes, channels)
        expected = of_gcn(x.to(dtype), edge_index, hops)
        least = least_memory(NeighborLists(ptr, index), (num_nodes, hops + 1, channels), dtype)
        one_more = 2 * num_nodes * dtype.itemsize + num_nodes * _ROW_BYTES
        for number, memory in enumerate(("1GiB", least, least + one_more)):
            lists = (ptr, index) if number else (ptr.int(), index.int())
            found = write_context(
                lists,
                x,
                tmp_path / f"{hops}-{channels}-{number}",
                hops=hops,
                dtype=dtype,
                memory=memory,
            )
            assert torch.equal(found.rows, expected), (hops, channels, memory)


def test_float64_graph_convolution_is_near(tmp_path: Path) -> None:
    edge_index, num_nodes = edges_of("hubs")
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    dense = torch.eye(num_nodes, dtype=torch.float64)
    dense.index_put_((edge_index[1], edge_index[0]), torch.ones(1).double(), accumulate=True)
    scale = dense.sum(1).rsqrt()
    smooth = scale[:, None] * dense * scale
    x = torch.randn(num_nodes, 6)
    found = write_context(
        lists_of(edge_index, num_nodes), x, tmp_path / "context", dtype=torch.float32
    )
    torch.testing.assert_close(found.rows[:, 1].double(), smooth @ x.double(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        found.rows[:, 2].double(), smooth @ smooth @ x.double(), rtol=1e-4, atol=1e-6
    )


def test_memory_decides_how_the_work_is_cut() -> None:
    edge_index, num_nodes = edges_of("hubs")
    lists = lists_of(edge_index, num_nodes)
    shape = num_nodes, 3, 64
    least = least_memory(lists, shape, torch.float32)
    longest = int(lists[0].diff().max()) + 1
    assert _Plan.within(least, lists, shape, torch.float32) == _Plan(1, longest)
    wide = _Plan.within(1 << 30, lists, shape, torch.float32)
    assert wide.channels == 64
    assert wide.entries > longest
    for memory in range(least, least + 200_000, 9973):
        plan = _Plan.within(memory, lists, shape, torch.float32)
        panels = 2 * num_nodes * plan.channels * 4
        assert panels + 4 * num_nodes + 64 * plan.entries <= memory
        narrower = _Plan.within(memory + 1, lists, shape, torch.float32).channels
        assert plan.channels <= narrower


def test_mapped_features_and_another_process(tmp_path: Path) -> None:
    edge_index, num_nodes = edges_of("random")
    x = torch.randn(num_nodes, 8, dtype=torch.float64)
    np.save(tmp_path / "x.npy", x.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    found = write_context(lists_of(edge_index, num_nodes), mapped, tmp_path / "context")
    assert torch.equal(found.rows, of_gcn(x.bfloat16(), edge_index, 2))
    assert torch.equal(write_context(edge_index, x, tmp_path / "of_edges").rows, found.rows)
    assert (found.num_nodes, found.hops, found.channels) == (num_nodes, 2, 8)
    pickled = pickle.dumps(found)
    assert len(pickled) < 1000
    again = pickle.loads(pickled)
    assert torch.equal(again.rows, found.rows)
    before = found.rows[0].clone()
    again.rows[0] = 7  # no edit reaches the file
    assert torch.equal(HopFeatures(tmp_path / "context", verify=True).rows[0], before)


def test_nan_pass_and_are_counted(tmp_path: Path) -> None:
    edge_index, num_nodes = edges_of("random")
    x = torch.randn(num_nodes, 3)
    x[4, 1] = x[9, 2] = torch.nan
    with pytest.warns(UserWarning, match="features hold 2 NaN"):
        found = write_context(lists_of(edge_index, num_nodes), x, tmp_path / "context")
    assert found.num_nan == 2
    expected = of_gcn(x.bfloat16(), edge_index, 2)
    assert torch.equal(found.rows.isnan(), expected.isnan())
    assert not bool(found.rows[:, :, 0].isnan().any())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clean = write_context(lists_of(edge_index, num_nodes), x.nan_to_num(), tmp_path / "clean")
    assert clean.num_nan == 0


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    edge_index, num_nodes = edges_of("random")
    ptr, index = lists_of(edge_index, num_nodes)
    x = torch.randn(num_nodes, 3)

    def refused(
        error: type[Exception], message: str, lists: object, features: object = x, **options: object
    ) -> None:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        with pytest.raises(error, match=message):
            write_context(lists, features, folder, **options)  # type: ignore[arg-type]
        assert not (folder / "manifest.json").exists()

    for features in (x[1:], torch.cat([x, x]), x[:, 0], x[:, :0]):
        refused(ValueError, r"features must have shape \[100, channels\]", (ptr, index), features)
    refused(TypeError, "features must be floating", (ptr, index), x.int())
    for other in (None, x.tolist(), "x"):
        for graph in ((ptr, index), edge_index):
            refused(TypeError, "features must be a tensor or an array", graph, other)
    refused(TypeError, "features must be a dense tensor", (ptr, index), x.to_sparse())
    refused(TypeError, "this machine's byte order", (ptr, index), x.numpy().astype(">f4"))
    refused(ValueError, "graph must have at least one node", (ptr[:1], index[:0]), x[:0])
    refused(TypeError, "ptr must be int32 or int64", (ptr.float(), index))
    refused(TypeError, "must be int32 or int64", (ptr, index.float()))
    refused(TypeError, "graph must be", "graph")
    refused(IndexError, r"edge_index must hold nodes in \[0, 90\)", edge_index, x[:90])
    refused(ValueError, "colptr must run from 0 to 799", (ptr, index[1:]))
    falls = ptr.clone()
    falls[7] = falls[8] + 1
    refused(ValueError, "ptr must not fall, got .* at position 8", (falls, index))
    for bad in (-1, num_nodes):
        wrong = index.clone()
        wrong[-3] = bad
        refused(IndexError, f"row holds {bad} at position 797, expected 0 <=", (ptr, wrong))
    for hops in (0, -1, 1.5, True, 2**31):
        refused(ValueError, "hops must be an int of at least 1", (ptr, index), hops=hops)
    refused(TypeError, "resume: expected a bool, got 0", (ptr, index), resume=0)
    refused(TypeError, "progress: expected a function", (ptr, index), progress="x")
    refused(TypeError, "dtype must be one of", (ptr, index), dtype=torch.float64)
    refused(ValueError, "memory must be at least", (ptr, index), memory=1000)
    refused(ValueError, "memory must be as", (ptr, index), memory="2GB")


def test_files_that_are_not_what_was_written(tmp_path: Path) -> None:
    edge_index, num_nodes = edges_of("random")
    lists, x = lists_of(edge_index, num_nodes), torch.randn(num_nodes, 3)
    folder = tmp_path / "context"
    folder.mkdir()
    (folder / "rows.bin").write_bytes(b"begun")  # and not finished
    with pytest.raises(FileFormatError, match="none in it"):
        HopFeatures(folder)
    with pytest.raises(FileExistsError, match=r"got rows\.bin in it: resume"):
        write_context(lists, x, folder)
    write_context(lists, x, folder, resume=True)
    with pytest.raises(FileExistsError, match="or leaves it if it is whole"):
        write_context(lists, x, folder)
    whole = (folder / "rows.bin").read_bytes()
    before = (folder / "rows.bin").stat().st_mtime_ns
    write_context(lists, x, folder, resume=True)
    assert (folder / "rows.bin").stat().st_mtime_ns == before
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").touch()
    with pytest.raises(FileFormatError, match=r"expected features, got thesis\.txt"):
        write_context(lists, x, foreign, resume=True)
    (folder / "rows.bin").write_bytes(whole[:-1])
    with pytest.raises(FileFormatError, match="cut off"):
        HopFeatures(folder)
    (folder / "rows.bin").write_bytes(whole + b"x")
    with pytest.raises(FileFormatError, match="another file"):
        HopFeatures(folder)
    (folder / "rows.bin").write_bytes(b"x" + whole[1:])
    with pytest.raises(FileFormatError, match="SHA-256"):
        HopFeatures(folder, verify=True)
    with pytest.raises(FileFormatError, match="SHA-256"):
        write_context(lists, x, folder, resume=True)
    manifest = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(manifest.replace("hop features", "tokens"))
    with pytest.raises(FileFormatError, match="expected the format 'fastgraph hop features'"):
        HopFeatures(folder)


def test_full_disks_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is computed; mapped memory that has no file ends the process."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    edge_index, num_nodes = edges_of("random")
    lists, x = lists_of(edge_index, num_nodes), torch.randn(num_nodes, 3)
    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        with pytest.raises(OSError, match="No space left on device: expected 1800 bytes"):
            write_context(lists, x, tmp_path / "context")
    assert not list((tmp_path / "context").iterdir())  # of what did not fit
    found = write_context(lists, x, tmp_path / "context")
    assert torch.equal(found.rows, of_gcn(x.bfloat16(), edge_index, 2))


class _KilledError(BaseException):
    """Ends the work as a signal would: nothing of ours catches it."""


def cut_down(folder: Path, lists: NeighborLists, x: Tensor, memory: int, blocks: int) -> None:
    """Features of which the first blocks are computed; beyond the journal there is noise."""
    calls = 0

    def stop(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == blocks:
            raise _KilledError

    with pytest.raises(_KilledError):
        write_context(lists, x, folder, memory=memory, resume=True, progress=stop)
    with (folder / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"channel": 0, "part"')


def test_what_was_begun_is_resumed_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "_BLOCK_ROWS", 64)
    monkeypatch.setattr(context, "_SYNCED_BYTES", 1)
    edge_index, num_nodes = edges_of("hubs")
    lists, x = lists_of(edge_index, num_nodes), torch.randn(num_nodes, 3)
    x[5, 2] = torch.nan
    memory = least_memory(lists, (num_nodes, 3, 3), torch.bfloat16)  # one channel at a time
    told: list[tuple[int, int]] = []
    with pytest.warns(UserWarning, match="hold 1 NaN"):
        whole = write_context(
            lists, x, tmp_path / "whole", memory=memory, progress=lambda *args: told.append(args)
        )
    assert len(told) == 3 * 3 * 4
    assert told[-1] == (9 * num_nodes, 9 * num_nodes)
    assert torch.equal(whole.rows.nan_to_num(), of_gcn(x.bfloat16(), edge_index, 2).nan_to_num())
    for number, blocks in enumerate(((2,), (11, 13), (36,))):
        folder = tmp_path / str(number)
        for count in blocks:
            cut_down(folder, lists, x, memory, count)
            with pytest.raises(FileFormatError, match="none in it"):
                HopFeatures(folder)
        # What is beyond the journal is computed anew, whatever there is.
        with pytest.warns(UserWarning, match="hold 1 NaN"):
            again = write_context(lists, x, folder, memory="1GiB", resume=True)
        assert again.num_nan == 1
        assert (folder / "rows.bin").read_bytes() == (tmp_path / "whole" / "rows.bin").read_bytes()
        assert {path.name for path in folder.iterdir()} == {"rows.bin", "manifest.json"}


def test_what_was_begun_of_something_else_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "_BLOCK_ROWS", 64)
    edge_index, num_nodes = edges_of("hubs")
    lists, x = lists_of(edge_index, num_nodes), torch.randn(num_nodes, 3)
    write_context(lists, x, tmp_path / "whole")
    memory = least_memory(lists, (num_nodes, 3, 3), torch.bfloat16)
    cut_down(tmp_path / "begun", lists, x, 1 << 30, 2)
    other_graph = NeighborLists(lists.ptr, lists.neighbors.flip(0))
    other = x.clone()
    other[-1, -1] += 1
    for folder in (tmp_path / "whole", tmp_path / "begun"):
        for name, graph, features, options in (
            ("graph", other_graph, x, {}),
            ("features", lists, other, {}),
            ("features", lists, x.double(), {}),
            ("hops", lists, x, {"hops": 1}),
            ("dtype", lists, x, {"dtype": torch.float16}),
            ("channels", lists, x[:, :2], {}),
        ):
            with pytest.raises(FileFormatError, match=f"expected {name} .* another graph"):
                write_context(graph, features, folder, resume=True, **options)
    with pytest.raises(ValueError, match="to go on with what was begun"):
        write_context(lists, x, tmp_path / "begun", memory=memory, resume=True)
    rows = tmp_path / "begun" / "rows.bin"
    good = rows.read_bytes()
    rows.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    with pytest.raises(FileFormatError, match="expected rows 0 to 240 as the journal has them"):
        write_context(lists, x, tmp_path / "begun", resume=True)
    rows.write_bytes(good[:-1])
    with pytest.raises(FileFormatError, match="it is cut off"):
        write_context(lists, x, tmp_path / "begun", resume=True)
    rows.write_bytes(good)
    found = write_context(lists, x, tmp_path / "begun", resume=True)
    assert torch.equal(found.rows, of_gcn(x.bfloat16(), edge_index, 2))


def test_one_process_writes_features(tmp_path: Path) -> None:
    edge_index, num_nodes = edges_of("random")
    lists, x = lists_of(edge_index, num_nodes), torch.randn(num_nodes, 3)

    def meanwhile(done: int, total: int) -> None:
        for resume in (False, True):
            with pytest.raises(BlockingIOError, match="another process is writing these features"):
                write_context(lists, x, tmp_path / "context", resume=resume)

    write_context(lists, x, tmp_path / "context", progress=meanwhile)


def test_amounts_of_memory() -> None:
    assert byte_count("cache", "2GiB") == byte_count("cache", 2 << 30) == 2 << 30
    assert byte_count("cache", " 1.5 KiB") == 1536
    assert byte_count("cache", "70B") == byte_count("cache", "70") == 70
    assert byte_count("cache", "9" * 400 + "GiB") == int("9" * 400) << 30
    for wrong in ("2GB", "-1", "GiB", "", "\N{ARABIC-INDIC DIGIT THREE}GiB"):
        with pytest.raises(ValueError, match="cache must be as"):
            byte_count("cache", wrong)
    with pytest.raises(ValueError, match="cache must be at least 0"):
        byte_count("cache", -1)
    for other in (None, True, 1.5):
        with pytest.raises(TypeError, match="cache must be a number"):
            byte_count("cache", other)
