"""Random calls of the native functions: run by sanitize.py in a process with the sanitizers.

A valid call must give what the same formula gives in torch. A call with something wrong in it must
raise, or ignore what does no harm; reading or writing out of bounds ends the process. What the
functions trust is left alone: the contents of matrices that build_csr, check_csr and transpose_csr
made, and that there is a row of x for each of their columns.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tvm_ffi
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from fastgraph.backends import reference

REFUSALS = (TypeError, ValueError, IndexError)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
OTHER_DTYPES = (*DTYPES, torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64)
BAD_INDICES = (-1, -(2**31), -(2**63), 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**63 - 1)
BAD_SIZES = (-1, 2**31 - 1, 2**31, 2**32 + 1, -(2**63), 2**63 - 1, None, "3", 2.5)
BAD_OBJECTS = (None, "tensor", 3, 2.5, [1, 2], True)

Call = dict[str, Any]
# The arguments of a valid call, and a check of its result.
Prepared = tuple[Call, Callable[[Any], None]]


class Library:
    """The functions of one library; the call in progress is noted in a file that survives it."""

    def __init__(self, path: Path, journal: Path) -> None:
        self._module = tvm_ffi.load_module(str(path))
        self._journal = os.open(journal, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        self.num_calls = 0
        self.num_refused = 0

    def __call__(self, function: str, *arguments: Any) -> Any:
        text = f"{function}({', '.join(map(describe, arguments))})\n".encode()
        os.pwrite(self._journal, text, 0)
        os.ftruncate(self._journal, len(text))
        self.num_calls += 1
        try:
            return getattr(self._module, function)(*arguments)
        except REFUSALS:
            self.num_refused += 1
            raise


def describe(value: Any) -> str:
    if isinstance(value, Tensor):
        strides = "" if value.is_contiguous() else f" strides {list(value.stride())}"
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{strides}"
    return repr(value) if not isinstance(value, np.ndarray) else f"array{list(value.shape)}"


@dataclass
class Graph:
    """Edges and their compressed rows; `entry` is the edge behind each entry."""

    row: Tensor
    col: Tensor
    num_rows: int
    num_cols: int
    rowptr: Tensor
    index: Tensor
    edge_id: Tensor | None

    @property
    def num_edges(self) -> int:
        return self.row.numel()

    @property
    def entry(self) -> Tensor:
        return torch.arange(self.num_edges) if self.edge_id is None else self.edge_id.long()

    @property
    def arguments(self) -> Call:
        return {
            "rowptr": self.rowptr,
            "col": self.index,
            "edge_id": self.edge_id,
            "longest": self.num_edges,
        }

    @property
    def arguments_t(self) -> Call:
        """The same for functions whose graph is a transposed one."""
        names = ("rowptr_t", "col_t", "edge_id_t", "longest")
        return dict(zip(names, self.arguments.values(), strict=True))

    # What the reference asks of a fastgraph.graph.Graph.

    @property
    def num_src(self) -> int:
        return self.num_cols

    @property
    def num_dst(self) -> int:
        return self.num_rows

    def edge_list(self) -> tuple[Tensor, Tensor]:
        return self.col, self.row


class Draw:
    """Random graphs and tensors; hypothesis chooses sizes and kinds, torch fills them."""

    def __init__(self, data: st.DataObject) -> None:
        # Choices of hypothesis itself repeat and cluster, which serves only to shrink them.
        self.random = data.draw(st.randoms(use_true_random=True))
        self.generator = torch.Generator().manual_seed(self.number(0, 2**31))

    def number(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def flag(self) -> bool:
        return self.random.random() < 0.5

    def one_of(self, *values: Any) -> Any:
        return self.random.choice(values)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def edges(self) -> tuple[Tensor, Tensor, int, int]:
        """Row and column of each edge; most graphs are small, some have rows to be cut."""
        large = self.number(0, 7) == 0
        num_rows = self.number(0, 300 if large else 12)
        num_cols = self.number(0, 300 if large else 12)
        size = self.number(4000, 13_000) if large else self.number(0, 40)
        if num_rows == 0 or num_cols == 0:
            size = 0
        row = self.integers(0, max(num_rows, 1), size)
        col = self.integers(0, max(num_cols, 1), size)
        if large and self.flag():
            row[self.integers(0, 10, size) > 0] = max(num_rows - 1, 0)
        if large and self.flag():
            col[self.integers(0, 10, size) > 0] = 0
        return (row.sort().values if self.flag() else row), col, num_rows, num_cols

    def index_dtype(self) -> torch.dtype:
        return self.one_of(torch.int32, torch.int64)

    def indices(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """The values with this dtype, possibly with gaps between them."""
        values = values.to(dtype)
        step = self.one_of(1, 1, 2, 3)
        if step == 1 or values.numel() == 0:
            return values.clone()
        # The memory ends with the last value.
        spread = torch.empty(step * (values.numel() - 1) + 1, dtype=values.dtype)
        spread[::step] = values
        return spread[::step]

    def width(self) -> int:
        return self.one_of(0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 48, 64, 100, 127, 130)

    def features(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Multiples of 1/4, so that sums and products have no roundings to compare."""
        return (self.integers(-8, 9, *shape) / 4).to(dtype)

    def powers(self, dtype: torch.dtype, size: int) -> Tensor:
        return torch.exp2(self.integers(-2, 2, size).double()).to(dtype)

    def maybe(self, tensor: Tensor) -> Tensor | None:
        return tensor if self.flag() else None

    def with_specials(self, x: Tensor) -> bool:
        """Put NaN and infinities into some tensors; the formulas below are not for these."""
        if x.numel() == 0 or self.number(0, 4):
            return False
        for value in (float("nan"), float("inf"), float("-inf")):
            x.view(-1)[self.number(0, x.numel() - 1)] = value
        return True


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def outputs(num_rows: int, num_edges: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.full((num_rows + 1,), -7),
        torch.full((num_edges,), -7, dtype=torch.int32),
        torch.full((num_edges,), -7, dtype=torch.int32),
    )


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    expected = expected.to(actual.dtype)
    assert torch.equal(actual, expected), f"got {actual}, expected {expected}"


