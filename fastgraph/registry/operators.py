"""The operators: what each takes, and how it calls its kernel.

Of attention operators everything else about their arguments follows from this: the schemas that
torch knows, the checks of shapes, the signatures that kernels must have, and which pass of a native
library writes which gradient. Of the others the signatures of their kernels are here, and the rest
is in their files in ``ops/``. :mod:`fastgraph.plugins.backend` says what kernels compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

Size = int | str
"""A number, or the name of a size. Equal names stand for equal sizes."""


class Signature(NamedTuple):
    """The arguments of a kernel: by position, and by keyword."""

    positional: tuple[str, ...]
    keywords: tuple[str, ...] = ()


class OperandShape(NamedTuple):
    """A tensor that an operator takes.

    Attributes:
        name: in schemas, signatures and messages.
        shape: ``sources`` are the nodes whose features are gathered, ``destinations`` those that
            aggregate them, whichever way edges point. A sum of sizes reads ``"a + b"``.
        optional: whether it may be ``None``.
        counts: whether it holds integers, which have no gradient: rows of another operand.
    """

    name: str
    shape: tuple[Size, ...]
    optional: bool = False
    counts: bool = False


@dataclass(frozen=True)
class Attention:
    """A weighted sum over neighbourhoods, with the softmax of scores as weights.

    Attributes:
        name: of the operator and of its native functions.
        operands: the tensors that it differentiates by, and integers that go with them.
        option: the number that its scores take, as kernels call it.
        schema: the same as callers call it.
        out: the shape of the output.
        made: shapes of what the operator computes first of each node, from its row and parameters.
        has_signs: whether the gradients of sources depend on the sign that each channel has at each
            edge. Where edges have features, the pass over destinations leaves it for that over
            sources.
        adds_edges: whether features of edges, ``edge``, are added up beside those of sources.
        together: names of optional operands of which all are given, or none.
    """

    name: str
    operands: tuple[OperandShape, ...]
    option: str
    schema: str
    out: tuple[Size, ...] = ("destinations", "heads", "channels")
    made: tuple[tuple[Size, ...], ...] = ()
    has_signs: bool = False
    adds_edges: bool = False
    together: tuple[str, ...] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of all operands."""
        return tuple(operand.name for operand in self.operands)

    @cached_property
    def shapes(self) -> tuple[tuple[Size, ...], ...]:
        """Of all operands."""
        return tuple(operand.shape for operand in self.operands)

    @cached_property
    def places(self) -> tuple[str, ...]:
        """For each operand what its rows belong to, or their number if it is a parameter."""
        return tuple(str(operand.shape[0]) for operand in self.operands)

    @cached_property
    def optional(self) -> tuple[int, ...]:
        """Positions of the operands that may be left out."""
        return tuple(i for i, operand in enumerate(self.operands) if operand.optional)

    @cached_property
    def differentiable(self) -> tuple[int, ...]:
        """Positions of the operands that may have a gradient."""
        return tuple(i for i, operand in enumerate(self.operands) if not operand.counts)

    @cached_property
    def checked(self) -> tuple[tuple[OperandShape, int], ...]:
        """Operands and their positions, those with sums of sizes behind what these are sums of."""
        found = [(operand, position) for position, operand in enumerate(self.operands)]
        return tuple(sorted(found, key=lambda item: any(" + " in str(s) for s in item[0].shape)))

    @cached_property
    def forward(self) -> Signature:
        """Of the kernel ``name``."""
        options = ("transpose", self.option, "dropout", "seed", "weights")
        return Signature(("graph", *self.names, *options), ("addend",))

    @cached_property
    def backward(self) -> Signature:
        """Of the kernel ``name + "_backward"``."""
        options = ("transpose", self.option, "dropout", "seed")
        gradients = ("grad", "grad_alpha", "grad_logsum")
        return Signature(("graph", *gradients, *self.names, "stats", *options), ("wanted",))

    @cached_property
    def gathered(self) -> int:
        """The position of an operand whose rows are gathered."""
        return next(i for i, operand in enumerate(self.operands) if operand.shape[0] == "sources")

    @cached_property
    def summed(self) -> int:
        """The position of the operand whose rows are added up, with the weights as factors."""
        rows = ("sources", "heads", "channels")
        return max(i for i, operand in enumerate(self.operands) if operand.shape == rows)

    @cached_property
    def by_source(self) -> tuple[bool, ...]:
        """For each operand whether its gradient is summed at sources.

        Gradients of the others are summed at destinations, with which edges are visited first.
        """
        return tuple(operand.shape[0] == "sources" for operand in self.operands)

    @cached_property
    def shared_by_heads(self) -> tuple[bool, ...]:
        """For each operand whether it belongs to edges, and all heads add to its gradient."""
        return tuple(
            operand.shape[0] == "edges" and "heads" not in operand.shape
            for operand in self.operands
        )

    @cached_property
    def has_parameters(self) -> bool:
        """True if the gradient of an operand is a sum over all rows.

        That of a table is one over edges, in their own order.
        """
        rows = ("sources", "destinations", "edges", "types")
        return any(operand.shape[0] not in rows for operand in self.operands)


