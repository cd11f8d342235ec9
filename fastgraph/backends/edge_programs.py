"""Edge programs computed by a native library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastgraph.backends.generated import GeneratedKernels
from fastgraph.backends.kernels import GroupedRows
from fastgraph.edge_programs.lowering import lower
from fastgraph.edge_programs.operations import OUTER
from fastgraph.edge_programs.program import Program
from fastgraph.graphs.graph import Csr, Graph
from fastgraph.machine.memory import new_rows
from fastgraph.plugins.backend import Kernel


def edge_program_kernel(
    library: Callable[[], Any], rows: GroupedRows, generated: GeneratedKernels | None = None
) -> Kernel:
    """The kernel of ``edge_program``.

    Args:
        library: gives the native library; asked at each call.
        rows: gives them as the library's kernels visit them.
        generated: gives a kernel for some programs; the others are interpreted.
    """

    def edge_program(
        graph: Graph, operands: Sequence[Tensor], program: Program, transpose: bool
    ) -> list[Tensor]:
        like = operands[0]
        num_rows, num_in = graph.num_dst, graph.num_src
        if transpose:
            num_rows, num_in = num_in, num_rows
        out = [
            new_rows(
                like,
                program.output_shape(output, num_rows, graph.num_edges),
                torch.int32 if output.is_record else None,
            )
            for output in program.outputs
        ]
        lowered = lower(program, rounds=like.dtype.itemsize < 4)
        given = lowered.operands(operands)
        edges = rows_of(graph, operands, program, transpose)
        kernel = None if generated is None else generated(lowered.code, like)
        arguments = (*edges.arguments, num_in, *lowered.code, given, out)
        if kernel is None:
            library().edge_program(*arguments)
        else:
            library().generated_edge_program(*arguments, *kernel)
        return out

    def rows_of(graph: Graph, operands: Sequence[Tensor], program: Program, transpose: bool) -> Csr:
        gathered = [
            tensor
            for operand, tensor in zip(program.operands, operands, strict=True)
            if operand.place == "gathered"
        ]
        # An order of rows is of use where something is gathered; in bits, a sum over all edges
        # depends on it.
        has_total = any(output.reduction in ("total", OUTER) for output in program.outputs)
        ascending = has_total or not gathered
        widest = max(gathered or operands, key=lambda tensor: tensor.shape[-1])
        return rows(graph, widest, transpose=transpose, ascending=ascending)

    return edge_program
