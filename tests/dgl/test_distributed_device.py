"""Sharded graphs of DGL on the stand-in device beside whole ones on the CPU."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch

import fastgraph
import fastgraph.dist as fgd
from fastgraph.dist.ranks.world import WORLD
from fastgraph.registry import registry
from tests import late_collectives, standin
from tests.dgl import distributed_cases, on_device
from tests.dgl.distributed_cases import (
    CASES,
    LAYERS,
    OF_RELATIONS,
    OTHERS,
    several_relations,
    whole_graph,
)
from tests.dgl.graphs import dgl
from tests.dgl.test_distributed import difference, outcome
from tests.dist.graphs import PARTITIONS, uneven
from tests.dist.on_device import MadeOnDevice

pytest.importorskip("pymetis")

OF_LIBRARY = {
    "HGTConv": "types of nodes have matrices",
    "RelGraphConv": "without its route, types of edges have matrices",
    "both directions": "edges are made simple",
    "edges between": "edges are looked up",
    "some nodes": "nodes are given new numbers",
    "words": "they name the device",
}
"""Cases that DGL's C++ library computes, on devices that it was built for."""

OF_STAND_IN = {
    "SAGEConv, lstm": "torch has fused cells for devices, and none for the CPU",
    "GroupRevRes": "storages of the stand-in have a fixed size",
    "GroupRevRes, dropout": "storages of the stand-in have a fixed size",
}

NAMES = [name for name in CASES if name not in {*OTHERS, *OF_LIBRARY, *OF_STAND_IN}]

BESIDE = ("GraphConv", "GATConv, attention", "SAGEConv, gcn")

REFUSED = {
    "edges between": lambda g: g.has_edges_between([1, 2], [2, 3]),
    "another device": lambda g: g.to("cuda:0"),
}


def compared_on_this_rank() -> dict[str, str]:
    on_device.install()  # before the first backward pass
    torch.set_default_dtype(torch.float64)
    WORLD.random = "exact"
    fastgraph.disable()
    makes = {name: several_relations if name in OF_RELATIONS else whole_graph for name in NAMES}
    expected = {name: outcome(CASES[name], makes[name]()) for name in NAMES}
    late_collectives.install()
    registry.DEVICE_TYPES = (*registry.DEVICE_TYPES, standin.DEVICE)  # type: ignore[assignment]
    found = {}
    for name in NAMES:
        parts = PARTITIONS["uneven"](WORLD.size)
        if name in OF_RELATIONS:
            parts = torch.cat([parts.flip(0)[:23], parts])
        g = fgd.shard(makes[name](), parts=parts).to(standin.DEVICE)
        found[name] = compared(name, g, expected[name])
    found |= {f"{name}, beside": beside(name) for name in BESIDE}
    return found | {"places": places(), **{name: refused(name) for name in REFUSED}}


def beside(name: str) -> str:
    """The error of a whole layer whose features are on the device, and its graph on the CPU."""

    def trained(g: Any, device: str) -> list[Any]:
        torch.manual_seed(0)
        layer = CASES[name].make().double().to(device)
        x = g.ndata["x"].detach().to(device).requires_grad_()
        out = layer(g, x)
        out.sin().sum().backward()
        return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]

    fastgraph.disable()
    expected = trained(whole_graph(), "cpu")
    fastgraph.enable(backend="reference", strict=True)
    g = fgd.shard(whole_graph(), parts=uneven(WORLD.size))
    found = trained(g, standin.DEVICE)
    fastgraph.disable()
    return difference(expected, [standin.on_host(fgd.whole(x)) for x in found])


def places() -> str:
    """Where graphs are: a graph on a device is sharded there, and goes back to the CPU."""
    there = torch.device(standin.DEVICE, 0)
    whole = whole_graph()
    whole.__class__, OnDevice.whole = OnDevice, whole._graph
    sharded = fgd.shard(whole, parts=uneven(WORLD.size))
    there_and_back = sharded, sharded.reverse(), sharded.cpu()
    edges = [g.edges()[0] for g in there_and_back]
    devices = [str(x.device) for x in (*there_and_back, *edges, sharded.ndata["x"])]
    assert torch.equal(fgd.whole(edges[2]), whole_graph().edges()[0])
    assert sharded.to(there) is sharded
    return " ".join(devices)


class OnDevice(dgl.DGLGraph):  # type: ignore[misc]  # DGL has no types
    """A whole graph that says that it is on the stand-in, where DGL's library can have none."""

    whole: Any = None

    @property
    def device(self) -> torch.device:
        if self._graph is self.whole:
            return torch.device(standin.DEVICE, 0)
        found: torch.device = dgl.DGLGraph.device.fget(self)
        return found


def refused(name: str) -> str:
    g = fgd.shard(whole_graph(), parts=uneven(WORLD.size)).to(standin.DEVICE)
    try:
        REFUSED[name](g)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def compared(name: str, g: Any, expected: list[Any]) -> str:
    """The error of a case, of layers by their routes, of operations as DGL would do them."""
    fgd.COUNTS.reset()
    fastgraph.disable()
    if name in LAYERS:
        fastgraph.enable(backend="reference")
    try:
        with MadeOnDevice(lambda name: name == distributed_cases.__name__):
            results = outcome(CASES[name], g)
        values = [None if x is None else standin.on_host(fgd.whole(x)) for x in results]
        return difference(expected, values)
    except Exception:
        return traceback.format_exc()


@pytest.fixture(scope="module")
def found(world_size: int, once_on_ranks: Any) -> list[dict[str, str]]:
    found: list[dict[str, str]] = once_on_ranks(compared_on_this_rank, world_size)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_graphs_give_on_a_device_what_they_give_on_one_process(
    found: list[dict[str, str]], name: str
) -> None:
    for of_rank in found:
        assert not of_rank[name]


@pytest.mark.parametrize("name", BESIDE)
def test_layers_compute_on_a_device_along_graphs_on_the_cpu(
    found: list[dict[str, str]], name: str
) -> None:
    for of_rank in found:
        assert not of_rank[f"{name}, beside"]


def test_graphs_are_sharded_where_they_are_and_move(found: list[dict[str, str]]) -> None:
    of_three = "standin:0 standin:0 cpu"
    for of_rank in found:
        assert of_rank["places"] == f"{of_three} {of_three} standin:0"


def test_what_needs_the_library_says_so_on_all_ranks(found: list[dict[str, str]]) -> None:
    for of_rank in found:
        assert of_rank["edges between"].startswith(
            "DGLError: dgl.heterograph_index.has_edges_between needs DGL's C++ library, which was "
            "built without devices such as standin:0; move the graph to the CPU before"
        )
        assert "must be on the CPU or standin:0, got cuda:0" in of_rank["another device"]