GATV2 = Attention(
    "gatv2",
    (
        OperandShape("x_src", ("sources", "heads", "channels")),
        OperandShape("x_dst", ("destinations", "heads", "channels")),
        OperandShape("att", (1, "heads", "channels")),
        OperandShape("edge", ("edges", "edge_dim"), optional=True),
        OperandShape("weight_edge", ("heads", "edge_dim", "channels"), optional=True),
    ),
    option="slope",
    schema="float negative_slope",
    has_signs=True,
    together=("edge", "weight_edge"),
)
GAT = Attention(
    "gat",
    (
        OperandShape("x", ("sources", "heads", "channels")),
        OperandShape("score_src", ("sources", "heads")),
        OperandShape("score_dst", ("destinations", "heads")),
        OperandShape("score_edge", ("edges", "heads"), optional=True),
    ),
    option="slope",
    schema="float negative_slope",
)
GAT_WITH_SCORES = Attention(
    "gat_with_scores",
    (GAT.operands[0], OperandShape("att", (2, "heads", "channels")), GAT.operands[3]),
    option=GAT.option,
    schema=GAT.schema,
    made=tuple(operand.shape for operand in GAT.operands[1:3]),
)
"""Which scores nodes itself, and has no kernel of its own."""
ATTENTION = Attention(
    "attention",
    (
        OperandShape("query", ("destinations", "heads", "channels + edge_dim")),
        OperandShape("key", ("sources", "heads", "channels")),
        OperandShape("value", ("sources", "heads", "channels")),
        OperandShape("edge", ("edges", "edge_dim"), optional=True),
    ),
    option="scale",
    schema="float scale",
    out=("destinations", "heads", "channels + edge_dim"),
    adds_edges=True,
)
EDGE_ATTENTION = Attention(
    "edge_attention",
    (
        OperandShape("query", ("destinations", "heads", "channels")),
        *ATTENTION.operands[1:],
        GATV2.operands[4],
    ),
    option=ATTENTION.option,
    schema=ATTENTION.schema,
    adds_edges=True,
    together=GATV2.together,
)
"""Which not every backend has: layers may do the same around :data:`ATTENTION`."""
BIASED_ATTENTION = Attention(
    "biased_attention",
    (
        *ATTENTION.operands,
        OperandShape("bias", ("edges", "heads"), optional=True),
        OperandShape("table", ("types", "heads"), optional=True),
        OperandShape("bias_index", ("edges",), optional=True, counts=True),
    ),
    option=ATTENTION.option,
    schema=ATTENTION.schema,
    out=ATTENTION.out,
    adds_edges=True,
    together=("table", "bias_index"),
)
"""That of :func:`fastgraph.ops.attention` with a bias, which not every backend has either."""
BLOCK_ATTENTION = Attention(
    "block_attention",
    (
        OperandShape("query", ("destinations", "heads", "channels")),
        *ATTENTION.operands[1:3],
        *BIASED_ATTENTION.operands[5:],
    ),
    option=ATTENTION.option,
    schema=ATTENTION.schema,
    together=BIASED_ATTENTION.together,
)
"""The same without features of edges, by sub-blocks on CPUs and by rows on GPUs."""
ATTENTIONS = (GAT, GATV2, ATTENTION, EDGE_ATTENTION, BIASED_ATTENTION, BLOCK_ATTENTION)


def _signature(positional: str, *keywords: str) -> Signature:
    return Signature(tuple(positional.split()), keywords)


SIGNATURES: dict[str, Signature] = {
    "spmm": _signature("graph x weight reduce transpose"),
    "sddmm": _signature("graph grad x heads reduce transpose"),
    "edge_softmax": _signature("graph score transpose"),
    "edge_softmax_backward": _signature("graph out grad transpose"),
    "segment_reduce": _signature("graph x weight reduce transpose ties"),
    "segment_reduce_backward": _signature("graph grad x weight out record transpose ties"),
    "edge_program": _signature("graph operands program transpose"),
    "dense_attention": _signature(
        "query key value bias ptr key_ptr pair_type scale dropout seed first_head first_pair"
    ),
    "dense_attention_backward": _signature(
        "grad grad_logsum query key value bias ptr key_ptr pair_type out stats scale dropout seed "
        "first_head first_pair wants_bias"
    ),
    "head_scores": _signature("x att"),
    "head_scores_backward": _signature("x att grad", "addend", "wanted"),
}
"""Of the kernels of all operators on features, by name.

They take the graph if they need one, tensors, then options. The reference has a function of each of
these names.
"""
COMPANIONS: dict[str, Signature] = {
    "spmm_coo": _signature("index x weight num_out reduce transpose is_checked"),
    "segment_reduce_coo": _signature("index x weight num_out reduce transpose is_checked ties"),
}
"""Of kernels that a backend may have on the CPU besides one above, which does the same."""
for _operator in ATTENTIONS:
    SIGNATURES[_operator.name] = _operator.forward
    SIGNATURES[f"{_operator.name}_backward"] = _operator.backward
