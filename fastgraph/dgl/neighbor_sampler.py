"""``dgl.dataloading.NeighborSampler``: blocks of neighbours, by our sampler.

DGL draws edges as a graph of all nodes, of which it makes a block. Here nodes of a block get their
numbers as it is drawn. Seeds of random numbers come from DGL's generator, so that ``dgl.seed``
repeats blocks.

By probabilities or a mask, blocks are drawn of the edges that may be drawn, which are remembered
until these values change.
"""

from __future__ import annotations

from typing import Any

from dgl import random
from dgl.dataloading.neighbor_sampler import NeighborSampler
from dgl.heterograph import DGLGraph
from torch import Tensor

from fastgraph import settings
from fastgraph.dgl.blocks import (
    NO_SEEDS,
    Ends,
    Excluded,
    block_of,
    edges_to_exclude,
    fanouts_refusal,
    leave_out,
    plan_of_types,
    seeds_refusal,
)
from fastgraph.dgl.drawable_edges import Columns, columns_of
from fastgraph.dgl.structure import structure_of
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.dispatch import Computation, replace_method
from fastgraph.sampling import neighbor_sample


def install(patches: Patches) -> None:
    """Replace ``NeighborSampler.sample_blocks``."""
    replace_method(patches, NeighborSampler, "sample_blocks", plan)


def plan(
    sampler: Any, g: Any, seed_nodes: Any, exclude_eids: Any = None
) -> Computation | Refusal | None:
    """The blocks of some seeds, or the reason to leave them to upstream.

    ``None`` without the setting ``dgl_sampling``: with the same seed DGL draws other blocks.

    Raises:
        IndexError: a seed is not in the graph, where DGL reads on.
        ValueError: a probability is negative or not finite, where DGL's results are undefined.
    """
    if not settings.current().dgl_sampling:
        return None
    if type(g) is not DGLGraph or g.is_block:
        return Refusal(f"the graph is a {type(g).__name__}")
    if g.device.type != "cpu" or g.is_pinned() or sampler.output_device is not None:
        return Refusal("a graph or an output that is not in the memory of the CPU")
    if sampler.edge_dir != "in":
        return Refusal("sampling of outgoing edges")
    if len(sampler.fanouts) == 0 or not g.etypes:
        return Refusal("no hops, or no types of edges")
    excluded = edges_to_exclude(g, exclude_eids)
    if isinstance(excluded, Refusal):
        return excluded
    if len(g.ntypes) > 1 or len(g.etypes) > 1:
        return plan_of_types(sampler, g, seed_nodes, excluded)
    fanouts = list(sampler.fanouts)
    refusal = fanouts_refusal([fanout] for fanout in fanouts) or seeds_refusal(
        g, g.ntypes[0], seed_nodes
    )
    if refusal is not None:
        return refusal
    if seed_nodes.numel() == 0:
        return NO_SEEDS
    structure = structure_of(g._graph)
    if isinstance(structure, Refusal):
        return structure
    columns = columns_of(g, structure, g.canonical_etypes[0], sampler.prob)
    if isinstance(columns, Refusal):
        return columns
    return lambda: _blocks(g, columns, seed_nodes, fanouts, bool(sampler.replace), excluded)


def _blocks(
    g: Any,
    columns: Columns,
    output_nodes: Tensor,
    fanouts: list[int],
    replace: bool,
    excluded: dict[Any, Excluded],
) -> tuple[Tensor, Tensor, list[Any]]:
    """Input nodes, output nodes and a block for each hop, the last hop first."""
    index = columns.row
    blocks: list[Any] = []
    seeds, dst = output_nodes.to(index.dtype), output_nodes  # as DGL has numbers of nodes
    for fanout in reversed(fanouts):
        drawn = neighbor_sample(
            *(columns.ptr, index, seeds, [fanout]),
            edge_weight=columns.weight,
            replace=replace,
            random_seed=int(random.choice(2**62, 1)),
        )
        assert drawn.edge is not None
        ids, seeds = drawn.edge, drawn.node
        if columns.edge_ids is not None:
            ids = columns.edge_ids.index_select(0, ids)  # takes less time than [ids]
        src, edges = [seeds.to(g.idtype)], [Ends(drawn.row, drawn.col, ids)]
        if excluded:
            src, edges = leave_out(g, src, [dst], edges, excluded)
            seeds = src[0].to(index.dtype)
        blocks.insert(0, block_of(g, src, [dst], edges))
        dst = src[0]
    return dst, output_nodes, blocks
