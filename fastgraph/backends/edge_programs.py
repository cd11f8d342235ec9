"""Edge programs computed by a native library."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgraph.backends.generated import GeneratedKernels
from fastgraph.backends.kernels import GroupedRows
from fastgraph.edge_programs.lowering import Lowered, lower
from fastgraph.edge_programs.operations import OUTER
from fastgraph.edge_programs.program import PLACES, Program
from fastgraph.graphs.graph import Graph
from fastgraph.machine.memory import new_rows
from fastgraph.plugins.backend import Kernel


class _Made(NamedTuple):
    """All that calls of a program have in common.

    Attributes:
        lowered: the program.
        outputs: of each, 0 if it has rows, 1 if it has edges, or ``None``, the sizes of its other
            dimensions, and its dtype, ``None`` for that of operands.
        widest: the number of the operand with the most channels, of those that are gathered if
            some are.
        ascending: true if rows must be in ascending order.
    """

    lowered: Lowered
    outputs: tuple[tuple[int | None, tuple[int, ...], torch.dtype | None], ...]
    widest: int
    ascending: bool


@functools.lru_cache(maxsize=1024)
def _made(program: Program, rounds: bool, by_terms: bool, repeated: tuple[int, ...] = ()) -> _Made:
    outputs = []
    for output in program.outputs:
        # Sizes that stand for themselves.
        *first, width = program.output_shape(output, _ROWS, _EDGES)
        of = (_ROWS, _EDGES).index(first[0]) if first else None
        outputs.append((of, (width,), torch.int32 if output.is_record else None))
    numbered = list(enumerate(program.operands))
    gathered = [(k, operand) for k, operand in numbered if operand.place == "gathered"]
    widest, _ = max(gathered or numbered, key=lambda one: one[1].width)
    # An order of rows is of use where something is gathered; in bits, a sum over all edges
    # depends on it.
    has_total = any(output.reduction in ("total", OUTER) for output in program.outputs)
    ascending = has_total or not gathered
    lowered = lower(program, rounds=rounds, by_terms=by_terms)
    if repeated:
        # The same instructions, of which none minds that an operand changes less often.
        slots = lowered.code.slots.clone()
        slots[list(repeated), 0] = PLACES.index("parameter")
        lowered = lowered._replace(code=lowered.code._replace(slots=slots))
    return _Made(lowered, tuple(outputs), widest, ascending)


_ROWS, _EDGES = -1, -2


def edge_program_kernel(
    library: Callable[[], Any],
    rows: GroupedRows,
    generated: GeneratedKernels | None = None,
    *,
    by_terms: bool = False,
    repeats: bool = False,
) -> Kernel:
    """The kernel of ``edge_program``.

    Args:
        library: gives the native library; asked at each call.
        rows: gives them as the library's kernels visit them.
        generated: gives a kernel for some programs; the others are interpreted.
        by_terms: whether the library can sum products product by product.
        repeats: whether it takes one row for an operand of which all are equal, as a parameter; it
            is copied to all of them otherwise.
    """

    def edge_program(
        graph: Graph, operands: Sequence[Tensor], program: Program, transpose: bool
    ) -> list[Tensor]:
        like = operands[0]
        num_rows, num_in = graph.num_dst, graph.num_src
        if transpose:
            num_rows, num_in = num_in, num_rows
        made = _made(program, like.dtype.itemsize < 4, by_terms)
        widest = operands[made.widest]
        repeated = tuple([k for k, t in enumerate(operands) if not t.is_contiguous()])
        if repeated and repeats:
            made = _made(program, like.dtype.itemsize < 4, by_terms, repeated)
            operands = [t[0] if k in repeated else t for k, t in enumerate(operands)]
        elif repeated:
            operands = [t.contiguous() for t in operands]
        sizes = num_rows, graph.num_edges
        out = [
            new_rows(like, width if of is None else (sizes[of], *width), dtype)
            for of, width, dtype in made.outputs
        ]
        lowered = made.lowered
        given = lowered.operands(operands) if lowered.transposes else operands
        edges = rows(graph, widest, transpose=transpose, ascending=made.ascending)
        kernel = None if generated is None else generated(lowered.code, like)
        arguments = (*edges.arguments, num_in, *lowered.code, given, out)
        if kernel is None:
            library().edge_program(*arguments)
        else:
            library().generated_edge_program(*arguments, *kernel)
        return out

    return edge_program
