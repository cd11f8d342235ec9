"""Training steps on ranks of one speed each, and what is modelled for any number of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastgraph.dist.forecast.dry_run import Step
from fastgraph.dist.forecast.forecast import forecast, partition_distribution
from fastgraph.dist.graphs.partition import partition
from fastgraph.dist.operators.cost import BACKWARD, Cluster, Distribution
from fastgraph.dist.ranks.world import WORLD
from measure import dist_plan_steps
from measure.dist_plan_steps import layers, modes_of, on_usual_mesh
from measure.dist_transformer_steps import Model, graph
from measure.quota import Quota, limit_this_process


def measure(
    quotas: Sequence[Quota], graphs: Sequence[str], channels: int, rounds: int
) -> dict[str, Any]:
    """:func:`measure.dist_plan_steps.measure`, by ranks each of which obeys its quota."""
    limit_this_process(quotas[WORLD.rank])
    return dist_plan_steps.measure(graphs, channels, rounds)


def rows(name: str, ranks: int) -> Distribution:
    """How a graph is shared out by METIS."""
    given = graph(name)
    owner = partition(given.edge_index, given.num_nodes, ranks)
    return on_usual_mesh(partition_distribution(given.edge_index, owner, owner, ranks))


def layers_alone(kind: str, channels: int, of_one: Distribution, machine: Cluster) -> float:
    """Seconds that are modelled of the layers of a step on one rank."""
    step = _step(kind, channels, 0.0)
    return forecast(step, machine, [of_one], 1).modes["halo"].seconds


def modelled(
    kind: str, channels: int, rest: float, of_ranks: Distribution, machine: Cluster
) -> dict[str, float]:
    """Seconds of a step by mode.

    Args:
        kind: of the model.
        channels: of all layers.
        rest: seconds of a step on one rank that its layers do not explain, for as many rows as all
            ranks have.
        of_ranks: how the graph is shared out.
        machine: each rank and its link.
    """
    ranks = len(of_ranks.edges)
    found = forecast(_step(kind, channels, rest), machine, [of_ranks], ranks)
    return {mode: found.modes[mode].seconds for mode in modes_of(kind, ranks)}


def _step(kind: str, channels: int, rest: float) -> Step:
    parameters = [p.nbytes for p in Model(channels, kind).parameters()]
    calls = [("", layer, 0) for layer in layers(kind, channels)]
    return Step([], calls, [], rest / (1 + BACKWARD), 0, parameters)
