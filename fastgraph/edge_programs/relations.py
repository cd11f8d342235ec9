"""Values that a type of each edge chooses: rows of parameters, and products with such matrices.

What a node has for edges of a type is the same for all of them. So it is computed once for each
pair of a node and a type that edges have: these *pairs*, sorted by type, are multiplied by one
matrix after the other. A program gathers pairs in place of nodes, and what aggregating nodes have
by type is an operand of edges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fastgraph.edge_programs.calls import Call, aten
from fastgraph.edge_programs.program import Place

ByType = Literal["row by type", "gathered by type"]
Owner = Place | ByType
"""The places of operands, and pairs of a node in one of them and a type."""

BY_TYPE: dict[Owner, ByType] = {"row": "row by type", "gathered": "gathered by type"}
_PLACE_OF: dict[Owner, Place] = {"row by type": "edge", "gathered by type": "gathered"}


def operand_place(owner: Owner) -> Place:
    """The place of the operand of a program that values of an owner become."""
    return _PLACE_OF.get(owner, owner)  # type: ignore[arg-type]


@dataclass(frozen=True)
class EdgeTypes:
    """The types of edges that a message takes.

    Attributes:
        name: of the argument.
        count: of the types.
    """

    name: str
    count: int


class Pairs(NamedTuple):
    """The pairs of a node and a type that edges have, sorted by type and then by node.

    Attributes:
        nodes: int64 ``[pairs]``.
        counts: of pairs, for each type.
        of_edge: int64 ``[E]``, the pair of each edge.
    """

    nodes: Tensor
    counts: tuple[int, ...]
    of_edge: Tensor

    @property
    def nbytes(self) -> int:
        """The memory that they take."""
        return self.nodes.nbytes + self.of_edge.nbytes


def pairs_of(nodes: Tensor, types: Tensor, num_nodes: int, num_types: int) -> Pairs:
    """The pairs that edges have.

    Args:
        nodes: int64 or int32 ``[E]``, the node of each edge.
        types: int64 ``[E]``, its type.
        num_nodes: as many as there are.
        num_types: as many as there are.

    Raises:
        IndexError: a node or a type is no such number.
    """
    for name, numbers, count in (("node", nodes, num_nodes), ("type", types, num_types)):
        if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < count:
            raise IndexError(f"edges have another {name} than 0 to {count - 1}")
    key = types * num_nodes + nodes
    size = num_nodes * num_types
    if size <= 8 * key.numel():  # then no sorting is needed
        is_there = torch.zeros(size, dtype=torch.bool, device=key.device)
        is_there[key] = True
        pairs = is_there.nonzero().squeeze(1)
        of_edge = (is_there.cumsum(0) - 1)[key]
    else:
        pairs, of_edge = key.unique(return_inverse=True)
    counts = torch.bincount(pairs // max(num_nodes, 1), minlength=num_types)
    return Pairs(pairs % max(num_nodes, 1), tuple(counts.tolist()), of_edge)


def product_by_type(x: Tensor, matrices: Tensor, pairs: Pairs) -> Tensor:
    """For each pair the product of its node's row with the matrix of its type.

    Args:
        x: ``[nodes, 1, K]``.
        matrices: ``[types, K, C]``.
        pairs: of nodes and types.

    Returns:
        ``[pairs, 1, C]``.
    """
    rows = x.index_select(0, pairs.nodes).squeeze(1)
    products = [
        rows_of_type @ matrix
        for rows_of_type, matrix in zip(rows.split(pairs.counts), matrices.unbind(), strict=True)
        if rows_of_type.shape[0]
    ]
    if not products:  # no edges; gradients are zeros all the same
        return torch.bmm(rows.unsqueeze(1), matrices[:1].expand(0, -1, -1))
    return torch.cat(products).unsqueeze(1)


def choice(call: Call) -> tuple[Tensor, Tensor] | None:
    """The tensor whose rows an operator chooses, and their numbers; ``None`` for another one."""
    given = call.given
    if call.operation is aten.index_select and given["dim"] in (0, -given["self"].dim()):
        return given["self"], given["index"]
    if call.operation is aten.index and len(given["indices"]) == 1:
        return given["self"], given["indices"][0]
    if call.operation is aten.embedding and (
        given["padding_idx"] == -1 and not given["scale_grad_by_freq"] and not given["sparse"]
    ):
        return given["weight"], given["indices"]
    return None
