"""``python -m fastgraph tokens``."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from fastgraph.cli.main import main
from fastgraph.cli.tokens import shards_of
from fastgraph.tokens import TokenStore, local_nodes, write_graph
from fastgraph.tokens.graph_files import graph_of_edges
from tests.cli.commands import environment, python

EDGES = torch.randint(0, 40, (2, 90), generator=torch.Generator().manual_seed(0))


def run(*arguments: object) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["tokens", *map(str, arguments)])
    assert ended.value.code == 0


def failing(capsys, *arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["tokens", *map(str, arguments)])
    assert ended.value.code not in (0, None)
    return " ".join(capsys.readouterr().err.split())


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    write_graph(tmp_path / "graph", graph_of_edges(EDGES, 44))
    return tmp_path / "graph"


def test_a_folder_of_lists_becomes_a_store(tmp_path, graph, capsys) -> None:
    run(graph, tmp_path / "s", "--k", 9, "--seed", 4, "--direction", "both", "--hub-cap", 5)
    store = TokenStore(tmp_path / "s", verify=True)
    rows = local_nodes(EDGES, 9, num_nodes=44, seed=4, direction="both", hub_cap=5)
    assert torch.equal(store.lookup(torch.arange(44)), rows)
    said = capsys.readouterr().out
    assert "44 rows of 9" in said
    assert f"{store.counts['thinned']} lists thinned to 5" in said
    assert "resume" in failing(capsys, graph, tmp_path / "s", "-k", 9)
    assert "expected seed 0, got 4" in failing(
        capsys, graph, tmp_path / "s", "-k", 9, "--resume", "--direction", "both", "--hub-cap", 5
    )


def test_shards_of_some_nodes_by_ranks(tmp_path, graph, monkeypatch) -> None:
    mask = np.arange(44) % 3 == 0
    np.save(tmp_path / "nodes.npy", mask)
    options = (graph, tmp_path / "s", "-k", 9, "--nodes", tmp_path / "nodes.npy")
    run(*options, "--shard", "2/3")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        run(*options, "--shard", 3, "--resume")
    store = TokenStore(tmp_path / "s")
    assert store.nodes.tolist() == mask.nonzero()[0].tolist()
    assert torch.equal(
        store.lookup(store.nodes), local_nodes(EDGES, 9, nodes=store.nodes, num_nodes=44)
    )


def test_ranks_of_torchrun_share_shards(tmp_path, graph) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = ["-m", "fastgraph", "tokens", graph, tmp_path / "s", "-k", "9", "--shard", "5"]
    ended = python(*launcher, *map(str, program), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    store = TokenStore(tmp_path / "s", verify=True)
    assert torch.equal(store.lookup(torch.arange(44)), local_nodes(EDGES, 9, num_nodes=44))


def test_a_program_that_is_killed_is_resumed(tmp_path) -> None:
    num_nodes, k = 200_000, 200  # five blocks of 32 MiB
    edges = torch.randint(0, num_nodes, (2, 2 * num_nodes))
    write_graph(tmp_path / "graph", graph_of_edges(edges, num_nodes))
    options = (tmp_path / "graph", tmp_path / "s", "-k", k)
    program = [sys.executable, "-m", "fastgraph", "tokens", *map(str, options)]
    running = subprocess.Popen(program, stderr=subprocess.DEVNULL, env=environment())
    while not list((tmp_path / "s").glob("*/journal*")) and running.poll() is None:
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    run(*options, "--resume")
    store = TokenStore(tmp_path / "s", verify=True)
    whole = local_nodes(edges, k, num_nodes=num_nodes)
    assert torch.equal(store.lookup(torch.arange(num_nodes)), whole)


def test_a_file_of_a_graph_is_sorted_first(tmp_path) -> None:
    np.savez(tmp_path / "graph.npz", edge_index=EDGES.numpy(), num_nodes=44)
    run(
        tmp_path / "graph.npz",
        tmp_path / "s",
        "-k",
        9,
        "--variant",
        "release",
        "--direction",
        "out",
    )
    rows = local_nodes(EDGES, 9, num_nodes=44, variant="release", direction="out")
    assert torch.equal(TokenStore(tmp_path / "s").lookup(torch.arange(44)), rows)


def test_errors_name_what_is_wrong(tmp_path, graph, capsys) -> None:
    out = tmp_path / "s"
    assert "--k" in failing(capsys, graph, out)
    assert "-k" in failing(capsys, graph, out, "-k", 0)
    assert "--shard" in failing(capsys, graph, out, "-k", 3, "--shard", "4/3")
    assert "does not exist" in failing(capsys, tmp_path / "none", out, "-k", 3)
    assert "got neither" in failing(capsys, tmp_path, out, "-k", 3)
    (tmp_path / "nodes.npy").write_bytes(b"no array")
    assert "--nodes" in failing(capsys, graph, out, "-k", 3, "--nodes", tmp_path / "nodes.npy")
    np.save(tmp_path / "nodes.npy", np.array([99]))
    assert "nodes must be in [0, 44)" in failing(
        capsys, graph, out, "-k", 3, "--nodes", tmp_path / "nodes.npy"
    )
    (graph / "col.npy").unlink()
    (graph / "rowptr.npy").unlink()
    assert "direction 'both' needs" in failing(capsys, graph, out, "-k", 3, "--direction", "both")


@pytest.mark.parametrize(
    ("text", "rank", "ranks", "expected"),
    [
        (None, 0, 1, ([1], 1)),
        (None, 2, 4, ([3], 4)),
        ("3/16", 0, 1, ([3], 16)),
        ("5", 0, 1, ([1, 2, 3, 4, 5], 5)),
        ("5", 1, 2, ([2, 4], 5)),
        ("1", 1, 2, ([], 1)),
    ],
)
def test_which_shards_a_process_writes(text, rank, ranks, expected) -> None:
    assert shards_of(text, rank, ranks) == expected


@pytest.mark.parametrize("text", ["0", "0/3", "4/3", "x", "1/x", "/3", "-1", "1/2/3", "3/"])
def test_what_is_no_shard(text) -> None:
    with pytest.raises(ValueError, match="must be"):
        shards_of(text, 0, 1)


def test_ranks_do_not_write_one_shard() -> None:
    with pytest.raises(ValueError, match="which 2 ranks share"):
        shards_of("1/3", 0, 2)