def assert_near(actual: Tensor, expected: Tensor, magnitude: float, what: str) -> None:
    """For results with roundings in terms of a magnitude, where a wrong row changes more than that.

    A gradient is the difference of such terms, and can be much smaller than they are.
    """
    eps = 2e-5 if accumulator(actual.dtype) == torch.float32 else 1e-12
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    bound = 2 * torch.finfo(actual.dtype).eps * expected.abs() + eps * (largest + magnitude)
    error = (actual.double() - expected).abs()
    assert bool((error <= bound).all()), f"{what}: got {actual}, expected {expected}"


# Each function below makes a valid call, and returns it with a check of what it wrote.


def build_csr(lib: Library, draw: Draw) -> Prepared:
    row, col, num_rows, num_cols = draw.edges()
    dtype = draw.index_dtype()
    rowptr, index, edge_id = outputs(num_rows, row.numel())
    call = {
        "row": draw.indices(row, dtype),
        "col": draw.indices(col, dtype),
        "num_rows": num_rows,
        "num_cols": num_cols,
        "rowptr": rowptr,
        "col_out": index,
        "edge_id": edge_id,
    }

    def check(in_order: Any) -> None:
        order = row.argsort(stable=True)
        assert in_order == torch.equal(order, torch.arange(row.numel()))
        count = torch.bincount(row, minlength=num_rows)
        assert_equal(rowptr, torch.cat([torch.zeros(1, dtype=torch.int64), count.cumsum(0)]))
        assert_equal(index, col[order])
        if not in_order:
            assert_equal(edge_id, order)

    return call, check


def built(lib: Library, draw: Draw) -> Graph:
    row, col, num_rows, num_cols = draw.edges()
    rowptr, index, edge_id = outputs(num_rows, row.numel())
    in_order = lib("build_csr", row, col, num_rows, num_cols, rowptr, index, edge_id)
    return Graph(row, col, num_rows, num_cols, rowptr, index, None if in_order else edge_id)


def transposed(lib: Library, graph: Graph) -> Graph:
    rowptr, index, edge_id = outputs(graph.num_cols, graph.num_edges)
    lib("transpose_csr", *graph.arguments.values(), graph.num_cols, rowptr, index, edge_id)
    return Graph(graph.col, graph.row, graph.num_cols, graph.num_rows, rowptr, index, edge_id)


