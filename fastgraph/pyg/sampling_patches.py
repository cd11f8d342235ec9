"""Where PyG gets its sampler, and what stands there in its place."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch_geometric import loader, typing
from torch_geometric.loader import cluster, graph_saint, shadow
from torch_geometric.loader import neighbor_sampler as sampler_by_layer
from torch_geometric.nn import to_hetero_module
from torch_geometric.nn.models import node2vec
from torch_geometric.sampler import (
    HeteroSamplerOutput,
    NeighborSampler,
    SamplerOutput,
    hgt_sampler,
)
from torch_geometric.sampler.base import SubgraphType
from torch_geometric.sampler.utils import remap_keys

from fastgraph.plugins.patching import Patches
from fastgraph.pyg import sampling_functions as functions
from fastgraph.pyg.adjacency import Adjacency
from fastgraph.pyg.batch_filtering import numbering_edges_once
from fastgraph.pyg.batch_randomness import get_iterator
from fastgraph.pyg.hgt_sampling import hgt_sample
from fastgraph.pyg.prefetching import prefetched
from fastgraph.pyg.sparse_flag import Typing

_FLAGS = ("WITH_PYG_LIB", "WITH_EDGE_TIME_NEIGHBOR_SAMPLE", "WITH_WEIGHTED_NEIGHBOR_SAMPLE")
"""Those of ``torch_geometric.typing`` that say whether there is a sampler."""


_PYG_LIB = {
    "neighbor_sample": functions.neighbor_sample,
    "hetero_neighbor_sample": functions.hetero_neighbor_sample,
    "random_walk": functions.random_walk,
}

_TORCH_SPARSE = {
    "neighbor_sample": functions.homogeneous_by_nodes,
    "hetero_neighbor_sample": functions.heterogeneous_by_nodes,
    "hgt_sample": functions.of_plain(hgt_sample),
    "ego_k_hop_sample_adj": functions.ego_k_hop_sample_adj,
    "partition": functions.partition,
    "ptr2ind": functions.ptr2ind,
}


def install(patches: Patches) -> None:
    """Put our sampler where PyG looks for pyg-lib's and torch-sparse's."""
    for name, function in _PYG_LIB.items():
        patches.provide(torch.ops.pyg, name, function)
    for name, function in _TORCH_SPARSE.items():
        patches.provide(torch.ops.torch_sparse, name, function)

    if not typing.WITH_PYG_LIB:
        # The layer of `to_hetero` would take this flag for matrix products by pyg-lib.
        patches.replace(to_hetero_module.ToHeteroLinear, "dict_forward", _dict_forward)
    for name in _FLAGS:
        patches.replace(typing, name, True)
    if find_spec("pymetis") is not None:
        patches.replace(typing, "WITH_METIS", True)
        library = SimpleNamespace(partition=functions.MetisPartition)
        patches.replace(cluster, "pyg_lib", library)
    # These have the flags by value.
    patches.replace(node2vec, "WITH_PYG_LIB", True)
    patches.replace(hgt_sampler, "WITH_TORCH_SPARSE", True)
    decorators = sys.modules.get("torch_geometric.testing.decorators")
    if decorators is not None:
        patches.replace(decorators, "WITH_PYG_LIB", True)
    if not typing.WITH_TORCH_SPARSE:
        patches.replace(typing, "__class__", Typing)
        patches.replace(shadow, "WITH_TORCH_SPARSE", True)
        for module in (shadow, graph_saint, sampler_by_layer):
            patches.replace(module, "SparseTensor", Adjacency)

    patches.replace(NeighborSampler, "_sample", _with_induced(NeighborSampler._sample))
    for kind, name in ((loader.NodeLoader, "node_sampler"), (loader.LinkLoader, "link_sampler")):
        patches.replace(kind, "filter_fn", numbering_edges_once(kind.filter_fn, name))
    for kind in (
        loader.node_loader.NodeLoader,
        loader.link_loader.LinkLoader,
        loader.ZipLoader,
        loader.ShaDowKHopSampler,
    ):
        patches.replace(kind, "_get_iterator", get_iterator(kind._get_iterator, prefetched))


def _dict_forward(self: Any, x_dict: dict[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
    """``ToHeteroLinear.dict_forward`` as it is without pyg-lib: a product for each type."""
    weight, bias = self.hetero_module.weight, self.hetero_module.bias
    return {key: F.linear(x_dict[key], weight[i].t()) + bias[i] for i, key in enumerate(self.types)}


def _with_induced(upstream: Any) -> Any:
    """``NeighborSampler._sample``, whose induced subgraphs upstream leaves to torch-sparse."""

    def _sample(self: Any, seed: Any, seed_time: Any = None, **kwargs: Any) -> Any:
        if self.subgraph_type != SubgraphType.induced:
            return upstream(self, seed, seed_time, **kwargs)
        if self.disjoint:
            raise ValueError(
                "'disjoint' sampling not supported for neighbor sampling with "
                "`subgraph_type='induced'`"
            )
        return _hetero_induced(self, seed) if isinstance(seed, dict) else _induced(self, seed)

    return _sample


def _induced(sampler: Any, seed: torch.Tensor) -> SamplerOutput:
    row, col, node, edge = functions.neighbor_sample(
        sampler.colptr,
        sampler.row,
        seed,
        sampler.num_neighbors.get_mapped_values(),
        edge_weight=sampler.edge_weight,
        csc=sampler.sample_direction == "forward",
        replace=sampler.replace,
        directed=False,
    )[:4]
    return SamplerOutput(node=node, row=row, col=col, edge=edge, batch=None)


def _hetero_induced(sampler: Any, seed: dict[str, torch.Tensor]) -> HeteroSamplerOutput:
    row, col, node, edge = functions.hetero_neighbor_sample(
        sampler.node_types,
        sampler.edge_types,
        sampler.colptr_dict,
        sampler.row_dict,
        seed,
        sampler.num_neighbors.get_mapped_values(sampler.edge_types),
        edge_weight_dict=sampler.edge_weight,
        csc=sampler.sample_direction == "forward",
        replace=sampler.replace,
        directed=False,
    )[:4]
    row, col, edge = (remap_keys(d, sampler.to_edge_type) for d in (row, col, edge))
    if sampler.sample_direction == "backward":
        row, col, edge = (remap_keys(d, sampler.to_restored_edge_type) for d in (row, col, edge))
    return HeteroSamplerOutput(node=node, row=row, col=col, edge=edge, batch=None)
