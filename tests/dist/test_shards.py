"""Graphs in files by ranks: the same as a graph that every rank has loaded, without the whole."""

from __future__ import annotations

import functools
import importlib.util
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GCNConv

import fastgraph.dist as fgd
from fastgraph.cli.main import main
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.spawning import run_on_ranks
from fastgraph.dist.ranks.world import WORLD
from tests.dist.graphs import NUM_CLASSES, NUM_FEATURES, graph

RANKS = 2
WIDTH, NODES = 200, 60_000  # 48 MB of features


def decorated() -> Data:
    data = graph()
    data.name, data.splits = "decorated", {"a": [1, 2.5, (None, "b")]}
    data.prior = torch.arange(12.0).view(NUM_CLASSES, 3)
    return data


def typed() -> HeteroData:
    g = torch.Generator().manual_seed(0)
    data = HeteroData(year=2020)
    data["paper"].x = torch.randn(20, 5, generator=g)
    data["author"].num_nodes = 9
    edges = torch.stack([torch.randint(0, 9, (50,), generator=g), torch.arange(50) % 20])
    data["author", "writes", "paper"].edge_index = edges
    data["author", "writes", "paper"].w = torch.rand(50, generator=g)
    data["paper", "by", "author"].edge_index = edges.flip(0)
    # Joined by blanks, both would be called the same.
    data["a paper"].x, data["a"].x = data["paper"].x + 1, data["paper"].x + 2
    data["a paper", "by", "author"].edge_index = edges.flip(0)[:, :30]
    data["a", "paper by", "author"].edge_index = edges.flip(0)[:, 20:]
    return data


def large() -> Data:
    edges = torch.stack([torch.arange(NODES), (torch.arange(NODES) + 1) % NODES])
    return Data(x=torch.arange(NODES)[:, None].expand(-1, WIDTH) * 1.0, edge_index=edges)


