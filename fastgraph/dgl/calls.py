"""Calls of whole layers: the conditions on graph and features under which operators compute them.

A layer's ``forward`` is replaced as a whole, so that DGL's frames, which refuse to hold features on
another device than the graph, take no part: a graph on the CPU goes with features on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from dgl.heterograph import DGLGraph
from torch import Tensor

from fastgraph import ops
from fastgraph.dgl.conditions import mode_refusal, place_refusal
from fastgraph.dgl.devices import beside_features
from fastgraph.dgl.structure import Relation, Structure, structure_of
from fastgraph.edge_programs.dtypes import HALVES
from fastgraph.graphs.edges import Edges
from fastgraph.layers.attention import Inputs
from fastgraph.plugins.backend import device_type
from fastgraph.plugins.refusal import Refusal
from fastgraph.registry.registry import REGISTRY
from fastgraph.routing.conditions import plain_parameters


class Accepted(NamedTuple):
    """A call that can be routed.

    Attributes:
        inputs: features of sources and of destinations, as upstream takes them from the caller.
        shared: whether all destinations are sources, with the same number.
        structure: the edges, on the device of the features.
        plain: these without DGL's numbers, where they have been looked at.
    """

    inputs: Inputs
    shared: bool
    structure: Structure
    plain: Relation | None

    @property
    def num_dst(self) -> int:
        """The number of destinations, which are the first of the sources in a block."""
        return self.structure.num_dst

    def relation(self, *, numbered: bool) -> Relation:
        """The edges, with DGL's numbers only where these matter."""
        if numbered:
            return self.structure.numbered()
        return self.plain or self.structure.plain()

    def edges(self, *, numbered: bool) -> Edges:
        """Those of :meth:`relation` as operators take them."""
        return self.relation(numbered=numbered).edges

    def program(self, program: str, operands: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """The outputs of an edge program, those of edges in the order of DGL's numbers.

        Args:
            program: its text.
            operands: as for :func:`fastgraph.ops.edge_program`.
        """
        edges, structure = self.edges(numbered=True), self.structure
        return ops.edge_program(
            program,
            operands,
            edges.index,
            ptr=edges.ptr,
            num_in=structure.num_src,
            num_out=structure.num_dst,
        )


def accepted(module: Any, operator: str, graph: object, feat: object) -> Accepted | Refusal:
    """Features and graph of a call of a layer, or why it must be left to upstream.

    Args:
        module: the layer.
        operator: the name of the operator.
        graph: the caller's.
        feat: the caller's features, one tensor or a pair.
    """
    if not isinstance(graph, DGLGraph):
        return Refusal(f"the graph is a {type(graph).__name__}")
    first = feat[0] if isinstance(feat, tuple) and feat else feat
    if isinstance(first, Tensor):  # before a new graph is read
        refusal = (
            mode_refusal(first)
            or plain_parameters(module)
            or REGISTRY.refusal(operator, device_type(first), first.dtype)
        )
        if refusal is not None:
            return refusal
    structure = structure_of(graph._graph)
    if isinstance(structure, Refusal):
        return structure
    shared = not isinstance(feat, tuple)
    inputs = _inputs_of(feat, structure, bool(graph.is_block))
    if isinstance(inputs, Refusal):
        return inputs
    refusal = place_refusal(structure.device, structure.num_edges, inputs.src, can_move=True)
    if refusal is not None:
        return refusal
    structure = beside_features(structure, inputs.src)
    if getattr(module, "_allow_zero_in_degree", True):
        return Accepted(inputs, shared, structure, None)
    plain = structure.plain()
    if plain.lonely is not None:
        return Refusal("nodes without incoming edges, which the layer does not allow")
    return Accepted(inputs, shared, structure, plain)


def _inputs_of(feat: object, structure: Structure, is_block: bool) -> Inputs | Refusal:
    given = feat if isinstance(feat, tuple) else (feat,)
    pair = given if given is feat else (feat, feat)
    if len(pair) != 2:
        return Refusal(f"features with {len(pair)} entries")
    for features in given:
        refusal = structure.refusal("the features", features)
        if refusal is not None:
            return refusal
        if features.layout != torch.strided or features.dim() != 2:
            return Refusal("features that are not a dense matrix")
    if pair is feat and pair[0].device != pair[1].device:
        return Refusal("features of sources and of destinations on different devices")
    num_dst = structure.num_src if pair is not feat and is_block else structure.num_dst
    rows = pair[0].shape[0], pair[1].shape[0]  # `len` of a tensor takes three times as long
    if rows != (structure.num_src, num_dst):
        return Refusal(
            f"features of {rows[0]} sources and {rows[1]} destinations for a graph with "
            f"{structure.num_src} and {structure.num_dst}"
        )
    return Inputs(*pair)


def edge_values_refusal(
    name: str, values: object, call: Accepted, shape: tuple[int | None, ...]
) -> Refusal | None:
    """Why an argument with values of edges cannot be handed to an operator.

    Args:
        name: of the argument.
        values: what the caller passes.
        call: with which features and graph.
        shape: of the values of one edge; ``None`` for any size.
    """
    refusal = call.structure.refusal(name, values)
    if refusal is not None:
        return refusal
    assert isinstance(values, Tensor)
    like = call.inputs.src
    sizes = tuple(values.shape[1:])
    fits = len(sizes) == len(shape) and all(
        want is None or want == size for want, size in zip(shape, sizes, strict=True)
    )
    if values.layout != torch.strided or values.dim() == 0 or not fits:
        return Refusal(f"{name} of shape {list(values.shape)}")
    if len(values) != call.structure.num_edges:
        return Refusal(f"{name} of {len(values)} edges for a graph with {call.structure.num_edges}")
    if values.dtype != like.dtype or values.device != like.device:
        return Refusal(f"{name} with another dtype or device than features")
    return None


def one_for_each_edge(name: str, values: object, call: Accepted) -> Tensor | Refusal:
    """An argument with one number for each edge, ``[E]`` or ``[E, 1]``, as ``[E]``, or why not."""
    is_column = isinstance(values, Tensor) and values.dim() == 2
    refusal = edge_values_refusal(name, values, call, (1,) if is_column else ())
    if refusal is not None:
        return refusal
    assert isinstance(values, Tensor)
    return values.reshape(-1)


def program_refusal(module: Any, call: Accepted) -> Refusal | None:
    """Why the messages of a layer cannot be those of an edge program.

    Args:
        module: the layer, all of whose parameters make messages.
        call: with which features and graph.
    """
    x = call.inputs.src
    if call.structure.index.shape[0] == 0:
        return Refusal("a graph without edges")
    if x.dtype in HALVES or x.device != call.structure.index.device:
        return Refusal(f"features of {x.dtype} on the {x.device.type}")
    if any(p.dtype != x.dtype for p in module.parameters()):
        return Refusal("parameters with another dtype than features")
    if any(p.numel() == 0 for p in module.parameters()):
        return Refusal("a parameter without values")
    return None
