"""Values that a type of each edge chooses: rows of parameters, and products with such matrices.

What a node has for edges of a type is the same for all of them. So it is computed once for each
pair of a node and a type that edges have: these *pairs*, sorted by type, are multiplied by one
matrix after the other. A program gathers pairs in place of nodes, and what aggregating nodes have
by type is an operand of edges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgraph.edge_programs.calls import Call, aten
from fastgraph.edge_programs.dtypes import DTYPES
from fastgraph.edge_programs.recorded import Recorded, Ref, Step


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


def check_numbers(name: str, numbers: Tensor, count: int) -> None:
    """Look for numbers of edges that mean nothing.

    Args:
        name: of what they number.
        numbers: integers ``[E]``.
        count: of what there is.

    Raises:
        IndexError: one is not below it, or is negative.
    """
    if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < count:
        raise IndexError(f"edges have another {name} than 0 to {count - 1}")


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
    check_numbers("node", nodes, num_nodes)
    check_numbers("type", types, num_types)
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


PRODUCTS: dict[type, Callable[[Tensor, Tensor, Pairs], Tensor]] = {}
"""Replacements of :func:`product_by_type` for pairs in subclasses of tensors."""


def product_by_type(x: Tensor, matrices: Tensor, pairs: Pairs) -> Tensor:
    """For each pair the product of its node's row with the matrix of its type.

    Args:
        x: ``[nodes, 1, K]``.
        matrices: ``[types, K, C]``.
        pairs: of nodes and types.

    Returns:
        ``[pairs, 1, C]``.
    """
    by_subclass = PRODUCTS.get(type(pairs.nodes))
    if by_subclass is not None:
        return by_subclass(x, matrices, pairs)
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


@dataclass(frozen=True)
class Choice:
    """The rows of a parameter that the edges' types choose.

    Attributes:
        types: of edges.
        table: the step of the parameter.
        args: of a step that has a row for each edge.
    """

    types: EdgeTypes
    table: int
    args: tuple[Any, ...]


def chosen(call: Call, known: Callable[[Tensor], Recorded], steps: Sequence[Step]) -> Choice | None:
    """The rows that an operator chooses by an argument of a message; ``None`` for any other.

    Args:
        call: of the operator.
        known: gives the knowledge of a tensor.
        steps: all of them.
    """
    given = choice(call)
    if given is None or given[0].dtype not in DTYPES or given[1].dtype is not torch.int64:
        return None
    table, numbers = map(known, given)
    if table.has_rows or table.step is None or numbers.step is None:
        return None
    made = steps[numbers.step]
    if numbers.place != "edge" or numbers.channels or made.function is not None:
        return None
    types = EdgeTypes(made.args[0], table.channels[0])
    return Choice(types, table.step, (Ref(table.step), 0, Ref(numbers.step)))