def losses(data: Data) -> list[float]:
    torch.manual_seed(0)
    conv = GCNConv(NUM_FEATURES, NUM_CLASSES)
    optimizer = torch.optim.Adam(conv.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        out = conv(F.dropout(data.x, 0.2), data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def differences(loaded: Any, sharded: Any) -> list[str]:
    """Where two graphs differ, by stores and attributes."""
    found = []
    for a, b in zip(loaded.stores, sharded.stores, strict=True):
        if a._key != b._key or list(a.keys()) != list(b.keys()):
            return [f"{a._key}: {list(a.keys())} for {b._key}: {list(b.keys())}"]
        for key in a.keys():  # noqa: SIM118  (they iterate over values)
            x, y = a[key], b[key]
            if fgd.is_sharded(y):
                equal = fgd.is_sharded(x) and x.rows.same(y.rows) and x.axis == y.axis
                equal = equal and torch.equal(x.local, y.local) and x.dtype == y.dtype
            elif isinstance(y, torch.Tensor):
                equal = type(x) is torch.Tensor and torch.equal(x, y)
            else:
                equal = x == y
            if not equal:
                found.append(f"{a._key} {key}")
    return found


def memory(kind: str) -> int:
    """Bytes of this process that are in memory now."""
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{kind}:\s+(\d+) kB", text)[1]) * 1024  # type: ignore[index]


def returned() -> float:
    """How much of what is freed goes back to the system, although a later block is in use."""
    torch.ones(2**20)  # after which glibc by itself would keep blocks of this size
    blocks = [torch.ones(2**20) for _ in range(16)]
    before = memory("RssAnon")
    del blocks[:-1]
    return (before - memory("RssAnon")) / (15 * 4 * 2**20)


def error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def on_this_rank(folder: Path) -> dict[str, Any]:
    fgd.init()
    found: dict[str, Any] = {}
    own, mapped = memory("RssAnon"), memory("RssFile")
    data = fgd.load_shards(folder / "large")
    total = float(data.x.double().sum())
    found["own"], found["mapped"] = memory("RssAnon") - own, memory("RssFile") - mapped
    found["total"] = total
    data.x[0] = 5  # stays with the process
    found["returned"] = returned()
    whole, whole_types = decorated(), typed()
    torch.set_default_dtype(torch.float64)
    loaded = fgd.load_shards(folder / "decorated")
    loaded.x = loaded.x.double()
    whole.x = whole.x.double()
    sharded = fgd.shard(whole, parts=loaded.x.rows.owner)
    found["differences"] = differences(loaded, sharded)
    found["losses"], found["expected"] = losses(loaded), losses(sharded)
    loaded = fgd.load_shards(folder / "typed", checksums=False)
    # Authors have no tensor, but edges that live where they do; each author has one.
    authors = torch.zeros(9, dtype=torch.int64)
    authors[loaded["paper", "by", "author"].edge_index.local[1]] = WORLD.rank
    others = [loaded[name].x.rows.owner for name in ("paper", "a paper", "a")]
    others.insert(1, transport.all_reduce(authors))
    sharded = fgd.shard(whole_types, parts=torch.cat(others))
    found["differences of types"] = differences(loaded, sharded)
    for name in ("cut", "edited", "absent", "more", "kept"):
        found[name] = error_of(functools.partial(fgd.load_shards, folder / name))
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    fgd.write_shards(decorated(), folder / "decorated", RANKS, weights=[2, 1])
    fgd.write_shards(typed(), folder / "typed", RANKS)
    return folder


def test_ranks_get_what_shard_gives_them(written: Path) -> None:
    folder = written
    fgd.write_shards(large(), folder / "large", RANKS, method="even")
    for name, parts in (("cut", 2), ("edited", 2), ("absent", 2), ("more", 3)):
        fgd.write_shards(graph(), folder / name, parts, method="even")
    damaged = "rank-00001.safetensors"
    content = (folder / "cut" / damaged).read_bytes()
    (folder / "cut" / damaged).write_bytes(content[:-8])
    (folder / "edited" / damaged).write_bytes(content[:-1] + b"x")
    (folder / "absent" / damaged).unlink()
    fgd.save(folder / "checkpoint", torch.nn.Linear(2, 2)).rename(folder / "kept")
    size = 4 * WIDTH * NODES
    for rank in run_on_ranks(on_this_rank, RANKS, folder):
        assert rank["differences"] == rank["differences of types"] == []
        assert rank["losses"] == rank["expected"]
        assert rank["total"] == WIDTH * NODES * (NODES - 1) / 2
        # The own half is mapped, beside a few MB of libraries, and tables of rows are allocated.
        assert size / 2 <= rank["mapped"] < size * 0.75
        assert rank["own"] < size / 4
        assert rank["returned"] > 0.9
        assert re.match(r"FileFormatError: .*rank-00001.* cut off", rank["cut"])
        assert re.match(r"FileFormatError: .*rank-00001.* corrupt", rank["edited"])
        assert re.match(r"FileFormatError: .*rank-00001.* got none", rank["absent"])
        assert re.match("ValueError: .*expected 3 ranks.*got 2", rank["more"])
        assert re.match("FileFormatError: .*'shards of .*, got 'checkpoint of", rank["kept"])
    first = load_file(folder / "large" / "rank-00000.safetensors")["graph.x"][0]
    assert not bool(first.any())  # ranks have written to it


def test_sizes(written: Path, tmp_path: Path) -> None:
    data = graph()
    steps: list[str] = []
    found = fgd.write_shards(data, tmp_path / "out", 3, method="even", begins=steps.append)
    assert [step.split()[0] for step in steps] == ["partitioning"] + 3 * ["writing"]
    owner = fgd.partition(data.edge_index, data.num_nodes, 3, method="even")
    source, target = owner[data.edge_index]
    assert (found.cut, found.edges) == (int((source != target).sum()), data.num_edges)
    for rank, part in enumerate(found.parts):
        assert (
            list(found.between[rank])
            == torch.bincount(source[target == rank], minlength=3).tolist()
        )
        far = data.edge_index[0][(target == rank) & (source != rank)]
        assert part.nodes == int((owner == rank).sum())
        assert part.edges == int((target == rank).sum())
        assert part.halo == len(set(far.tolist()))
        assert part.bytes == (tmp_path / f"out/rank-0000{rank}.safetensors").stat().st_size


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harmed",)


def called(*words: str) -> int:
    try:
        main(["partition", *words])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.parametrize("kind", ["data", "dictionary", "npz", "hetero"])
def test_the_command(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, file = graph(), tmp_path / ("graph.npz" if kind == "npz" else "graph.pt")
    if kind == "npz":
        np.savez(file, num_nodes=60, **{key: x.numpy() for key, x in data.to_dict().items()})
    else:
        value = {"data": data, "dictionary": data.to_dict(), "hetero": typed()}[kind]
        torch.save(value, file)
    out = tmp_path / "out"
    plot = ["--plot", str(tmp_path / "parts.svg")] if kind == "data" else []
    assert called(str(file), "-k", "2", "--out", str(out), "--weights", "2,1", *plot) == 0
    text = capsys.readouterr().out
    assert not plot or (tmp_path / "parts.svg").read_text().startswith("<?xml")
    edges = 160 if kind == "hetero" else data.num_edges
    assert re.search(rf"\d+ of {edges} edges \(\d+\.\d%\) come from another rank", text)
    assert sorted(file.name for file in out.iterdir()) == [
        "manifest.json", "rank-00000.safetensors", "rank-00001.safetensors",
        "replicated.safetensors",
    ]  # fmt: skip


def test_a_graph_of_dgl_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    Path("a.bin").write_bytes(bytes.fromhex("3fa1b446f04f2edd") + bytes(8))
    assert called("a.bin", "-k", "2", "--out", "out") == 1
    assert "a.bin is a graph of DGL, which is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.pt", pickle.dumps(Harmful(), 2), "expected .npz, what dgl.save_graphs writes, or a"),
        ("a.pt", b"", "expected .npz, what dgl.save_graphs writes, or a"),
        ("a.npz", b"PK", "expected arrays of numbers as .npz"),
        ("a.npz", pickle.dumps(Harmful(), 2), "expected arrays of numbers as .npz"),
    ],
)
def test_files_that_are_no_graphs(
    name: str, content: bytes, message: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content)
    assert called(name, "-k", "2", "--out", "out") == 1
    assert message in capsys.readouterr().err
    assert os.listdir() == [name]