def check_csr(lib: Library, draw: Draw) -> Prepared:
    graph, dtype = built(lib, draw), draw.index_dtype()
    rowptr, index, _ = outputs(graph.num_rows, graph.num_edges)
    call = {
        "ptr": draw.indices(graph.rowptr, dtype),
        "index": draw.indices(graph.index, dtype),
        "num_rows": graph.num_rows,
        "num_cols": graph.num_cols,
        "rowptr": rowptr,
        "col_out": index,
    }

    def check(_: Any) -> None:
        assert_equal(rowptr, graph.rowptr)
        assert_equal(index, graph.index)

    return call, check


def transpose_csr(lib: Library, draw: Draw) -> Prepared:
    graph = built(lib, draw)
    rowptr, index, edge_id = outputs(graph.num_cols, graph.num_edges)
    call = graph.arguments | {
        "num_cols": graph.num_cols,
        "rowptr_t": rowptr,
        "col_t": index,
        "edge_id_t": edge_id,
    }

    def check(_: Any) -> None:
        order = graph.index.argsort(stable=True)
        assert_equal(index, graph.row[graph.entry][order])
        assert_equal(edge_id, graph.entry[order])
        assert_equal(rowptr.diff(), torch.bincount(graph.col, minlength=graph.num_cols))

    return call, check


def spmm(lib: Library, draw: Draw) -> Prepared:
    graph, width, dtype = built(lib, draw), draw.width(), draw.one_of(*DTYPES)
    scale = accumulator(dtype)
    weight = draw.maybe(draw.features(dtype, graph.num_edges))
    row_scale = draw.maybe(draw.powers(scale, graph.num_rows))
    col_scale = draw.maybe(draw.powers(scale, graph.num_cols))
    x = draw.features(dtype, graph.num_cols, width)
    special = draw.with_specials(x)
    out = torch.full((graph.num_rows, width), 77.0, dtype=dtype)
    call = graph.arguments | {
        "weight": weight,
        "row_scale": row_scale,
        "col_scale": col_scale,
        "x": x,
        "out": out,
    }

    def check(_: Any) -> None:
        messages = x.double()[graph.col]
        if weight is not None:
            messages *= weight.double()[:, None]
        if col_scale is not None:
            messages *= col_scale.double()[graph.col, None]
        total = torch.zeros(graph.num_rows, width, dtype=torch.float64)
        total.index_add_(0, graph.row, messages)
        if row_scale is not None:
            total *= row_scale.double()[:, None]
        if not special:
            assert_equal(out, total)

    return call, check


def sddmm(lib: Library, draw: Draw) -> Prepared:
    graph, width, dtype = built(lib, draw), draw.width(), draw.one_of(*DTYPES)
    row_scale = draw.maybe(draw.powers(accumulator(dtype), graph.num_rows))
    grad = draw.features(dtype, graph.num_rows, width)
    x = draw.features(dtype, graph.num_cols, width)
    special = draw.with_specials(x)
    out = torch.full((graph.num_edges,), 77.0, dtype=dtype)
    call = graph.arguments | {"row_scale": row_scale, "grad": grad, "x": x, "out": out}

    def check(_: Any) -> None:
        product = (grad.double()[graph.row] * x.double()[graph.col]).sum(1)
        if row_scale is not None:
            product *= row_scale.double()[graph.row]
        if not special:
            assert_equal(out, product)

    return call, check


@dataclass
class Extremum:
    """A largest or smallest value per row and what torch says about it."""

    out: Tensor
    ties: Tensor
    argument: Tensor


def extremum(graph: Graph, weight: Tensor | None, is_max: bool, x: Tensor) -> Extremum:
    row, entry = graph.row[graph.entry], graph.entry
    messages = x.double()[graph.index.long()]
    if weight is not None:
        messages *= weight.double()[entry, None]
    index = row[:, None].expand_as(messages)
    out = torch.zeros(graph.num_rows, x.shape[1], dtype=torch.float64)
    reduce = "amax" if is_max else "amin"
    out = out.scatter_reduce(0, index, messages, reduce, include_self=False)
    best = messages == out[row]
    ties = torch.zeros(out.shape, dtype=torch.int64).scatter_add(0, index, best.long())
    ties += (out == 0) & (graph.rowptr.diff() > 0)[:, None]
    # Among equals the first entry wins.
    position = torch.where(best, torch.arange(len(row))[:, None], len(row))
    first = torch.full(out.shape, len(row)).scatter_reduce(0, index, position, "amin")
    argument = torch.cat([entry, torch.tensor([-1])])[first]
    return Extremum(out, ties, argument)


