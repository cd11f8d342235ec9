"""Sharded graphs of DGL beside whole ones: layers, message passing, structure, examples."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fastgraph
import fastgraph.dist as fgd
from fastgraph.dist.ranks.world import WORLD
from tests.dgl import balance
from tests.dgl.distributed_cases import (
    CASES,
    LAYERS,
    LONELY,
    OF_RELATIONS,
    OTHERS,
    C,
    Case,
    D,
    H,
    K,
    own_reduction,
    several_relations,
    whole_graph,
)
from tests.dgl.graphs import dgl
from tests.dist.graphs import NUM_EDGES, PARTITIONS, graph, uneven

import dgl.function as fn  # isort: skip
import dgl.nn as dnn  # isort: skip

pytest.importorskip("pymetis")

# Of the largest value of a result or gradient: sums are taken in another order.
TOLERANCE = 1e-12

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def layouts_of(name: str) -> tuple[tuple[str, bool], ...]:
    """How nodes are laid out, and whether fastgraph is enabled."""
    if name in OTHERS:
        return (("uneven", True),)
    further = (("uneven", False),) if name in LAYERS else ()
    return (("uneven", True), ("one is empty", name in LAYERS), *further)


def outcome(case: Case, g: Any) -> list[Tensor | None]:
    """The result, then the gradients of parameters, and of features of nodes and edges."""
    torch.manual_seed(0)
    layer = case.make().double().to(g.device)
    frames = [*(g.nodes[kind].data for kind in g.ntypes)]
    frames += [g.edges[relation].data for relation in g.canonical_etypes]
    inputs = []
    for frame in frames:
        for key, x in dict(frame).items():
            if x.is_floating_point():
                frame[key] = x.detach().requires_grad_()
                inputs.append(frame[key])
    out = case.call(layer, g)
    if out.requires_grad:
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(7))
        (out * weight.to(out.device)).sum().backward()
    return [out.detach(), *(p.grad for p in layer.parameters()), *(x.grad for x in inputs)]


def difference(expected: list[Tensor | None], found: list[Tensor | None]) -> str:
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        if a is None and b is not None and not b.any():
            continue  # one process had nothing to differentiate
        if (a is None) != (b is None):
            return f"result {i}: expected {a}, found {b}"
        if a is None or b is None:
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"result {i}: {list(b.shape)} {b.dtype}, expected {list(a.shape)} {a.dtype}"
        if not a.numel():
            continue
        a, b = a.double(), b.double()
        finite = a.isfinite()
        scale = max(float(a[finite].abs().max()), 1.0) if finite.any() else 1.0
        off = float(torch.where(a == b, 0.0, a - b).abs().max()) / scale
        if not off <= TOLERANCE:
            return f"result {i} is off by {off:.1e}"
    return ""


class Found(NamedTuple):
    """The outcome of a case on this rank.

    Attributes:
        error: how far it is off, or what was raised.
        gathers: what was gathered.
        routed: layers and functions that took their route.
        planned_again: exchanges that a second call has planned.
    """

    error: str
    gathers: frozenset[str] = frozenset()
    routed: frozenset[str] = frozenset()
    planned_again: int = 0


def compared(case: Case, sharded: Any, expected: list[Tensor | None], enabled: bool) -> Found:
    fastgraph.status().reset()
    fgd.COUNTS.reset()
    with fastgraph.enabled() if enabled else nullcontext():
        try:
            results = outcome(case, sharded)
        except Exception:
            return Found(traceback.format_exc())
        gathers = frozenset(fgd.COUNTS.gathers)
        routed = frozenset(row.layer for row in fastgraph.status().rows if row.routed)
        planned = fgd.COUNTS.plans
        if case in LAYERS.values() and enabled:
            outcome(case, sharded)
        planned = fgd.COUNTS.plans - planned
    error = difference(expected, [fgd.whole(x) for x in results])
    return Found(error, gathers, routed, planned)


def compare_on_this_rank() -> dict[str, Found]:
    torch.set_default_dtype(torch.float64)
    WORLD.random = "exact"
    fastgraph.disable()
    found = {}
    for name, case in CASES.items():
        make = several_relations if name in OF_RELATIONS else whole_graph
        expected = outcome(case, make())
        for layout, enabled in layouts_of(name):
            parts = PARTITIONS[layout](WORLD.size)
            if name in OF_RELATIONS:
                parts = torch.cat([parts.flip(0)[:23], parts])  # of authors, too
            sharded = fgd.shard(make(), parts=parts)
            found[f"{name}, {layout}, {enabled}"] = compared(case, sharded, expected, enabled)
    further = {"inference first": after_inference(), "balance": of_balance()}
    return found | of_examples() | of_refusals() | further


SCRIPTS = ("gcn", "gat", "gatv2", "rgcn", "transformer", "sage")


def of_examples() -> dict[str, Found]:
    """The examples, unmodified: losses and the gradients of all steps."""
    sys.path.insert(0, str(EXAMPLES))
    import data_loading

    found = {}
    for name in SCRIPTS:
        for layout in ("uneven", "one without training"):
            runs, gathers, error = [], frozenset(), ""
            for data in (
                example_graph(),
                fgd.shard(example_graph(), parts=PARTITIONS[layout](WORLD.size)),
            ):
                data_loading.load = lambda *_, data=data: (data, 4)
                fgd.COUNTS.reset()
                try:
                    with fastgraph.enabled():
                        runs.append(trained(f"dgl_{name}.py"))
                except Exception:
                    error = traceback.format_exc()
                gathers = frozenset(fgd.COUNTS.gathers)
            error = error or off_by(*runs)
            found[f"{name}, {layout}"] = Found(error, gathers)
    return found


def after_inference() -> Found:
    """Results cached in a call without gradients serve training."""
    g = fgd.shard(whole_graph().int(), parts=uneven(WORLD.size))
    layers = [
        dnn.GraphConv(D, D, **LONELY),
        dnn.SAGEConv(D, D, "gcn"),
        dnn.EdgeConv(D, D, **LONELY),
    ]
    last = dnn.RelGraphConv(D, D, K, "basis", 2)

    def forward() -> Tensor:
        x = g.ndata["x"]
        for layer in layers:
            x = layer(g, x)
        with g.local_scope():
            g.ndata["x"] = last(g, x, g.edata["kind"])
            g.update_all(fn.copy_u("x", "m"), own_reduction)
            return g.ndata["out"]

    with fastgraph.enabled():
        with torch.inference_mode():
            before = fgd.whole(forward()).clone()
        after = forward()
        after.sum().backward()
    error = difference([before], [fgd.whole(after).detach()])
    return Found(error or ("" if last.loop_weight.grad.any() else "no gradient"))


def of_balance() -> Found:
    try:
        graphs = (fgd.shard(make(), method="even") for make in (whole_graph, several_relations))
        balance.check(*graphs)
    except Exception:
        return Found(traceback.format_exc())
    return Found("")


def several_threads(g: Any) -> None:
    torch.set_num_threads(2)
    try:
        dgl.dataloading.DataLoader(g, torch.arange(9), dgl.dataloading.NeighborSampler([2]))
    finally:
        torch.set_num_threads(1)


REFUSALS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "twice": (lambda g: fgd.shard(g), "ValueError: the graph is sharded already"),
    "a block": (
        lambda g: fgd.shard(dgl.to_block(whole_graph(), torch.arange(9))),
        "ValueError: a block is part of a mini-batch; shard the whole graph",
    ),
    "to a GPU": (
        lambda g: g.to(torch.device("cuda:0")),
        "ValueError: a sharded tensor of rank ",
    ),
    "too many rows": (
        lambda g: g.ndata.update(x=torch.zeros(3)),
        "DGLError: Expect number of features to match number of nodes",
    ),
    "nodes that are not there": (
        lambda g: dgl.ops.copy_u_sum(dgl.graph((g.edges()[0] + 99, g.edges()[1])), g.ndata["x"]),
        "DGLError: ",
    ),
    "several threads": (
        several_threads,
        "RuntimeError: DGL samples other neighbours on each rank if it has several threads",
    ),
}


def of_refusals() -> dict[str, Found]:
    sharded, found = fgd.shard(whole_graph(), parts=uneven(WORLD.size)), {}
    for name, (action, _) in REFUSALS.items():
        error = "nothing"
        try:
            action(sharded)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        found[name] = Found(error)
    return found


def example_graph() -> Any:
    data = graph()
    data.edge_type = torch.arange(NUM_EDGES) % 2
    data.val_mask, data.test_mask = ~data.train_mask, data.train_mask
    return data


def trained(script: str) -> list[Tensor]:
    """For each step the loss and all gradients."""
    record: list[Tensor] = []
    step, backward = torch.optim.Adam.step, Tensor.backward

    def recorded_step(self: Any) -> None:
        gradients = [p.grad.flatten() for group in self.param_groups for p in group["params"]]
        record.append(torch.cat(gradients).clone())
        step(self)

    def recorded_backward(self: Any) -> None:
        record.append(self.detach().view(1))
        backward(self)

    arguments, output, single = sys.argv, sys.stdout, torch.FloatTensor
    torch.FloatTensor = torch.DoubleTensor  # of which DGL makes parameters, whatever the default
    sys.argv = [script, "--epochs", "2", "--hidden-channels", "16", "--heads", "2"]
    torch.optim.Adam.step, Tensor.backward = recorded_step, recorded_backward
    try:
        with open(os.devnull, "w") as sys.stdout:
            runpy.run_path(str(EXAMPLES / script))
    finally:
        sys.argv, sys.stdout, torch.FloatTensor = arguments, output, single
        torch.optim.Adam.step, Tensor.backward = step, backward
    return record


def off_by(expected: list[Tensor], found: list[Tensor]) -> str:
    """The largest difference of a loss, or of gradients, in units of their norm."""
    if len(expected) != len(found) or len(expected) < 4:
        return f"{len(found)} records, expected {len(expected)}"
    off = [float((a - b).norm() / a.norm()) for a, b in zip(expected, found, strict=True)]
    return "" if max(off) <= TOLERANCE else f"off by {max(off):.1e}"


@pytest.fixture(scope="module")
def found(world_size: int, once_on_ranks: Any) -> list[dict[str, Found]]:
    found: list[dict[str, Found]] = once_on_ranks(compare_on_this_rank, world_size)
    return found


@pytest.mark.parametrize(
    ("name", "layout", "enabled"), [(name, *how) for name in CASES for how in layouts_of(name)]
)
def test_a_sharded_graph_gives_what_the_whole_one_does(
    found: list[dict[str, Found]], name: str, layout: str, enabled: bool
) -> None:
    case = CASES[name]
    for rank, of_rank in enumerate(found):
        result = of_rank[f"{name}, {layout}, {enabled}"]
        assert not result.error, f"rank {rank}: {result.error}"
        assert name in OTHERS or result.gathers <= case.gathers, f"rank {rank}"
        assert not result.planned_again, f"rank {rank}"
        if enabled and case.routed:
            assert case.routed in result.routed


@pytest.mark.parametrize("layout", ["uneven", "one without training"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_examples_train_as_on_one_process(
    found: list[dict[str, Found]], name: str, layout: str
) -> None:
    for rank, of_rank in enumerate(found):
        result = of_rank[f"{name}, {layout}"]
        assert not result.error, f"rank {rank}: {result.error}"
        loader = {"dgl.dataloading.DataLoader"} if name == "sage" else set()
        assert result.gathers == loader


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_says_so(found: list[dict[str, Found]], name: str) -> None:
    for of_rank in found:
        assert of_rank[name].error.startswith(REFUSALS[name][1])


def test_inference_may_come_first(found: list[dict[str, Found]]) -> None:
    for of_rank in found:
        assert not of_rank["inference first"].error


def test_ranks_that_take_longer_are_measured(found: list[dict[str, Found]]) -> None:
    for of_rank in found:
        assert not of_rank["balance"].error, of_rank["balance"].error


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = dnn.GATConv(D, C, H, attn_drop=0.3, **LONELY)
        self.second = dnn.GraphConv(H * C, 4, **LONELY)

    def forward(self, g: Any, x: Tensor) -> Tensor:
        return self.second(g, self.first(g, x).flatten(1).relu())


def test_a_model_is_validated() -> None:
    g = whole_graph()
    with pytest.raises(ValueError, match=r"loss must be given for a graph that has no single"):
        fgd.validate(Model(), g)
    g.ndata["label"], g.ndata["train_mask"] = graph().y, graph().train_mask
    found = fgd.validate(Model(), g, world_size=2, steps=2)
    assert found.ok, str(found)
    assert not found.gathers


SCRIPT = """
import dgl
import torch
import torch.nn.functional as F
from dgl.data import DGLDataset
from dgl.nn import GATConv

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)