def test_values_that_are_no_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for value, message in (([1], "got list"), ({"x": torch.ones(2)}, "with an edge_index")):
        torch.save(value, "a.pt")
        assert called("a.pt", "-k", "2", "--out", "out") == 1
        assert message in capsys.readouterr().err
    torch.save(graph(), "a.pt")
    assert called("a.pt", "-k", "2", "--out", "out", "--weights", "x") == 2
    assert called("a.pt", "-k", "2", "--out", "out", "--weights", "1") == 1
    assert "weights must be 2 numbers" in capsys.readouterr().err
    assert os.listdir() == ["a.pt"]
    Path("out").mkdir()
    Path("out/something").touch()
    assert called("a.pt", "-k", "2", "--out", "out") == 1
    assert "folder must be a new or empty one" in capsys.readouterr().err


def test_bad_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"data must be a Data or HeteroData .* got dict"):
        fgd.write_shards({}, tmp_path / "out", 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_parts: expected an integer of at least 1, got 0"):
        fgd.write_shards(graph(), tmp_path / "out", 0)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"folder": 1}, "folder: expected a path, got 1"),
        ({"begins": "x"}, "begins: expected a function, got 'x'"),
        ({"weights": 1.0}, "weights must be 2 numbers above 0, got 1.0"),
        ({"weights": ["1", "2"]}, "weights must be 2 numbers above 0, got ['1', '2']"),
        ({"weights": [1.0, None]}, "weights must be 2 numbers above 0, got [1.0, None]"),
    ]
    for changed, message in wrong:
        given = {"data": graph(), "folder": tmp_path / "out", "num_parts": 2, **changed}
        with pytest.raises(TypeError, match=re.escape(message)):
            fgd.write_shards(**given)
    with monkeypatch.context() as patch:
        for name in (".", "..", str(tmp_path)):
            (tmp_path / "here").mkdir(exist_ok=True)
            patch.chdir(tmp_path / "here")
            with pytest.raises(ValueError, match="folder must not be where this process works"):
                fgd.write_shards(graph(), name, 2)
    (tmp_path / "here").rmdir()
    data = graph()
    data.thing = object()
    with pytest.raises(TypeError, match=r"graph.thing must be of numbers"):
        fgd.write_shards(data, tmp_path / "out", 2)
    with pytest.raises(RuntimeError, match=r"call fastgraph.dist.init\(\)"):
        fgd.load_shards(tmp_path)
    assert not list(tmp_path.iterdir())