def segment_extremum(lib: Library, draw: Draw) -> Prepared:
    graph, width, dtype = built(lib, draw), draw.width(), draw.one_of(*DTYPES)
    weight = draw.maybe(draw.features(dtype, graph.num_edges))
    x = draw.features(dtype, graph.num_cols, width)
    special = draw.with_specials(x)
    out = torch.full((graph.num_rows, width), 77.0, dtype=dtype)
    record = torch.full(out.shape, -77, dtype=torch.int32)
    recorded, is_max = draw.one_of(None, "ties", "argument"), draw.flag()
    call = graph.arguments | {
        "weight": weight,
        "is_max": is_max,
        "x": x,
        "out": out,
        "ties": record if recorded == "ties" else None,
        "argument": record if recorded == "argument" else None,
    }

    def check(_: Any) -> None:
        if special:
            return
        expected = extremum(graph, weight, is_max, x)
        assert_equal(out, expected.out)
        if recorded is not None:
            assert_equal(record, getattr(expected, recorded))

    return call, check


def divide_by_ties(lib: Library, draw: Draw) -> Prepared:
    dtype, width = draw.one_of(*DTYPES), draw.width()
    grad = draw.features(dtype, draw.number(0, draw.one_of(4, 600)), width)
    ties = torch.exp2(draw.integers(0, 5, *grad.shape).double()).int()
    special = draw.with_specials(grad)
    if draw.flag():
        ties = ties * draw.integers(-1, 2, *grad.shape).int()
        special = True
    share = torch.full_like(grad, 77.0)

    def check(_: Any) -> None:
        if not special:
            assert_equal(share, grad.double() / ties)

    return {"grad": grad, "ties": ties, "share": share}, check


def segment_extremum_backward(lib: Library, draw: Draw) -> Prepared:
    graph, width, dtype = built(lib, draw), draw.width(), draw.one_of(*DTYPES)
    flipped = transposed(lib, graph)
    weight = draw.maybe(draw.features(dtype, graph.num_edges))
    x = draw.features(dtype, graph.num_cols, width)
    special = draw.with_specials(x)
    forward = extremum(graph, weight, draw.flag(), x)
    out = forward.out.to(dtype)
    grad = draw.features(dtype, graph.num_rows, width)
    argument = draw.maybe(forward.argument.int())
    grad_x = torch.full_like(x, 77.0)
    call = flipped.arguments_t | {
        "weight": weight,
        "x": x,
        "out": out,
        "grad": grad,
        "argument": argument,
        "grad_x": grad_x,
    }

    def check(_: Any) -> None:
        factor = torch.ones(graph.num_edges, 1, dtype=torch.float64)
        if weight is not None:
            factor = weight.double()[:, None]
        if argument is not None:
            won = argument.long()[graph.row] == torch.arange(graph.num_edges)[:, None]
        else:
            won = factor * x.double()[graph.col] == forward.out[graph.row]
        expected = torch.zeros(x.shape, dtype=torch.float64)
        expected.index_add_(0, graph.col, factor * won * grad.double()[graph.row])
        if not special:
            assert_equal(grad_x, expected)

    return call, check


def head_scores(lib: Library, draw: Draw) -> Prepared:
    dtype, heads, width = draw.one_of(*DTYPES), draw.number(0, 4), draw.width()
    nodes, count = draw.number(0, draw.one_of(5, 600)), draw.number(0, 3)
    x, att = draw.features(dtype, nodes, heads, width), draw.features(dtype, count, heads, width)
    special = draw.with_specials(x)
    scores = torch.full((nodes, count, heads), 77.0, dtype=dtype)

    def check(_: Any) -> None:
        if not special:
            assert_equal(scores, reference.head_scores(x.double(), att.double()))

    return {"x": x, "att": att, "scores": scores}, check


