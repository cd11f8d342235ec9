"""A valid call of each native function with random arguments, and a check of what it wrote.

Those of attention are in ``attention_calls.py``, ``dense_attention_calls.py`` and
``block_attention_calls.py``, those of samplers in ``sampling_calls.py``, those of distances in
``shortest_paths_calls.py``, and that of tokens in ``token_calls.py``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastgraph.backends import reference
from fastgraph.backends.building import BY_TORCH
from fastgraph.backends.dropout import dropout_factors as by_torch
from fastgraph.backends.reference import num_shares
from fastgraph.edge_programs.lowering import lower
from fastgraph.edge_programs.program import parse
from fastgraph.graphs.tiles import Tiles
from fastgraph.plugins.backend import accumulator
from tests.graphs import mixed_communities
from tests.native.attention_calls import ATTENTION_CALLS
from tests.native.block_attention_calls import BLOCK_ATTENTION_CALLS
from tests.native.coo_calls import COO_CALLS
from tests.native.dense_attention_calls import DENSE_ATTENTION_CALLS
from tests.native.drawing import (
    Draw,
    Graph,
    Library,
    Prepared,
    assert_equal,
    assert_near,
    built,
    compressed,
    outputs,
)
from tests.native.sampling_calls import SAMPLING_CALLS
from tests.native.shortest_paths_calls import SHORTEST_PATHS_CALLS
from tests.native.token_calls import TOKEN_CALLS


def checksum(lib: Library, draw: Draw) -> Prepared:
    values = draw.integers(0, 100, draw.number(0, draw.one_of(3, 100, 9000)))
    tensor = draw.indices(
        values, draw.one_of(torch.int64, torch.int32, torch.uint8, torch.bfloat16)
    )
    if draw.flag():
        tensor = torch.stack([tensor, tensor])[:, : draw.number(0, len(tensor))]

    def check(found: Any) -> None:
        copy = tensor.clone(memory_format=torch.contiguous_format)
        assert found == lib("checksum", copy)
        if copy.numel():
            copy.view(-1)[draw.number(0, copy.numel() - 1)] += 1
            assert found != lib("checksum", copy)

    return {"tensor": tensor}, check


def prefer_huge_pages(lib: Library, draw: Draw) -> Prepared:
    tensor = draw.features(torch.float32, draw.number(0, draw.one_of(9, 3_000_000)))
    expected = tensor.clone()
    return {"tensor": tensor}, lambda _: assert_equal(tensor, expected)


def build_csr(lib: Library, draw: Draw) -> Prepared:
    row, col, num_rows, num_cols = draw.edges()
    dtype = draw.index_dtype()
    rowptr, index, edge_id = outputs(num_rows, row.numel(), numbered=draw.one_of(True, False))
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
        if not in_order and edge_id is not None:
            assert_equal(edge_id, order)

    return call, check


def build_csr_with_loops(lib: Library, draw: Draw) -> Prepared:
    row, col, num_rows, num_cols = draw.edges()
    dtype, num_loops = draw.index_dtype(), draw.number(0, min(num_rows, num_cols))
    is_numbered = draw.one_of(True, False)
    rowptr, index, edge_id = outputs(num_rows, row.numel() + num_loops, numbered=is_numbered)
    call = {
        "row": draw.indices(row, dtype),
        "col": draw.indices(col, dtype),
        "num_rows": num_rows,
        "num_cols": num_cols,
        "num_loops": num_loops,
        "rowptr": rowptr,
        "col_out": index,
        "edge_id": edge_id,
    }

    def check(num_kept: Any) -> None:
        kept, loops = row != col, torch.arange(num_loops)
        assert num_kept == int(kept.sum())
        all_rows, all_cols = torch.cat([row[kept], loops]), torch.cat([col[kept], loops])
        order = all_rows.argsort(stable=True)
        count = torch.bincount(all_rows, minlength=num_rows)
        assert_equal(rowptr, torch.cat([torch.zeros(1, dtype=torch.int64), count.cumsum(0)]))
        assert_equal(index[: order.numel()], all_cols[order])
        if edge_id is not None:
            assert_equal(edge_id[: order.numel()], order)

    return call, check


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
    graph, is_numbered = built(lib, draw), draw.one_of(True, False)
    rowptr, index, edge_id = outputs(graph.num_cols, graph.num_edges, numbered=is_numbered)
    call = graph.ascending | {
        "num_cols": graph.num_cols,
        "rowptr_t": rowptr,
        "col_t": index,
        "edge_id_t": edge_id,
    }

    def check(_: Any) -> None:
        order = graph.index.argsort(stable=True)
        assert_equal(index, graph.row[graph.entry][order])
        if edge_id is not None:
            assert_equal(edge_id, graph.entry[order])
        assert_equal(rowptr.diff(), torch.bincount(graph.col, minlength=graph.num_cols))

    return call, check


def reverse_rows(lib: Library, draw: Draw) -> Prepared:
    graph = built(lib, draw)
    col = torch.full_like(graph.index, -7)

    def check(_: Any) -> None:
        rows = graph.index.split(graph.rowptr.diff().tolist())
        assert_equal(col, torch.cat([row.flip(0) for row in rows]) if rows else col)

    return {"rowptr": graph.rowptr, "col": graph.index, "col_out": col}, check


def same_indices(lib: Library, draw: Draw) -> Prepared:
    values, _, num_rows, _ = draw.edges()
    other = values.clone()
    is_edited = bool(len(values)) and draw.one_of(True, False)
    if is_edited:
        other[draw.number(0, len(values) - 1)] = num_rows
    a, b = (draw.indices(side, draw.index_dtype()) for side in (values, other))

    def check(same: Any) -> None:
        assert same == (not is_edited)

    return {"a": a, "b": b}, check


def inverse_degree(lib: Library, draw: Draw) -> Prepared:
    graph = built(lib, draw)
    out = torch.full((graph.num_rows,), -7, dtype=draw.one_of(torch.float32, torch.float64))

    def check(_: Any) -> None:
        assert_equal(out, BY_TORCH.inverse_degree(graph.rowptr, out.dtype))

    return {"rowptr": graph.rowptr, "out": out}, check


def order_rows(lib: Library, draw: Draw) -> Prepared:
    """Small graphs are left as they are, larger ones here are communities whose nodes are mixed."""
    num_rows, size = draw.number(*draw.one_of((0, 12), (5000, 6000))), draw.number(5, 40)
    row, col = mixed_communities(num_rows, 30, size=size, generator=draw.generator)
    graph = compressed(lib, row, col, num_rows, num_rows)
    rowptr, index, edge_id = outputs(num_rows, graph.num_edges)
    row_id = torch.full((num_rows,), -7, dtype=torch.int32)
    call = graph.ascending | {
        "row_bytes": draw.one_of(1024, 4096),
        "rowptr_out": rowptr,
        "col_out": index,
        "edge_id_out": edge_id,
        "row_id_out": row_id,
    }

    def check(helped: Any) -> None:
        assert (helped > 0) == (num_rows >= 5000)
        if helped:
            expected = graph.in_order(row_id.long())
            assert_equal(row_id.sort().values, torch.arange(num_rows))
            assert_equal(rowptr, expected.rowptr)
            assert_equal(index, expected.index)
            assert_equal(edge_id, expected.entry)

    return call, check


def count_reads(lib: Library, draw: Draw) -> Prepared:
    graph = built(lib, draw)
    row_bytes, cached = draw.one_of((0, 2**20), (2**12, 256), (2**14, 64), (2**40, 64))
    call = graph.ascending | {"row_bytes": row_bytes}

    def check(reads: Any) -> None:
        assert reads == reads_of(graph.index.tolist(), cached)

    return call, check


def reads_of(columns: list[int], cached: int) -> int:
    """Of a cache for so many rows that is emptied when it is full."""
    held: set[int] = set()
    reads = 0
    for column in columns:
        if column in held:
            continue
        if len(held) == cached:
            held.clear()
        held.add(column)
        reads += 1
    return reads


def count_tile_columns(lib: Library, draw: Draw) -> Prepared:
    graph = built(lib, draw)
    num_windows = -(-graph.num_rows // 16)
    size = draw.number(0, 20) if num_windows else 0
    windows = draw.integers(0, max(num_windows, 1), size)
    columns = torch.full((size,), -7)
    call = graph.ascending | {"windows": draw.indices(windows, torch.int32), "columns": columns}
    packed = packed_columns(graph)
    return call, lambda _: assert_equal(columns, torch.tensor([len(packed[w]) for w in windows]))


def packed_columns(graph: Graph) -> list[list[int]]:
    """The columns of each window, each as often as one of its rows has it most."""
    most: list[dict[int, int]] = [{} for _ in range(-(-graph.num_rows // 16))]
    edges = Counter(zip(graph.row.tolist(), graph.col.tolist(), strict=True))
    for (row, column), count in edges.items():
        of_window = most[row // 16]
        of_window[column] = max(of_window.get(column, 0), count)
    return [[c for c in sorted(one) for _ in range(one[c])] for one in most]


def fill_tiles(lib: Library, draw: Draw) -> Prepared:
    graph = built(lib, draw)
    packed = packed_columns(graph)
    blocks = torch.tensor([0, *(-(-len(one) // 8) for one in packed)])
    ptr = blocks.cumsum(0)
    count = int(ptr[-1])
    col = torch.full((8 * count,), -7, dtype=torch.int32)
    bits, first = torch.full((count, 2), -7), torch.full((count + 1,), -7)
    edge_id = torch.full((graph.num_edges,), -7, dtype=torch.int32)
    call = graph.ascending | {
        "ptr": ptr,
        "col_out": col,
        "bits": bits,
        "first": first,
        "edge_id_out": edge_id,
    }

    def check(_: Any) -> None:
        filled = [one + [-1] * (-len(one) % 8) for one in packed]
        assert_equal(col, torch.tensor([c for one in filled for c in one], dtype=torch.int32))
        tiles = Tiles(ptr, col, bits, first, edge_id, graph.num_rows, graph.num_cols)
        row, column = tiles.slots()
        assert_equal(edge_id.sort().values, torch.arange(graph.num_edges))
        assert_equal(row, graph.row[edge_id.long()])
        assert_equal(col[column], graph.col[edge_id.long()])
        counts = torch.bincount(column // 8, minlength=count)
        assert_equal(first, torch.cat([counts.new_zeros(1), counts.cumsum(0)]))

    return call, check


def spmm(lib: Library, draw: Draw) -> Prepared:
    graph = draw.in_any_order(built(lib, draw))
    width, dtype = draw.width(), draw.element()
    scale = accumulator(dtype)
    heads = draw.heads(width)
    shape = (graph.num_edges,) if heads is None else (graph.num_edges, heads)
    weight = draw.maybe(draw.features(dtype, *shape))
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
            of_edge = weight.double().view(graph.num_edges, heads or 1)
            messages *= of_edge.repeat_interleave(width // (heads or 1), 1)
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
    graph = draw.in_any_order(built(lib, draw))
    width, dtype = draw.width(), draw.element()
    row_scale = draw.maybe(draw.powers(accumulator(dtype), graph.num_rows))
    grad = draw.features(dtype, graph.num_rows, width)
    x = draw.features(dtype, graph.num_cols, width)
    special = draw.with_specials(x)
    heads = draw.heads(width)
    shape = (graph.num_edges,) if heads is None else (graph.num_edges, heads)
    out = torch.full(shape, 77.0, dtype=dtype)
    call = graph.arguments | {"row_scale": row_scale, "grad": grad, "x": x, "out": out}

    def check(_: Any) -> None:
        product = grad.double()[graph.row] * x.double()[graph.col]
        if row_scale is not None:
            product *= row_scale.double()[graph.row, None]
        of_heads = product.view(graph.num_edges, heads or 1, width // (heads or 1))
        if not special:
            assert_equal(out, of_heads.sum(2).view(shape))

    return call, check


def edge_softmax(lib: Library, draw: Draw) -> Prepared:
    graph = draw.in_any_order(built(lib, draw))
    dtype, heads = draw.element(), draw.number(0, 20)
    score = draw.features(dtype, graph.num_edges, heads)
    special = draw.with_specials(score)
    out = torch.full_like(score, 77.0)

    def check(_: Any) -> None:
        if not special:
            assert_near(out, reference.edge_softmax(graph, score.double(), False), 4.0, "out")

    return graph.arguments | {"score": score, "out": out}, check


def edge_softmax_backward(lib: Library, draw: Draw) -> Prepared:
    graph = draw.in_any_order(built(lib, draw))
    dtype, heads = draw.element(), draw.number(0, 20)
    weight, grad = (draw.features(dtype, graph.num_edges, heads) / 64 for _ in range(2))
    special = draw.with_specials(weight)
    grad_score = torch.full_like(grad, 77.0)

    def check(_: Any) -> None:
        if not special:
            wide = (weight.double(), grad.double())
            expected = reference.edge_softmax_backward(graph, *wide, False)
            assert_near(grad_score, expected, 4.0, "grad_score")

    given = {"weight": weight, "grad": grad, "grad_score": grad_score}
    return graph.arguments | given, check


@dataclass
class Extremum:
    """A largest or smallest value per row and what torch says about it."""

    out: Tensor
    ties: Tensor
    winner: Tensor


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
    ties += (out == 0) & (torch.bincount(graph.row, minlength=graph.num_rows) > 0)[:, None]
    # Among equals the first entry wins.
    position = torch.where(best, torch.arange(len(row))[:, None], len(row))
    first = torch.full(out.shape, len(row)).scatter_reduce(0, index, position, "amin")
    winner = torch.cat([entry, torch.tensor([-1])])[first]
    return Extremum(out, ties, winner)


def segment_reduce(lib: Library, draw: Draw) -> Prepared:
    graph = draw.in_any_order(built(lib, draw))
    width, dtype = draw.width(), draw.element()
    weight = draw.maybe(draw.features(dtype, graph.num_edges))
    x = draw.features(dtype, graph.num_cols, width)
    special = draw.with_specials(x)
    out = torch.full((graph.num_rows, width), 77.0, dtype=dtype)
    record = torch.full(out.shape, -77, dtype=torch.int32)
    recorded, is_max = draw.one_of(None, "ties", "winner"), draw.flag()
    call = graph.arguments | {
        "weight": weight,
        "is_max": is_max,
        "x": x,
        "out": out,
        "ties": record if recorded == "ties" else None,
        "winner": record if recorded == "winner" else None,
    }

    def check(_: Any) -> None:
        if special:
            return
        expected = extremum(graph, weight, is_max, x)
        assert_equal(out, expected.out)
        if recorded == "winner":
            assert_equal(record, expected.winner)
        elif recorded == "ties":
            assert_equal(num_shares(record), expected.ties)
            assert bool((~record == expected.winner)[record < 0].all())

    return call, check


def segment_reduce_backward(lib: Library, draw: Draw) -> Prepared:
    graph, width, dtype = built(lib, draw), draw.width(), draw.element()
    weight = draw.maybe(draw.features(dtype, graph.num_edges))
    x = draw.features(dtype, graph.num_cols, width)
    special = draw.with_specials(x)
    forward = extremum(graph, weight, draw.flag(), x)
    out = forward.out.to(dtype)
    grad = draw.features(dtype, graph.num_rows, width)
    winner = draw.maybe(forward.winner.int())
    # What gradients are divided by; such numbers leave sums exact.
    ties = torch.exp2(draw.integers(0, 2, *out.shape).double()).int() * (forward.ties > 0)
    if draw.flag():  # who has a value alone is told, and is not compared with it
        ties = torch.where((ties == 1) & (forward.winner >= 0), ~forward.winner.int(), ties)
    grad_x = torch.full_like(x, 77.0)
    call = graph.ascending | {
        "weight": weight,
        "x": x,
        "out": out,
        "grad": grad,
        "ties": ties if winner is None else None,
        "winner": winner,
        "grad_x": grad_x,
    }

    def check(_: Any) -> None:
        factor = torch.ones(graph.num_edges, 1, dtype=torch.float64)
        if weight is not None:
            factor = weight.double()[:, None]
        if winner is not None:
            won = winner.long()[graph.row] == torch.arange(graph.num_edges)[:, None]
        else:
            recorded, edge = ties.long()[graph.row], torch.arange(graph.num_edges)[:, None]
            attains = factor * x.double()[graph.col] == forward.out[graph.row]
            won = torch.where(recorded < 0, ~recorded == edge, attains)
        share = grad.double() / (1 if winner is not None else num_shares(ties).clamp(min=1))
        expected = torch.zeros(x.shape, dtype=torch.float64)
        expected.index_add_(0, graph.col, factor * won * share[graph.row])
        if not special:
            assert_equal(grad_x, expected)

    return call, check


EDGE_PROGRAMS = (
    "x = gathered 40\nw = edge 4\nt0 = mul w x\nsum t0\nmean x\nedge t0",
    "x = gathered 40\ny = gathered 40\nw = edge 4\nn = row 1\nt0 = mul w x\nt1 = dot x y 2\n"
    "t2 = mul t1 y\nt3 = add t0 t2\nt4 = mul t2 n\nt5 = add t3 t4\nsum t3\nmax t3\nmean t5",
    "x = gathered 3\nr = row 3\nt0 = add x r\nt1 = relu t0\nmax t1\nmax_ties t1\nmin x",
    "x = gathered 35\nr = row 35\np = parameter 1\nt0 = mul r x\nt1 = dot x r 7\nt2 = mul t0 p\n"
    "sum t2\ntotal t1\nedge t1",
    "x = gathered 35\nr = row 5\nt0 = tile r 35\nt1 = mul t0 x\nt2 = sum_tiles t1 7\n"
    "sum t2\nmax t1",
    "x = gathered 40\ns = edge 4\nsoftmax x s\nsoftmax_max s\nsoftmax_scale s\nsoftmax x x",
    "x = gathered 19\nr = row 19\nw = parameter 133\nt0 = sub x r\nt1 = product t0 w 7\n"
    "t2 = relu t1\nt3 = product_t t2 w 19\nmax t1\nmean t3\nouter t0 r",
    "x = gathered 36\nr = row 36\nt0 = add x r\nt1 = fold_max t0 4\nt2 = slice t0 12 4 6\n"
    "t3 = pad t2 44 4 8\nt4 = first x 36 4 0\nt5 = fold_max r 12\nsum t1\nmax t2\nedge t3\nsum t4\n"
    "mean t5",
)


def edge_program(lib: Library, draw: Draw) -> Prepared:
    graph, dtype = draw.in_any_order(built(lib, draw)), draw.element()
    program = parse(draw.one_of(*EDGE_PROGRAMS))
    rows = {"gathered": graph.num_cols, "row": graph.num_rows, "edge": graph.num_edges}
    operands = [
        draw.features(dtype, *([rows[o.place]] if o.place in rows else []), o.width)
        for o in program.operands
    ]
    out = [
        torch.full(
            program.output_shape(output, graph.num_rows, graph.num_edges),
            77,
            dtype=torch.int32 if output.is_record else dtype,
        )
        for output in program.outputs
    ]

    def check(_: Any) -> None:
        wide = [operand.double() for operand in operands]
        exact = reference.edge_program(graph, wide, program, False)
        for output, found, expected in zip(program.outputs, out, exact, strict=True):
            if output.is_record:
                assert_equal(found, expected)
            else:
                assert_near(found, expected, 64.0, output.reduction)

    by_terms = draw.one_of(True, False)
    lowered = lower(program, rounds=dtype.itemsize < 4, by_terms=by_terms)
    call = graph.arguments | {"num_cols": graph.num_cols, **lowered.code._asdict()}
    return call | {"operands": lowered.operands(operands), "outputs": out}, check


def dropout_factors(lib: Library, draw: Draw) -> Prepared:
    size, heads = draw.number(0, draw.one_of(3, 40, 3000)), draw.number(0, 9)
    out = torch.full((size, heads), torch.nan, dtype=draw.element())
    numbers = draw.integers(0, draw.one_of(50, 2**40), size)
    rate, first, seed = draw.one_of(0.0, 0.3, 1.0), draw.number(0, 6), draw.number(-9, 2**40)

    def check(_: Any) -> None:
        assert_equal(out, by_torch(torch.zeros_like(out), rate, seed, numbers, first))

    call = {"numbers": numbers, "first_head": first, "dropout": rate, "seed": seed, "out": out}
    return call, check


CALLS = (
    checksum,
    dropout_factors,
    prefer_huge_pages,
    build_csr,
    build_csr_with_loops,
    check_csr,
    transpose_csr,
    reverse_rows,
    same_indices,
    inverse_degree,
    order_rows,
    count_reads,
    count_tile_columns,
    fill_tiles,
    spmm,
    sddmm,
    edge_softmax,
    edge_softmax_backward,
    segment_reduce,
    segment_reduce_backward,
    edge_program,
    *ATTENTION_CALLS,
    *DENSE_ATTENTION_CALLS,
    *BLOCK_ATTENTION_CALLS,
    *COO_CALLS,
    *SAMPLING_CALLS,
    *TOKEN_CALLS,
    *SHORTEST_PATHS_CALLS,
)
