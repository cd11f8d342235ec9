"""``dgl.dataloading.NeighborSampler`` on homogeneous graphs: blocks of neighbours, by our sampler.

DGL draws edges as a graph of all nodes, of which it makes a block. Here nodes of a block get their
numbers as it is drawn. Seeds of random numbers come from DGL's generator, so that ``dgl.seed``
repeats blocks.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any

from dgl import random, utils
from dgl.dataloading.neighbor_sampler import NeighborSampler
from dgl.heterograph import DGLBlock, DGLGraph
from dgl.heterograph_index import create_unitgraph_from_coo
from torch import Tensor

from fastgraph import settings
from fastgraph.dgl.structure import Structure, structure_of
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.conditions import plain_tensor
from fastgraph.routing.dispatch import Computation, replace_method
from fastgraph.sampling import neighbor_sample, unique_and_compact


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
    """
    if not settings.current().dgl_sampling:
        return None
    if type(g) is not DGLGraph or g.is_block:
        return Refusal(f"the graph is a {type(g).__name__}")
    if len(g.ntypes) > 1 or len(g.etypes) > 1:
        return Refusal("several types of nodes or edges")
    if g.device.type != "cpu" or g.is_pinned() or sampler.output_device is not None:
        return Refusal("a graph or an output that is not in the memory of the CPU")
    if sampler.edge_dir != "in" or sampler.prob is not None or exclude_eids is not None:
        return Refusal("sampling of outgoing edges, by probabilities or with edges excluded")
    fanouts = sampler.fanouts
    if any(isinstance(fanout, bool) or not isinstance(fanout, Integral) for fanout in fanouts):
        return Refusal("fanouts that are no integers")
    if not all(-1 <= fanout < 2**31 and fanout != 0 for fanout in fanouts):
        return Refusal("a fanout of 0, for which versions of DGL differ, or below -1")
    refusal = plain_tensor("seeds", seed_nodes)
    if refusal is not None:
        return refusal
    if seed_nodes.dim() != 1 or seed_nodes.dtype != g.idtype or seed_nodes.device != g.device:
        return Refusal("seeds that are no node numbers in one dimension of the graph's dtype")
    if seed_nodes.numel() == 0:
        return Refusal("no seeds")
    least, most = int(seed_nodes.min()), int(seed_nodes.max())
    if least < 0 or most >= g.num_nodes():
        wrong = least if least < 0 else most
        raise IndexError(f"seed_nodes must be in [0, {g.num_nodes()}), got {wrong}")
    if unique_and_compact([seed_nodes])[0].numel() < seed_nodes.numel():
        return Refusal("seeds that come twice")
    structure = structure_of(g._graph)
    if isinstance(structure, Refusal):
        return structure
    return lambda: _blocks(g, structure, seed_nodes, list(fanouts), bool(sampler.replace))


def _blocks(
    g: Any, structure: Structure, output_nodes: Tensor, fanouts: list[int], replace: bool
) -> tuple[Tensor, Tensor, list[Any]]:
    """Input nodes, output nodes and a block for each hop, the last hop first."""
    index = structure.index
    blocks: list[Any] = []
    seeds, dst = output_nodes.to(index.dtype), output_nodes  # as DGL has numbers of nodes
    for fanout in reversed(fanouts):
        drawn = neighbor_sample(
            *(structure.ptr, index, seeds, [fanout]),
            replace=replace,
            random_seed=int(random.choice(2**62, 1)),
        )
        assert drawn.edge is not None
        ids, seeds = drawn.edge, drawn.node
        if structure.edge_ids is not None:
            ids = structure.edge_ids.index_select(0, ids)  # takes less time than [ids]
        src = seeds.to(g.idtype)
        blocks.insert(0, _block(g, src, dst, drawn.row, drawn.col, ids))
        dst = src
    return dst, output_nodes, blocks


def _block(g: Any, src: Tensor, dst: Tensor, row: Tensor, col: Tensor, ids: Tensor) -> Any:
    """A block with the features of a graph, as ``dgl.to_block`` makes it."""
    ends = row.to(g.idtype), col.to(g.idtype)
    index = create_unitgraph_from_coo(2, src.numel(), dst.numel(), *ends, ["coo", "csr", "csc"])
    block = DGLBlock(index, (g.ntypes, g.ntypes), g.etypes)
    utils.set_new_frames(
        block,
        node_frames=utils.extract_node_subframes_for_block(g, [src], [dst]),
        edge_frames=utils.extract_edge_subframes(g, [ids.to(g.idtype)]),
    )
    return block