def head_scores_backward(lib: Library, draw: Draw) -> Prepared:
    call, _ = head_scores(lib, draw)
    x, att, scores = call.values()
    special = not bool(x.isfinite().all())
    grad = draw.features(scores.dtype, *scores.shape)
    grad_x, grad_att = torch.full_like(x, 77.0), torch.full_like(att, 77.0)

    def check(_: Any) -> None:
        if not special:
            expected = reference.head_scores_backward(x.double(), att.double(), grad.double())
            assert_equal(grad_x, expected[0])
            assert_equal(grad_att, expected[1])

    return {"x": x, "att": att, "grad": grad, "grad_x": grad_x, "grad_att": grad_att}, check


class Attention:
    """An attention operator on random inputs, and what the reference makes of them in float64."""

    def __init__(self, lib: Library, draw: Draw, operator: str) -> None:
        self.graph = graph = built(lib, draw)
        self.flipped = transposed(lib, graph)
        dtype, heads, width = draw.one_of(*DTYPES), draw.number(0, 4), draw.width()
        edge_dim = draw.one_of(None, None, 0, 1, 3, 16, 20)

        def features(count: int, *shape: int) -> Tensor:
            return draw.features(dtype, count, *shape)

        edge = None if edge_dim is None else features(graph.num_edges, edge_dim)
        self.inputs: dict[str, Tensor | None]
        if operator == "gatv2":
            self.inputs = {
                "x_src": features(graph.num_cols, heads, width),
                "x_dst": features(graph.num_rows, heads, width),
                "att": features(1, heads, width),
                "edge": edge,
                "weight_edge": None if edge is None else features(heads, edge_dim, width),
            }
        elif operator == "gat":
            self.inputs = {
                "x": features(graph.num_cols, heads, width),
                "score_src": features(graph.num_cols, heads),
                "score_dst": features(graph.num_rows, heads),
                "score_edge": draw.maybe(features(graph.num_edges, heads)),
            }
        else:
            self.inputs = {
                "query": features(graph.num_rows, heads, width + (edge_dim or 0)),
                "key": features(graph.num_cols, heads, width),
                "value": features(graph.num_cols, heads, width),
                "edge": edge,
            }
        given = [tensor for tensor in self.inputs.values() if tensor is not None]
        self.special = draw.with_specials(draw.one_of(*given))
        self.options = {
            # A power of 2, so that scores have no roundings.
            "scale" if operator == "attention" else "slope": 0.25,
            "dropout": draw.one_of(0.0, 0.0, 0.3, 1.0),
            "seed": draw.number(-(2**63), 2**63 - 1),
        }
        wide = [None if t is None else t.double() for t in self.inputs.values()]
        arguments = (False, *self.options.values())
        out, stats, alpha = getattr(reference, operator)(graph, *wide, *arguments, True)
        self.grad = draw.features(dtype, *out.shape)
        self.alpha = draw.maybe(draw.features(dtype, *alpha.shape))
        self.stats = stats.to(accumulator(dtype))
        gradients = getattr(reference, f"{operator}_backward")(
            graph,
            self.grad.double(),
            None if self.alpha is None else self.alpha.double(),
            *wide,
            stats,
            *arguments,
        )
        self.expected = {"out": out, "stats": stats, "alpha": alpha}
        for name, gradient in zip(self.inputs, gradients, strict=True):
            self.expected[f"grad_{name}"] = gradient
        # A product of two rows, or the projection of an edge's.
        self.magnitude = 4.0 * (1 + width) * (1 + (edge_dim or 0))

    def forward(self) -> Prepared:
        outputs = {
            "out": torch.full_like(self.grad, 77.0),
            "stats": torch.full_like(self.stats, 77.0),
            "alpha": None if self.alpha is None else torch.full_like(self.alpha, 77.0),
        }
        call = self.graph.arguments | self.inputs | self.options | outputs
        return call, lambda _: self._check(outputs, 1)

    def backward_dst(self, *names: str) -> Prepared:
        delta = torch.full(self.stats.shape[:2], 77.0, dtype=self.stats.dtype)
        return self._backward(self.graph.arguments, delta, names)

    def backward_src(self, lib: Library, function: str, *names: str) -> Prepared:
        others = [name for name in self.inputs if name not in names]
        call, _ = self.backward_dst(*others)
        lib(f"{function}_backward_dst", *call.values())
        return self._backward(self.flipped.arguments_t, call["delta"], names)

    def _backward(self, matrix: Call, delta: Tensor, names: Iterable[str]) -> Prepared:
        """The pass that writes the gradients of the named inputs."""
        outputs = {f"grad_{name}": self._gradient(name) for name in names}
        given = {"stats": self.stats, "grad": self.grad, "grad_alpha": self.alpha, "delta": delta}
        call = matrix | self.inputs | self.options | given | outputs
        return call, lambda _: self._check(outputs, self.magnitude)

    def _gradient(self, name: str) -> Tensor | None:
        tensor = self.inputs[name]
        if tensor is None:
            return None
        if name == "edge":  # added to by each head
            return torch.zeros_like(tensor, dtype=self.stats.dtype)
        return torch.full_like(tensor, 77.0)

    def _check(self, outputs: dict[str, Tensor | None], magnitude: float) -> None:
        for name, tensor in outputs.items():
            if tensor is not None and not self.special:
                assert_near(tensor, self.expected[name], magnitude, name)


