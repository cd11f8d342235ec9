"""Sharded graphs on the stand-in device, with a DGL whose C++ library knows that device.

So it is on GPUs with a DGL that was built for these: its library gets whole graphs, multiplies the
matrices of types, and samples mini-batches.
"""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastgraph
import fastgraph.dist as fgd
from fastgraph.dist.ranks.world import WORLD
from fastgraph.registry import registry
from tests import late_collectives, standin
from tests.dgl import distributed_cases, library_on_device, on_device
from tests.dgl.distributed_cases import CASES, LAYERS, OTHERS, C, Case, D, K, whole_graph
from tests.dgl.graphs import dgl
from tests.dgl.test_distributed import difference, outcome
from tests.dgl.test_distributed_device import OF_LIBRARY, OF_STAND_IN
from tests.dist.graphs import NUM_NODES, uneven
from tests.dist.on_device import MadeOnDevice

import dgl.nn as dnn  # isort: skip
from dgl.dataloading import DataLoader, NeighborSampler  # isort: skip

pytest.importorskip("pymetis")

OF_CPUS = ("both directions", "networkx", "words")
"""Cases that DGL computes on CPUs alone, or that name the device."""

MORE = {
    "matrices of types in order": Case(
        lambda: dnn.TypedLinear(D, C, 2),
        lambda layer, g: layer(
            g.ndata["x"], torch.arange(NUM_NODES, device=g.device) * 2 // NUM_NODES, True
        ),
    )
}

NAMES = [name for name in (*OTHERS, *OF_LIBRARY, *MORE) if name not in {*OF_STAND_IN, *OF_CPUS}]

ALL = {**CASES, **MORE}

ROUTED = [name for name in NAMES if name in LAYERS]

BATCHES = ("graph there", "graph on the CPU")


def on_this_rank() -> dict[str, Any]:
    on_device.install()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    WORLD.random = "exact"
    fastgraph.disable()
    expected = {name: outcome(ALL[name], whole_graph()) for name in NAMES}
    losses = trained(whole_graph(), "cpu")
    late_collectives.install()
    library_on_device.install()
    registry.DEVICE_TYPES = (*registry.DEVICE_TYPES, standin.DEVICE)  # type: ignore[assignment]
    distributed_cases.SOME = distributed_cases.SOME.to(standin.DEVICE)
    found: dict[str, Any] = {name: compared(name, expected[name]) for name in NAMES}
    called = set(library_on_device.CALLED)
    with fastgraph.enabled(backend="reference"):
        found |= {f"{name}, routed": compared(name, expected[name]) for name in ROUTED}
        found |= {f"batches, {name}": in_batches(name, losses) for name in BATCHES}
    return found | {"called": called}


def sharded(name: str = BATCHES[0]) -> Any:
    g = fgd.shard(whole_graph(), parts=uneven(WORLD.size))
    return g.to(standin.DEVICE) if name == BATCHES[0] else g


def compared(name: str, expected: list[Any]) -> str:
    """The error of a case."""
    g = sharded()
    try:
        with MadeOnDevice(lambda name: name == distributed_cases.__name__):
            results = outcome(ALL[name], g)
        values = [None if x is None else standin.on_host(fgd.whole(x)) for x in results]
        return difference(expected, values)
    except Exception:
        return traceback.format_exc()


class Model(nn.Module):
    """Of blocks: by a route, and by matrices of types that the library multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.first = dnn.GATv2Conv(D, 4, 2, allow_zero_in_degree=True)
        self.second = dnn.HGTConv(8, 2, 2, 2, K, dropout=0.0)

    def forward(self, blocks: list[Any]) -> Tensor:
        x = self.first(blocks[0], blocks[0].srcdata["x"]).flatten(1).relu()
        kinds = blocks[1].srcdata["kind"], blocks[1].edata["kind"]
        out: Tensor = self.second(blocks[1], x, *kinds)
        return out


def trained(g: Any, device: str) -> list[float]:
    """The losses of two epochs of mini-batches, which are sampled where the graph is."""
    torch.manual_seed(1)
    dgl.seed(1)
    model = Model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seeds = torch.randperm(NUM_NODES).to(g.device)
    sampler = NeighborSampler([3, 3])
    losses = []
    loader = DataLoader(g, seeds, sampler, device=device, batch_size=20)
    for _ in range(2):
        for _, targets, blocks in loader:
            assert {block.device.type for block in blocks} == {targets.device.type} == {device}
            optimizer.zero_grad()
            loss = (model(blocks) - blocks[-1].dstdata["w"]).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    return losses


def in_batches(name: str, expected: list[float]) -> str:
    """The difference of losses on the device from those of one process, or nothing."""
    fastgraph.status().reset()
    fgd.COUNTS.reset()
    try:
        losses = trained(sharded(name), standin.DEVICE)
    except Exception:
        return traceback.format_exc()
    if losses != pytest.approx(expected, rel=1e-9):
        return f"expected {expected}, found {losses}"
    row = fastgraph.status().row("dgl.GATv2Conv")
    if row.routed != len(expected):
        return f"expected a route for each of {len(expected)} batches, found {row}"
    gathers = dict(fgd.COUNTS.gathers)
    return "" if gathers == {"dgl.dataloading.DataLoader": 1} else f"gathers {gathers}"


@pytest.fixture(scope="module")
def found(world_size: int, once_on_ranks: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = once_on_ranks(on_this_rank, world_size)
    return found


@pytest.mark.parametrize("name", [*NAMES, *(f"{name}, routed" for name in ROUTED)])
def test_what_the_library_computes_is_that_of_one_process(
    found: list[dict[str, Any]], name: str
) -> None:
    for of_rank in found:
        assert not of_rank[name]


@pytest.mark.parametrize("name", BATCHES)
def test_minibatches_of_a_sharded_graph_train_on_a_device(
    found: list[dict[str, Any]], name: str
) -> None:
    for of_rank in found:
        assert of_rank[f"batches, {name}"] == ""


def test_the_library_was_called_with_what_is_on_the_device(
    found: list[dict[str, Any]],
) -> None:
    for of_rank in found:
        assert {"matrices of types", "matrices of types in order"} <= of_rank["called"]
        assert {"_CAPI_DGLHeteroVertexSubgraph"} <= of_rank["called"]