class Own(DGLDataset):
    def process(self):
        edges = torch.arange(160) % 40, torch.arange(160) * 7 % 39
        self.graph = dgl.graph(edges, num_nodes=40)

    def __getitem__(self, index):
        return self.graph

    def __len__(self):
        return 1


u, v = Own("own", raw_dir=".")[0].edges()
g = dgl.add_self_loop(dgl.graph((torch.randint(0, 40, (160,)), torch.randint(0, 40, (160,)))))
g = dgl.add_edges(g, u, v)
g.ndata["x"], g.ndata["y"] = torch.randn(40, 6), torch.randint(0, 3, (40,))
mask = torch.arange(40) % 3 == 0
print(g)
conv = GATConv(6, 3, 2, attn_drop=0.3).double()
optimizer = torch.optim.Adam(conv.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    out = F.dropout(conv(g, g.ndata["x"]).mean(1), 0.2)
    loss = F.cross_entropy(out[mask], g.ndata["y"][mask])
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.10f}")
torch.save(g, "graph.pt")
print(torch.load("graph.pt", weights_only=False))
print(type(u).__name__, type(g.ndata["x"]).__name__)
"""


def run(folder: Path, *words: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "gathered" not in done.stderr
    return done.stdout.splitlines()


def test_a_script_prints_the_same(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    start = "import fastgraph.dgl, runpy; fastgraph.dgl.fix_import(); runpy.run_path('script.py')"
    options = ("--partition", "even", "--min-nodes", "10", "--random", "exact", "--check")
    of_ranks = run(tmp_path, "-m", "fastgraph.dist", "--nproc-per-node", "2", *options, "script.py")
    *expected, kind = run(tmp_path, "-c", start)
    assert of_ranks == [*expected, "ShardedTensor ShardedTensor"]
    assert kind == "Tensor Tensor"
