"""Predictions of when tiles for tensor cores are faster than rows, before any are made.

A sample of windows tells how full their blocks would be, and the traffic of both forms on a GPU
whether that is full enough (:mod:`fastgraph.graphs.tiles`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fastgraph.graphs.graph import Csr
from fastgraph.graphs.tiles import COLUMNS, ROWS, packed_columns
from fastgraph.tune.gpus import Sheet

DTYPES = (torch.float32, torch.bfloat16)
"""Of features, for which there is a kernel."""

MOST_HEAD_BYTES = 256
"""Of attention: ``kMostTileBytes`` of ``csrc/include/fastgraph/tiles.h``."""

_SAMPLE = 1024
_RISK = 0.05
_WORTHWHILE = 0.8
"""The part of the time of rows that tiles must leave at most, as times are those of a model."""

_BLOCK_BYTES = 4 * COLUMNS + 16 + 8
_EDGE_BYTES = 4
_WEIGHT_BYTES = 4 + 32
"""The number of an edge, and the sector of memory that its weight lies in."""


class Fill(NamedTuple):
    """How full the blocks of a graph are.

    Attributes:
        edges: of a block, from 1 to 128.
        low, high: between which that lies, with 95 % confidence.
        columns: packed columns for each edge.
        most_columns: at most, with the same confidence.
        windows: that were looked at.
    """

    edges: float
    low: float
    high: float
    columns: float
    most_columns: float
    windows: int


def predict_fill(rows: Csr, *, seed: int = 0) -> Fill:
    """How full the blocks of a graph would be, from a sample of its windows.

    A window is drawn as often as it has edges (Hansen and Hurwitz, 1943), so that the mean of its
    blocks for each edge is that of the graph, and lies between 0 and 1 whatever the degrees are. So
    the bound holds without a guess at their distribution (Maurer and Pontil, COLT 2009, theorem 4).
    A graph with few windows is looked at as a whole.

    Args:
        rows: the edges by row, in ascending order, on the CPU.
        seed: of the sample.

    Returns:
        All zero for a graph without edges.
    """
    num_edges, num_windows = rows.col.numel(), -(-(rows.ptr.numel() - 1) // ROWS)
    if num_edges == 0:
        return Fill(0.0, 0.0, 0.0, 0.0, 0.0, 0)
    ends = rows.ptr[
        torch.arange(1, num_windows + 1, device="cpu").mul_(ROWS).clamp_(max=rows.ptr.numel() - 1)
    ]
    edges = ends.diff(prepend=ends.new_zeros(1))
    is_whole = num_windows <= _SAMPLE
    if is_whole:
        drawn = edges.nonzero().view(-1)
        weights = edges[drawn].double() / num_edges
    else:
        generator = torch.Generator().manual_seed(seed)
        edge = torch.randint(num_edges, (_SAMPLE,), generator=generator, device="cpu")
        drawn = torch.searchsorted(ends, edge, right=True)
        weights = torch.full((_SAMPLE,), 1 / _SAMPLE, dtype=torch.float64, device="cpu")
    seen, place = drawn.unique(return_inverse=True)
    packed = packed_columns(rows, seen.int())
    counts = torch.stack([(packed + COLUMNS - 1) // COLUMNS, packed])
    for_each_edge = (counts.double() / edges[seen])[:, place]
    means = (for_each_edge * weights).sum(1)
    errors = (
        torch.zeros(2, dtype=torch.float64, device="cpu") if is_whole else _errors(for_each_edge)
    )
    (blocks, columns), (of_blocks, of_columns) = means.tolist(), errors.tolist()
    return Fill(
        1 / blocks,
        1 / min(1.0, blocks + of_blocks),
        1 / max(1 / (ROWS * COLUMNS), blocks - of_blocks),
        columns,
        min(1.0, columns + of_columns),
        seen.numel(),
    )


def _errors(samples: Tensor) -> Tensor:
    """Half the width of an interval around the mean of each row of numbers from 0 to 1."""
    count, doubt = samples.shape[1], math.log(4 / _RISK)
    spread = (2 * samples.var(1) * doubt / count).sqrt()
    return spread + 7 * doubt / (3 * (count - 1))


class Product(NamedTuple):
    """A weighted sum over neighbourhoods.

    Attributes:
        num_rows, num_cols, num_edges: of the graph.
        width: channels.
        dtype: of the features.
        has_weights: of edges.
    """

    num_rows: int
    num_cols: int
    num_edges: int
    width: int
    dtype: torch.dtype
    has_weights: bool


def width_of_attention(key: Tensor) -> int:
    """Channels of a sum that moves and computes what attention does.

    Each edge gathers a value and a key, for two products. (Scores of float32 take three products of
    tf32 for one, with which tensor cores still wait for memory.)

    Args:
        key: ``[nodes, heads, channels]``.
    """
    return 2 * key.shape[1:].numel()


def why_not_attention(key: Tensor, has_edges: bool, dropout: float, weights: bool) -> str | None:
    """Why the kernel on tiles is not for an attention layer on any graph, or ``None``.

    Args:
        key: ``[nodes, heads, channels]``.
        has_edges: whether edges have features.
        dropout: rate.
        weights: whether those of edges are asked for.
    """
    if has_edges:
        return "edges must have no features for attention on tiles"
    if dropout or weights:
        return "attention on tiles drops no edges and gives no weights of them"
    head_bytes = key.shape[2] * key.element_size()
    if not 0 < head_bytes <= MOST_HEAD_BYTES:
        return f"heads must have at most {MOST_HEAD_BYTES} bytes on tiles, got {head_bytes}"
    return None


def by_rows(product: Product, sheet: Sheet) -> float:
    """Milliseconds that a GPU takes at least for what kernels of rows move."""
    entry = _EDGE_BYTES + (_WEIGHT_BYTES if product.has_weights else 0)
    gathered = float(product.num_edges) * _row_bytes(product)
    return _moved(product, sheet, gathered, float(entry) * product.num_edges)


def by_tiles(product: Product, fill: Fill, sheet: Sheet) -> float:
    """Milliseconds that a GPU takes at least for tiles, with as few edges in each as can be."""
    blocks = product.num_edges / max(fill.low, 1.0)
    gathered = fill.most_columns * product.num_edges * _row_bytes(product)
    beside = blocks * _BLOCK_BYTES + product.has_weights * _WEIGHT_BYTES * product.num_edges
    tflops = sheet.tf32_tflops if product.dtype == torch.float32 else sheet.bf16_tflops
    operations = 2.0 * ROWS * COLUMNS * blocks * product.width
    return max(_moved(product, sheet, gathered, beside), operations / tflops / 1e9)


def _row_bytes(product: Product) -> int:
    return product.width * product.dtype.itemsize


def _moved(product: Product, sheet: Sheet, gathered: float, beside: float) -> float:
    table = float(product.num_cols) * _row_bytes(product)
    streamed = float(product.num_rows) * _row_bytes(product) + beside
    return max(sheet.moved(gathered, gathered + beside, streamed, table, sheet.hit(table)).values())


def why_not_tiles(product: Product, fill: Fill, sheet: Sheet) -> str | None:
    """Why tiles are not for this product on a GPU, or ``None`` if they may be faster.

    Both forms are taken to be as fast as what they must move allows, which kernels of rows nearly
    are on large graphs.
    """
    if product.dtype not in DTYPES:
        return f"features must be float32 or bfloat16, got {product.dtype}"
    if product.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32:
        return (
            "tensor cores round float32 to tf32, which torch.backends.cuda.matmul.allow_tf32 "
            "does not allow"
        )
    rows, tiles = by_rows(product, sheet), by_tiles(product, fill, sheet)
    if tiles > _WORTHWHILE * rows:
        return (
            f"{fill.edges:.1f} edges to a block of {ROWS * COLUMNS} are too few: on {sheet.name} "
            f"tiles take {tiles:.3g} ms at least, and rows {rows:.3g} ms"
        )
    return None
