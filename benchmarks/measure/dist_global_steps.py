"""Global attention on ranks: what a rank sends, how long it computes and what it holds."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import fastgraph.dist as fgd
import fastgraph.sparse as fgs
from fastgraph import ops
from fastgraph.dist.operators import cost
from fastgraph.dist.operators.grid.cost import Exchanged, Widths, exchanged, volume
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.mesh import usual_mesh
from fastgraph.dist.ranks.world import WORLD
from fastgraph.nn import GlobalAGNN, GlobalGAT, GlobalVA
from fastgraph.registry import operators
from measure.dist_memory_steps import Peak, sizes

MODELS = {"VA": GlobalVA, "AGNN": GlobalAGNN, "GAT": GlobalGAT}
NUM_LAYERS = 3
_ITEM = 4
_MODES = ("halo", "grid")


def measure(
    crossing: Sequence[float],
    nodes: int,
    widths: Sequence[int],
    graphs: dict[str, tuple[int, int]],
    rounds: int,
    largest: tuple[int, int, int],
) -> dict[str, Any]:
    """All that is measured on this rank.

    Args:
        crossing: mean degrees of random graphs.
        nodes: of these.
        widths: numbers of channels of layers whose bytes are counted.
        graphs: scales and edges of Kronecker graphs, by name.
        rounds: how many steps are timed.
        largest: scale, edges and channels of the graph whose memory is looked at.
    """
    torch.set_num_threads(1)
    return {
        "crossing": [rows(nodes, degree) for degree in crossing],
        "volumes": volumes(widths),
        "times": {name: times(*graph, rounds) for name, graph in graphs.items()},
        "memory": memory(*largest),
    }


def rows(nodes: int, degree: float) -> dict[str, float]:
    """Rows that this rank sends for a sum on a random graph, forward, by halo and on a grid."""
    found = {}
    for mode in _MODES:
        data = fgd.erdos_renyi(nodes, round(nodes * degree), features=2, mode=mode)
        for _ in range(2):  # the first one plans
            fgd.COUNTS.reset()
            ops.spmm(data.x, data.edge_index, num_out=nodes)
        found[mode] = fgd.COUNTS.sent["all_to_all"] / (2 * _ITEM)
    return found


def exchanged_by(model: str, k: int) -> Exchanged:
    """The bytes that a layer exchanges for a node on a grid, by the formulas of the pages."""
    if model == "GAT":
        u, scores = torch.empty(1, 1, k), torch.empty(2, 1, 1).unbind()
        given = [x.requires_grad_() for x in (u, *scores)]
        return exchanged(cost.attention_layer(operators.GAT.shapes, [*given, None], 1))
    both = Widths(_ITEM * (k + (model == "AGNN")), _ITEM * k, _ITEM * k)
    return Exchanged(both, both)


def volumes(widths: Sequence[int]) -> dict[str, dict[str, int]]:
    """Bytes that this rank sends in a step of a layer, beside the formulas."""
    found = {}
    data = fgd.kronecker(12, 1 << 15, features=max(widths), mode="grid")
    a = fgs.from_edge_index(data.edge_index, num_nodes=data.num_nodes)
    counts = data.x.rows.counts
    for model, make in MODELS.items():
        for k in widths:
            layer = make(k, k)
            for _ in range(2):
                h = data.x[:, :k].detach().requires_grad_()
                fgd.COUNTS.reset()
                torch.autograd.grad(layer(a, h).local.sum(), [h.local, *layer.parameters()])
            sent = fgd.COUNTS.sent
            mesh = usual_mesh(WORLD.size)
            parameters = sum(w.nbytes for w in layer.parameters())
            found[f"{model}, {k}"] = {
                "rows": sent["all_to_all"],
                "rows, formula": volume(mesh, exchanged_by(model, k), counts, counts).sent[
                    WORLD.rank
                ],
                "parameters": sum(sent.values()) - sent["all_to_all"],
                "parameters, formula": (WORLD.size - 1) * parameters,
            }
    return found


def times(scale: int, num_edges: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of processor time of this rank by model, pass and mode, and bytes sent."""
    found: dict[str, Any] = {}
    for mode in _MODES:
        data = fgd.kronecker(scale, num_edges, features=16, mode=mode)
        a = fgs.from_edge_index(data.edge_index, num_nodes=data.num_nodes)
        found["edges"] = data.edge_index.shape[1]
        found[f"edges, {mode}"] = data.edge_index.local.shape[1]
        for model, make in MODELS.items():
            torch.manual_seed(0)
            layers = torch.nn.ModuleList(make(16, 16) for _ in range(NUM_LAYERS))

            def forward(layers: Any = layers, a: Any = a, x: Tensor = data.x) -> Tensor:
                for layer in layers:
                    x = layer(a, x).relu()
                return x

            def inference(forward: Callable[[], Tensor] = forward) -> None:
                with torch.no_grad():
                    forward()

            def training(forward: Any = forward, layers: Any = layers) -> None:
                torch.autograd.grad(forward().local.sum(), list(layers.parameters()))

            for name, step in (("inference", inference), ("training", training)):
                step()
                step()
                taken = []
                for _ in range(rounds):
                    transport.agree(True)
                    fgd.COUNTS.reset()
                    start = time.process_time()
                    step()
                    taken.append(1e3 * (time.process_time() - start))
                sent = sum(fgd.COUNTS.sent.values())
                found[f"{model}, {name}, {mode}"] = {
                    "ms": statistics.quantiles(taken, n=4)[0] if len(taken) > 1 else taken[0],
                    "sent": sent,
                }
    return found


def memory(scale: int, num_edges: int, channels: int) -> dict[str, int]:
    """Bytes that this rank has more after a graph was born, and at most in steps of training."""
    gc.collect()
    _, before = sizes()
    peak = Peak()
    peak.start()
    data = fgd.kronecker(scale, num_edges, features=channels, mode="grid")
    gc.collect()
    _, born = sizes()
    at_birth = peak.anonymous
    layer = GlobalVA(channels, channels)
    a = fgs.from_edge_index(data.edge_index, num_nodes=data.num_nodes)
    for _ in range(2):
        torch.autograd.grad(layer(a, data.x).local.sum(), list(layer.parameters()))
    peak.end()
    return {
        "born": born - before,
        "at birth": max(at_birth, born) - before,
        "training": peak.anonymous - before,
        "edges": data.edge_index.local.shape[1],
        "all": data.edge_index.shape[1],
        "rows": data.x.rows.mine,
    }
