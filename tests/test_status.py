"""Counters and warnings of ``fastgraph.status()``: threads, forks, the user's line, compilers."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
import torch
from torch_geometric.nn import FAConv, GATConv, GCNConv, PNAConv

import fastgraph
from fastgraph.routing import status
from fastgraph.upstream import label_of
from tests.forks import python
from tests.graphs import random_edges

NODES = 6
EDGES = random_edges(NODES, NODES, 20)


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Threads take turns within a call as often as python lets them."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def in_threads(work: Callable[[], object], count: int = 4) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.usefixtures("frequent_switches")
@pytest.mark.filterwarnings("ignore::fastgraph.FallbackWarning")
def test_each_call_of_each_thread_is_counted_once() -> None:
    layers = [GATConv(4, 2, flow="target_to_source") for _ in range(4)]
    routed = GCNConv(4, 2)
    x = torch.randn(NODES, 4)

    def work() -> None:
        refused = layers.pop()
        with torch.no_grad():
            for _ in range(50):
                refused(x, EDGES)
                routed(x, EDGES)

    with fastgraph.enabled():
        in_threads(work)
    rows = {row.layer: row for row in fastgraph.status().rows}
    assert (rows["GATConv"].routed, rows["GATConv"].fell_back) == (0, 200)
    assert rows["GATConv"].reasons.total() == 200
    assert (rows["GCNConv"].routed, rows["GCNConv"].fell_back) == (200, 0)


@pytest.mark.usefixtures("frequent_switches")
def test_no_count_is_lost() -> None:
    def work() -> None:
        for _ in range(20_000):
            status.count_routed("GCNConv")

    in_threads(work)
    assert fastgraph.status().row("GCNConv").routed == 80_000


def test_asking_in_one_thread_swallows_nothing_of_another() -> None:
    with status.recording() as recorder:
        in_threads(lambda: status.count_routed("GCNConv"))
        status.count_routed("SAGEConv")
    assert [row.layer for row in recorder.rows] == ["SAGEConv"]
    assert [(row.layer, row.routed) for row in fastgraph.status().rows] == [("GCNConv", 4)]


@pytest.mark.filterwarnings("ignore::fastgraph.FallbackWarning")
def test_a_child_forked_while_another_thread_counts_can_count() -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with status._lock:
            held.set()
            done.wait(0.2)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        status.count_refused("GCNConv", "a reason")
        os._exit(0)
    done.set()
    thread.join()
    deadline = time.monotonic() + 30
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended == (child, 0)


def test_warning_points_at_the_users_line(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        """\
import torch, warnings; warnings.simplefilter("always")
from torch_geometric.nn import GATConv, MessagePassing, PNAConv
import fastgraph
fastgraph.enable()
class Own(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)  # own
    def message(self, x_j):
        return x_j.flip(0)
x, edges = torch.randn(3, 4), torch.tensor([[0, 1], [1, 2]])
PNAConv(4, 2, ["mul"], ["identity"], torch.ones(3))(x, edges)  # propagate
GATConv(4, 2, flow="target_to_source")(x, edges)  # forward
torch.nn.Sequential(GATConv(4, 2, aggr="max")).get_submodule("0")(  # nested
    x, edges)
status = fastgraph.status()
status.reset()
from fastgraph.routing import status
status._warned.clear()
Own()(x, edges)
"""
    )
    shown = python("model.py", cwd=tmp_path).stderr
    lines = [line for line in shown.splitlines() if "FallbackWarning" in line]
    assert [line.partition("model.py:")[2].partition(":")[0] for line in lines] == [
        "11",
        "12",
        "13",
        "7",
    ]


def test_frames_are_walked_only_for_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[int] = []
    monkeypatch.setattr(status, "caller_level", lambda: levels.append(1) or 1)
    monkeypatch.setattr(status, "_warned", set())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            status.count_refused("Layer", "a reason")
    assert levels == [1]


def test_compiled_calls_are_said_not_to_be_counted(tmp_path: Path) -> None:
    code = """\