def gatv2(lib: Library, draw: Draw) -> Prepared:
    return Attention(lib, draw, "gatv2").forward()


def gatv2_backward_dst(lib: Library, draw: Draw) -> Prepared:
    return Attention(lib, draw, "gatv2").backward_dst("x_dst", "att", "edge", "weight_edge")


def gatv2_backward_src(lib: Library, draw: Draw) -> Prepared:
    return Attention(lib, draw, "gatv2").backward_src(lib, "gatv2", "x_src")


def gat(lib: Library, draw: Draw) -> Prepared:
    return Attention(lib, draw, "gat").forward()


def gat_backward_dst(lib: Library, draw: Draw) -> Prepared:
    return Attention(lib, draw, "gat").backward_dst("score_dst", "score_edge")


def gat_backward_src(lib: Library, draw: Draw) -> Prepared:
    return Attention(lib, draw, "gat").backward_src(lib, "gat", "x", "score_src")


def attention(lib: Library, draw: Draw) -> Prepared:
    return Attention(lib, draw, "attention").forward()


def attention_backward_dst(lib: Library, draw: Draw) -> Prepared:
    return Attention(lib, draw, "attention").backward_dst("query", "edge")


def attention_backward_src(lib: Library, draw: Draw) -> Prepared:
    return Attention(lib, draw, "attention").backward_src(lib, "attention", "key", "value")


CALLS = (
    build_csr,
    check_csr,
    transpose_csr,
    spmm,
    sddmm,
    segment_extremum,
    divide_by_ties,
    segment_extremum_backward,
    head_scores,
    head_scores_backward,
    gatv2,
    gatv2_backward_dst,
    gatv2_backward_src,
    gat,
    gat_backward_dst,
    gat_backward_src,
    attention,
    attention_backward_dst,
    attention_backward_src,
)
# These take no tensor.
NOT_CALLED = {"max_threads", "run_serially"}
Make = Callable[[Library, Draw], Prepared]
# Nothing that these two are given is trusted.
BUILDERS = {"build_csr", "check_csr"}


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def spoiled_tensor(draw: Draw, tensor: Tensor, may_shrink: bool) -> Any:
    """A tensor like this one with something wrong about it."""
    kinds = ["object", "dtype", "more_dims", "fewer_dims", "grown", "gaps", "flipped"]
    if may_shrink and tensor.dim() and len(tensor):
        kinds += ["shrunk", "nothing"]
    if tensor.dim() >= 2:
        kinds += ["turned", "wider"]
    kind = draw.one_of(*kinds)
    if kind == "object":
        return draw.one_of(*BAD_OBJECTS)
    if kind == "dtype":
        return tensor.to(draw.one_of(*OTHER_DTYPES, torch.complex64, torch.float8_e4m3fn))
    if kind == "more_dims":
        return tensor[None] if draw.flag() else tensor[..., None]
    if kind == "fewer_dims":
        return tensor[0].clone() if len(tensor) else torch.zeros((), dtype=tensor.dtype)
    if kind == "grown":
        return torch.cat([tensor, tensor[-1:]]) if len(tensor) else tensor.new_zeros(1)
    if kind == "gaps":
        return tensor.repeat_interleave(2, -1)[..., ::2]
    if kind == "flipped":
        if tensor.dtype == torch.bfloat16:
            return tensor[:, None]
        return tensor.numpy()[::-1]
    if kind == "shrunk":
        return tensor[:-1].clone()
    if kind == "nothing":
        return tensor[:0].clone()
    if kind == "wider":
        return torch.cat([tensor, tensor[:, :1]], 1) if tensor.shape[1] else tensor.new_zeros(1, 1)
    return tensor.transpose(0, -1)


