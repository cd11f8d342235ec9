"""The cost of a layer by halo."""

from __future__ import annotations

from fastgraph.dist.operators.cost import TOPOLOGY, Cluster, Cost, Distribution, Layer


def by_halo(layer: Layer, rows: Distribution, cluster: Cluster) -> Cost:
    """Each rank computes all heads of its nodes, from their rows and those of the halo."""
    others = len(rows.edges) - 1
    sources = [operand for operand in layer.operands if operand.place == "sources"]
    exchanges = 2 * len(sources) if any(rows.receives) else 0
    row = sum(operand.row for operand in sources)
    work = cluster.slowest(rows.edges) * layer.heads * layer.channels
    memory = max(rows.receives) * row + max(rows.edges) * TOPOLOGY
    return Cost(exchanges, exchanges * others, row * rows.busiest, work, memory)
