"""Graphs of DGL in files by ranks; what files of PyG's graphs have as well is in tests/dist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fastgraph
import fastgraph.dist as fgd
from fastgraph.dist.graphs.pyg import shard_as_known
from tests.dgl.distributed_cases import several_relations, whole_graph
from tests.dgl.graphs import dgl
from tests.dist.graphs import NUM_FEATURES
from tests.dist.test_shards import called, error_of

import dgl.nn as dnn  # isort: skip

pytest.importorskip("safetensors")

RANKS = 2
GRAPHS = {
    "one relation": whole_graph,
    "several relations": several_relations,
    "numbers of 32 bits": lambda: whole_graph().int(),
    "no features": lambda: dgl.graph(whole_graph().edges()),
    "names that PyG takes for others": lambda: renamed(),
}


def renamed() -> Any:
    g = whole_graph()
    g.ndata["edge_index"] = g.ndata["_index"] = g.ndata.pop("x")
    g.edata["edge_index"] = g.edata["num_nodes"] = g.edata.pop("e")
    return g


def differences(loaded: Any, sharded: Any) -> list[str]:
    """Where two sharded graphs differ."""
    found = []
    for name in ("ntypes", "canonical_etypes", "idtype", "is_unibipartite"):
        if getattr(loaded, name) != getattr(sharded, name):
            found.append(name)
    tensors = [
        {
            **{(etype, "ends"): torch.stack(g.edges(etype=etype)) for etype in g.canonical_etypes},
            **{(t, key): x for t in g.ntypes for key, x in g.nodes[t].data.items()},
            **{(t, key): x for t in g.canonical_etypes for key, x in g.edges[t].data.items()},
        }
        for g in (loaded, sharded)
    ]
    if tensors[0].keys() != tensors[1].keys():
        return [*found, f"{list(tensors[0])} for {list(tensors[1])}"]
    for name, y in tensors[1].items():
        x: Any = tensors[0][name]
        same = fgd.is_sharded(x) and x.rows.same(y.rows) and x.axis == y.axis
        if not (same and x.dtype == y.dtype and torch.equal(x.local, y.local)):
            found.append(str(name))
    return found


def losses(g: Any) -> list[float]:
    torch.manual_seed(0)
    conv = dnn.GATConv(NUM_FEATURES, 4, 2, allow_zero_in_degree=True)
    optimizer = torch.optim.Adam(conv.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(conv(g, g.ndata["x"]).flatten(1), g.ndata["kind"])
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def on_this_rank(folder: Path) -> dict[str, Any]:
    fastgraph.enable()
    found: dict[str, Any] = {}
    for name, make in GRAPHS.items():
        loaded = fgd.load_shards(folder / name)
        sharded = shard_as_known(make())  # by the partition of the former
        found[name] = differences(loaded, sharded)
        if name == "one relation":
            found["losses"] = losses(loaded), losses(sharded)
            found["gathers"] = dict(fgd.COUNTS.gathers), loaded._graph._whole
    found["by devices"] = fgd.shard(several_relations(), weights="auto").num_edges()
    found["cut"] = error_of(lambda: fgd.load_shards(folder / "cut"))
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, once_on_ranks: Any) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("shards")
    for name, make in {**GRAPHS, "cut": whole_graph}.items():
        fgd.write_shards(make(), folder / name, RANKS)
    damaged = folder / "cut" / "rank-00001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-8])
    found: list[dict[str, Any]] = once_on_ranks(on_this_rank, RANKS, folder)
    return found


@pytest.mark.parametrize("name", GRAPHS)
def test_ranks_get_what_shard_gives_them(ranks: list[dict[str, Any]], name: str) -> None:
    for of_rank in ranks:
        assert of_rank[name] == []


def test_they_train_and_gather_nothing(ranks: list[dict[str, Any]]) -> None:
    for of_rank in ranks:
        loaded, sharded = of_rank["losses"]
        assert loaded == sharded
        assert of_rank["gathers"] == ({}, None)
        assert of_rank["by devices"] == 160
        assert re.match(r"FileFormatError: .*rank-00001.* cut off", of_rank["cut"])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "graph.bin", tmp_path / "out"
    dgl.save_graphs(str(file), [several_relations()])
    assert called(str(file), "-k", "2", "--out", str(out)) == 0
    assert re.search(r"\d+ of 160 edges", capsys.readouterr().out)
    written = fgd.write_shards(several_relations(), tmp_path / "again", 2)
    for name in ("rank-00000.safetensors", "rank-00001.safetensors"):
        assert (out / name).read_bytes() == (written.folder / name).read_bytes()


def test_files_that_hold_no_single_graph(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "graph.bin", tmp_path / "out"
    g = whole_graph()
    dgl.save_graphs(str(file), [g])
    content = file.read_bytes()

    def refused(message: str) -> bool:
        return called(str(file), "-k", "2", "--out", str(out)) == 1 and (
            re.search(message, " ".join(capsys.readouterr().err.split())) is not None
        )

    dgl.save_graphs(str(file), [g, g])
    assert refused("expected a single graph without labels, got 2 with 0")
    dgl.save_graphs(str(file), [g], {"label": torch.ones(1)})
    assert refused("expected a single graph without labels, got 1 with 1")
    dgl.save_graphs(str(file), [dgl.graph(([], []), num_nodes=3)])
    assert refused("expected a graph with edges, got one of none")
    for size in (len(content) // 2, 12):
        file.write_bytes(content[:size])
        assert refused("cut off|expected what dgl.save_graphs writes")
    assert not out.exists()


def test_bad_arguments(tmp_path: Path) -> None:
    g = whole_graph()
    with pytest.raises(ValueError, match="data must be a single graph, got a batch of 2"):
        fgd.write_shards(dgl.batch([g, g]), tmp_path / "out", 2)
    with pytest.raises(ValueError, match="a block is part of a mini-batch"):
        fgd.write_shards(dgl.to_block(g), tmp_path / "out", 2)
    assert not list(tmp_path.iterdir())