def spoiled(draw: Draw, function: str, call: Call, name: str) -> Any:
    value = call[name]
    if value is None:
        return draw.one_of("tensor", 3, torch.zeros(3), torch.zeros(2, 2, dtype=torch.int32))
    if not isinstance(value, Tensor):
        return draw.one_of(*BAD_SIZES, 0, int(value) + 1, int(value) - 1)
    if name in ("row", "col", "ptr", "index") and function in BUILDERS and draw.flag():
        if value.numel() == 0:
            return value
        changed = value.clone(memory_format=torch.contiguous_format)
        bad = draw.one_of(*BAD_INDICES, call["num_rows"], call["num_cols"], 0, 1)
        info = torch.iinfo(value.dtype)
        changed[draw.number(0, value.numel() - 1)] = max(info.min, min(info.max, bad))
        return changed
    # What says how many rows the gathered features should have, where they are not trusted.
    tells = {"col_scale", "rowptr_t", "score_src", "value"}
    told = name not in ("x", "x_src") or any(call.get(other) is not None for other in tells)
    return spoiled_tensor(draw, value, told)


def longs(values: Tensor | np.ndarray) -> Tensor:
    return torch.as_tensor(values if isinstance(values, Tensor) else values.copy()).long()


def is_matrix(call: Call) -> bool:
    """Whether arguments that check_csr has accepted describe a compressed matrix."""
    ptr, index = longs(call["ptr"]), longs(call["index"])
    spans = int(ptr[0]) == 0 and int(ptr[-1]) == index.numel() and bool((ptr.diff() >= 0).all())
    return spans and within(index, call["num_cols"])


def within(index: Tensor, size: int) -> bool:
    return bool(((index >= 0) & (index < size)).all())


def valid_call(lib: Library, make: Make, data: st.DataObject) -> None:
    draw = Draw(data)
    call, check = make(lib, draw)
    with threads(draw.one_of(1, 2, 4)):
        result = lib(make.__name__, *call.values())
    check(result)


def invalid_call(lib: Library, make: Make, data: st.DataObject) -> None:
    draw, function = Draw(data), make.__name__
    call, _ = make(lib, draw)
    names = {draw.one_of(*call)}
    if function in BUILDERS and draw.flag():
        names.add(draw.one_of(*call))
    for name in sorted(names):
        call[name] = spoiled(draw, function, call, name)
    arguments = list(call.values())
    if draw.number(0, 30) == 0:
        arguments = arguments[: draw.number(0, len(arguments) - 1)]
    with threads(draw.one_of(1, 2, 4)):
        try:
            lib(function, *arguments)
        except REFUSALS:
            return
    # Accepted: then whatever was changed must still describe a graph.
    assert len(arguments) == len(call)
    if function == "check_csr":
        assert is_matrix(call)
    if function == "build_csr":
        assert within(longs(call["row"]), call["num_rows"])
        assert within(longs(call["col"]), call["num_cols"])


def repeat(body: Callable[..., None], lib: Library, make: Make, times: int, start: int) -> None:
    """Run a random call many times, the same ones for the same start."""

    # Smaller failing calls would not be worth the time: they are small already.
    @settings(
        max_examples=times,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @seed(start)
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        body(lib, make, data)

    run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path)
    parser.add_argument("journal", type=Path, help="file that holds the call in progress")
    parser.add_argument("--examples", type=int, required=True, help="calls of each kind")
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    exported = re.findall(rb"\0__tvm_ffi_(\w+)\0", options.library.read_bytes())
    left_out = {name.decode() for name in exported} - NOT_CALLED - {make.__name__ for make in CALLS}
    if left_out or not exported:
        raise SystemExit(f"functions that nothing here calls: {sorted(left_out)}")
    lib = Library(options.library, options.journal)
    for make in CALLS:
        repeat(valid_call, lib, make, options.examples, options.seed)
        repeat(invalid_call, lib, make, 2 * options.examples, options.seed)
    print(f"{lib.num_calls} calls, {lib.num_refused} refused")


if __name__ == "__main__":
    main()
