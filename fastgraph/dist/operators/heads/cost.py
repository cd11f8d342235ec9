"""The cost of a layer by heads, and how heads are shared out."""

from __future__ import annotations

from fastgraph.dist.operators.cost import TOPOLOGY, Cluster, Cost, Distribution, Layer, RowOperand
from fastgraph.dist.ranks.transport import sends_in_turns


def by_heads(layer: Layer, rows: Distribution, cluster: Cluster) -> Cost | None:
    """Each rank computes some heads of all nodes; ``None`` where there is one head only."""
    ranks = len(rows.edges)
    if layer.heads < 2:
        return None
    of_place = {"sources": rows.sources, "destinations": rows.destinations, "edges": rows.edges}
    own = [len(heads) for heads in head_ranges(layer.heads, ranks)]
    exchanges, sent, memory = 0, [0] * ranks, 0.0
    seen: dict[int, int] = {}
    moved = [*layer.operands, RowOperand("destinations", True, layer.out, True, -1)]
    for operand in moved:
        counts = of_place[operand.place]
        n = sum(counts)
        if operand.has_heads and operand.tensor not in seen:
            seen[operand.tensor] = operand.row * n
            for rank in range(ranks):
                mine = counts[rank]
                there_and_back = mine * (layer.heads - own[rank]) + (n - mine) * own[rank]
                sent[rank] += operand.row * there_and_back // layer.heads
            memory += operand.row * n * max(own) / layer.heads
        elif not operand.has_heads:
            memory += operand.row * n
            if operand.wants_gradient:  # sent to all, and sums sent back
                exchanges += 1
                for rank in range(ranks):
                    sent[rank] += operand.row * (counts[rank] * (ranks - 2) + n)
    *given, _ = seen.values()
    exchanges += (len(given) if sends_in_turns(given, ranks) else 1) + 1
    edges = sum(rows.edges)
    work = edges * cluster.slowest(own) * layer.channels
    memory += edges * TOPOLOGY
    return Cost(2 * exchanges, 2 * exchanges * (ranks - 1), max(sent), work, memory)


def head_ranges(num_heads: int, ranks: int) -> list[range]:
    """Which heads each rank computes: consecutive ones, as many as others have or one more."""
    cuts = [num_heads * rank // ranks for rank in range(ranks + 1)]
    return [range(cuts[rank], cuts[rank + 1]) for rank in range(ranks)]
