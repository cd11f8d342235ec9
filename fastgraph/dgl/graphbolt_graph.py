"""The graph of GraphBolt's library, which its class ``FusedCSCSamplingGraph`` holds.

Methods have the names, arguments and errors of ``torch.classes.graphbolt.FusedCSCSamplingGraph``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastgraph.dgl.graphbolt_randomness import next_seed
from fastgraph.dgl.importing import without_library
from fastgraph.sampling import sample_layer


@dataclass
class SampledSubgraph:
    """Edges of some nodes: the members of ``torch.classes.graphbolt.FusedSampledSubgraph``."""

    indptr: Tensor
    indices: Tensor
    original_column_node_ids: Tensor
    original_row_node_ids: Tensor | None = None
    original_edge_ids: Tensor | None = None
    type_per_edge: Tensor | None = None


def _member(name: str) -> tuple[Any, Any]:
    """The method that returns a member, dictionaries as copies, and the one that sets it."""
    attribute = f"_{name}"

    def get(self: SamplingGraph) -> Any:
        value = getattr(self, attribute)
        return dict(value) if isinstance(value, Mapping) else value

    def set_(self: SamplingGraph, value: Any) -> None:
        setattr(self, attribute, value)

    get.__name__, set_.__name__ = name, f"set_{name}"
    return get, set_


class SamplingGraph:
    """A graph in compressed columns, whose nodes and edges may have types and attributes.

    Raises:
        RuntimeError: Sizes do not fit.
    """

    def __init__(
        self,
        csc_indptr: Tensor,
        indices: Tensor,
        node_type_offset: Tensor | None = None,
        type_per_edge: Tensor | None = None,
        node_type_to_id: Mapping[str, int] | None = None,
        edge_type_to_id: Mapping[str, int] | None = None,
        node_attributes: Mapping[str, Tensor] | None = None,
        edge_attributes: Mapping[str, Tensor] | None = None,
    ) -> None:
        _expect(csc_indptr.dim() == 1, f"csc_indptr must be 1-D, got {list(csc_indptr.shape)}")
        _expect(indices.dim() == 1, f"indices must be 1-D, got {list(indices.shape)}")
        _expect(
            csc_indptr.device == indices.device,
            f"csc_indptr and indices must be on one device, got {csc_indptr.device} and "
            f"{indices.device}",
        )
        num_nodes, num_edges = csc_indptr.numel() - 1, indices.numel()
        if node_type_offset is not None:
            _expect(
                node_type_to_id is not None
                and node_type_offset.shape == (len(node_type_to_id) + 1,),
                "node_type_offset must have one value more than node_type_to_id",
            )
        if type_per_edge is not None:
            _expect(
                edge_type_to_id is not None and type_per_edge.shape == (num_edges,),
                "type_per_edge must have a value for each edge, and edge_type_to_id be given",
            )
        for kind, attributes, size in (
            ("node", node_attributes, num_nodes),
            ("edge", edge_attributes, num_edges),
        ):
            for value in (attributes or {}).values():
                _expect(
                    value.size(0) == size,
                    f"Expected {kind}_attribute.size(0) and num_{kind}s to be equal, but "
                    f"{kind}_attribute.size(0) was {value.size(0)}, and num_{kind}s was {size}.",
                )
        self._csc_indptr = csc_indptr
        self._indices = indices
        self._node_type_offset = node_type_offset
        self._type_per_edge = type_per_edge
        self._node_type_to_id = node_type_to_id
        self._edge_type_to_id = edge_type_to_id
        self._node_attributes = node_attributes
        self._edge_attributes = edge_attributes

    csc_indptr, set_csc_indptr = _member("csc_indptr")
    indices, set_indices = _member("indices")
    node_type_offset, set_node_type_offset = _member("node_type_offset")
    type_per_edge, set_type_per_edge = _member("type_per_edge")
    node_type_to_id, set_node_type_to_id = _member("node_type_to_id")
    edge_type_to_id, set_edge_type_to_id = _member("edge_type_to_id")
    node_attributes, set_node_attributes = _member("node_attributes")
    edge_attributes, set_edge_attributes = _member("edge_attributes")

    def num_nodes(self) -> int:
        """How many nodes there are."""
        return self._csc_indptr.numel() - 1

    def num_edges(self) -> int:
        """How many edges there are."""
        return self._indices.numel()

    def in_subgraph(self, nodes: Tensor) -> SampledSubgraph:
        """All edges that lead to some nodes.

        Raises:
            RuntimeError: A node is not in the graph.
        """
        indptr, edges = edges_of(self._csc_indptr, nodes)
        types = self._type_per_edge
        return SampledSubgraph(
            indptr,
            self._indices[edges],
            nodes.to(self._csc_indptr.dtype),
            torch.arange(self.num_nodes()),
            edges,
            None if types is None else types[edges],
        )

    def sample_neighbors(
        self,
        nodes: Tensor | None,
        fanouts: Sequence[int],
        replace: bool,
        layer: bool,
        return_eids: bool,
        probs_name: str | None,
    ) -> SampledSubgraph:
        """Edges that are drawn for each node, for each of its types if there are many fanouts.

        Raises:
            RuntimeError: A node is not in the graph, or a type has no fanout.
            ImportError: The graph or the nodes are not in the memory of the CPU.
        """
        columns = _Columns(self._csc_indptr, self._indices, self._type_per_edge, None)
        columns.weights = _weights(self._edge_attributes, probs_name)
        return columns.sample(nodes, fanouts, replace, layer, return_eids)

    def temporal_sample_neighbors(
        self,
        nodes: Tensor,
        nodes_timestamp: Tensor,
        fanouts: Sequence[int],
        replace: bool,
        layer: bool,
        return_eids: bool,
        probs_name: str | None,
        node_timestamp_attr_name: str | None,
        edge_timestamp_attr_name: str | None,
    ) -> SampledSubgraph:
        """The same among edges that are earlier than the node, and come from earlier nodes.

        Takes memory for all edges of the nodes.
        """
        indptr, edges = edges_of(self._csc_indptr, nodes)
        until = nodes_timestamp.repeat_interleave(indptr.diff())
        sources = self._indices[edges]
        earlier = torch.ones(edges.numel(), dtype=torch.bool)
        if node_timestamp_attr_name is not None:
            earlier &= (self._node_attributes or {})[node_timestamp_attr_name][sources] < until
        if edge_timestamp_attr_name is not None:
            earlier &= (self._edge_attributes or {})[edge_timestamp_attr_name][edges] < until
        kept = edges[earlier]
        counts = torch.cat([indptr.new_zeros(1), earlier.cumsum(0)])
        types, weights = self._type_per_edge, _weights(self._edge_attributes, probs_name)
        columns = _Columns(
            counts[indptr].to(self._csc_indptr.dtype),
            sources[earlier],
            None if types is None else types[kept],
            None if weights is None else weights[kept],
        )
        each = torch.arange(nodes.numel(), dtype=self._indices.dtype)
        sampled = columns.sample(each, fanouts, replace, layer, True)
        sampled.original_column_node_ids = nodes
        drawn = sampled.original_edge_ids
        assert drawn is not None
        sampled.original_edge_ids = kept[drawn].to(drawn.dtype) if return_eids else None
        return sampled

    def copy_to_shared_memory(self, shared_memory_name: str) -> SamplingGraph:
        """Not there.

        Raises:
            ImportError: Always.
        """
        raise without_library("FusedCSCSamplingGraph.copy_to_shared_memory")


@dataclass
class _Columns:
    """Edges by destination, with their types and weights, of which some are drawn."""

    indptr: Tensor
    indices: Tensor
    types: Tensor | None
    weights: Tensor | None

    def sample(
        self,
        nodes: Tensor | None,
        fanouts: Sequence[int],
        replace: bool,
        layer: bool,
        return_eids: bool,
    ) -> SampledSubgraph:
        """See :meth:`SamplingGraph.sample_neighbors`."""
        _expect(nodes is not None, "Nodes can not be None on the CPU.")
        assert nodes is not None
        if not all(tensor.device.type == "cpu" for tensor in (self.indptr, self.indices, nodes)):
            raise without_library("sampling on a GPU")
        types = self.types
        with _errors_of_graphbolt():
            sample = sample_layer(
                self.indptr.contiguous(),
                self.indices.contiguous(),
                nodes,
                fanouts,
                edge_type=None if types is None or len(fanouts) == 1 else types.contiguous(),
                edge_weight=self.weights,
                replace=replace,
                by_layer=layer,
                ascending=types is not None and len(fanouts) == 1,  # so that their types ascend
                random_seed=next_seed(),
            )
        return SampledSubgraph(
            sample.colptr,
            sample.row,
            nodes,
            None,
            sample.edge if return_eids else None,
            None if types is None else types[sample.edge],
        )


def edges_of(indptr: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Where the edges of each node begin and end among those of all nodes, and these, int64.

    Raises:
        RuntimeError: A node is not in the graph.
    """
    num_nodes = indptr.numel() - 1
    _expect(
        nodes.numel() == 0 or 0 <= int(nodes.min()) <= int(nodes.max()) < num_nodes, _NOT_A_NODE
    )
    begins = indptr[nodes.long()].long()
    degrees = indptr[nodes.long() + 1].long() - begins
    ends = degrees.cumsum(0)
    total = int(ends[-1]) if nodes.numel() else 0
    edges = torch.arange(total)
    edges += (begins - (ends - degrees)).repeat_interleave(degrees, output_size=total)
    return torch.cat([ends.new_zeros(1), ends]), edges


_NOT_A_NODE = "The seed nodes' IDs should fall within the range of the graph's node IDs."
_DEFECTS = {
    "seed": _NOT_A_NODE,
    "edge_type": "Etype values exceed the number of fanouts.",
}


@contextmanager
def _errors_of_graphbolt() -> Iterator[None]:
    """Where GraphBolt has an error of its own, that one."""
    try:
        yield
    except IndexError as error:
        argument = str(error).partition(" ")[0]
        if argument not in _DEFECTS:
            raise
        raise RuntimeError(f"{_DEFECTS[argument]} {error}") from None


def _weights(attributes: Mapping[str, Tensor] | None, name: str | None) -> Tensor | None:
    if name is None or attributes is None or name not in attributes:
        return None
    weights = attributes[name].contiguous()
    return weights if weights.dtype in (torch.float32, torch.float64) else weights.float()


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)