import torch, fastgraph
from torch_geometric.nn import GCNConv
fastgraph.enable()
conv, x, edges = GCNConv(4, 2), torch.randn(3, 4), torch.tensor([[0, 1], [1, 2]])
print(fastgraph.status())
torch.compile(conv, backend="eager")(x, edges)
print(fastgraph.status())
"""
    shown = python("-c", code, cwd=tmp_path).stdout
    before, after = shown.split("(no calls)")[1:]
    assert status.NOT_COUNTED not in before
    assert status.NOT_COUNTED in after


class Net(torch.nn.Module):
    def __init__(self, *layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(layer(x, EDGES) for layer in self.layers)


def test_is_accelerated_looks_into_compiled_modules() -> None:
    x = torch.randn(NODES, 4)

    def compiled(module: torch.nn.Module) -> torch.nn.Module:
        return torch.compile(module, backend="eager")

    in_place = GCNConv(4, 2)
    in_place.compile(backend="eager")
    with fastgraph.enabled():
        assert fastgraph.is_accelerated(compiled(GCNConv(4, 2)), x, EDGES) == (True, [])
        assert fastgraph.is_accelerated(in_place, x, EDGES) == (True, [])
        unusual = PNAConv(4, 2, ["mul"], ["identity"], torch.ones(3))
        net = compiled(Net(compiled(GCNConv(4, 2)), unusual))
        assert fastgraph.is_accelerated(net, x) == (
            False,
            ["PNAConv: aggregation MulAggregation"],
        )
        assert fastgraph.is_accelerated(compiled(torch.nn.Linear(4, 2)), x) == (
            False,
            ["Linear runs no layer that fastgraph knows"],
        )


def test_is_accelerated_leaves_every_random_state() -> None:
    class Noisy(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand(1) + random.random() + numpy.random.rand()

    def drawn() -> tuple[float, float, float]:
        return float(torch.rand(1)), random.random(), float(numpy.random.rand())

    def seeded() -> None:
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(1)

    module, x = Noisy(), torch.randn(3)
    seeded()
    expected = drawn()
    seeded()
    with fastgraph.enabled():
        fastgraph.is_accelerated(module, x)
    assert drawn() == expected


def test_is_accelerated_of_a_layer_that_keeps_a_result() -> None:
    conv, x = FAConv(4), torch.randn(NODES, 4)
    conv(x, x, EDGES)
    kept = conv._alpha = torch.randn(NODES, requires_grad=True).exp()
    with fastgraph.enabled():
        assert fastgraph.is_accelerated(conv, x, x, EDGES) == (True, [])
    assert conv._alpha is kept


def test_is_accelerated_shares_parameters_and_leaves_their_gradients() -> None:
    addresses = []

    class Forces(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GCNConv(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            addresses.append(self.conv.lin.weight.data_ptr())
            out = self.conv(x, EDGES)
            out.sum().backward()
            return out

    module = Forces()
    with fastgraph.enabled():
        assert fastgraph.is_accelerated(module, torch.randn(6, 4)) == (True, [])
    assert addresses == [module.conv.lin.weight.data_ptr()]
    assert all(parameter.grad is None for parameter in module.parameters())


class Remembering(torch.nn.Module):
    """Changes whatever it holds, and holds what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.conv = GATConv(-1, 2)
        self.norm = torch.nn.BatchNorm1d(2)
        self.seen: list[torch.Tensor] = [torch.zeros(2)]
        self.pair = (torch.ones(2), {"calls": 0})
        self.same = {"norm": self.norm, "weight": self.norm.weight}
        self.register_buffer("steps", torch.zeros(()))
        self.conv.register_forward_hook(lambda *_: self.seen.append(torch.ones(1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.conv(x, EDGES)) + self.same["weight"]
        self.steps += 1
        self.seen[0] += 1
        self.pair[0].mul_(2)
        self.pair[1]["calls"] += 1
        self.same["latest"] = self.latest = out
        self.register_module("more", torch.nn.Linear(2, 2))
        out.sum().backward()
        return out


def test_is_accelerated_puts_back_what_a_call_changes() -> None:
    module, x = Remembering(), torch.randn(NODES, 4)
    seen, same, pair, weight = module.seen, module.same, module.pair, module.norm.weight
    steps = module.steps
    before = list(vars(module)), list(vars(module.conv)), list(module.state_dict())
    with fastgraph.enabled(min_edges=0):
        assert fastgraph.is_accelerated(module, x) == (True, [])
        assert (list(vars(module)), list(vars(module.conv)), list(module.state_dict())) == before
        assert isinstance(module.conv.lin.weight, torch.nn.UninitializedParameter)
        assert module.seen is seen and [t.tolist() for t in seen] == [[0, 0]]
        assert module.same is same and set(same) == {"norm", "weight"}
        assert module.pair is pair and pair[0].tolist() == [1, 1] and pair[1] == {"calls": 0}
        assert same["weight"] is module.norm.weight is weight and weight.grad is None
        assert module.steps is steps and steps == 0 and module.norm.num_batches_tracked == 0
        # And the module is as usable as before: a call of it counts, and trains it.
        module(x)
    assert module.steps == 1 and len(seen) == 2 and pair[1] == {"calls": 1}
    assert all(parameter.grad is not None for parameter in module.conv.parameters())


def test_is_accelerated_puts_back_after_an_error() -> None:
    module = Remembering()
    weight = module.norm.weight
    with fastgraph.enabled(min_edges=0), pytest.raises(ValueError, match="too many values"):
        fastgraph.is_accelerated(module, "no features")
    assert module.norm.weight is weight and module.same["weight"] is weight


def test_is_accelerated_of_traced_messages_and_scripted_modules() -> None:
    """A program that is kept of a message reads the parameters that are there at a call."""
    conv, x = FAConv(4), torch.randn(NODES, 4)
    scripted = torch.jit.script(torch.nn.BatchNorm1d(4))
    whole = torch.nn.Sequential(scripted)
    with fastgraph.enabled(min_edges=0):
        for _ in range(2):
            assert fastgraph.is_accelerated(conv, x, x, EDGES) == (True, [])
            conv(x, x, EDGES).sum().backward()
        fastgraph.is_accelerated(scripted, x)
        fastgraph.is_accelerated(whole, x)
    assert whole[0] is scripted and scripted.num_batches_tracked == 0
    assert all(parameter.grad is not None for parameter in conv.parameters())


def test_is_accelerated_refuses_what_is_no_module() -> None:
    with (
        fastgraph.enabled(),
        pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module, got int"),
    ):
        fastgraph.is_accelerated(3)


def test_rows_of_one_name_in_two_libraries() -> None:
    found = fastgraph.status()
    assert found.row("GATConv").routed == 0 and not found.rows  # asking makes none
    status.count_routed("dgl.GATConv")
    assert found.row("GATConv").layer == "dgl.GATConv"  # there is no other
    status.count_refused("GATConv", "a reason")
    assert (found.row("GATConv").fell_back, found.row("dgl.GATConv").routed) == (1, 1)
    assert [row.layer for row in found.rows] == ["dgl.GATConv", "GATConv"]


def test_labels_of_classes() -> None:
    def of(module: str) -> str:
        return label_of(type("GATConv", (), {"__module__": module}))

    assert of("torch_geometric.nn.conv.gat_conv") == of("models") == of("dglmodels") == "GATConv"
    assert of("dgl.nn.pytorch.conv.gatconv") == "dgl.GATConv"
