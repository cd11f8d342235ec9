"""Numbers that describe a rank's part of a graph, from which its time is predicted.

The part is a matrix with a row for each node of the rank and a column for each node that its edges
come from: those of the rank, followed by the halo, which is how operators see it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgraph.dist.ranks.own_device import HOST

_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)

_NEAR = 1024
"""Columns as close as that are likely to be in the nearest caches together."""

_WINDOW = 4096
"""Entries that are computed about at the same time: what they have in common is read once."""


def describe(edge_index: Tensor, owner: Tensor, part: int) -> dict[str, float]:
    """The features of a part.

    Args:
        edge_index: int64 ``[2, E]``, of the whole graph.
        owner: int64 ``[n]``, the part of each node.
        part: which one.

    Returns:
        By name; always the same names in the same order.
    """
    is_own = owner == part
    pair = edge_index[:, is_own[edge_index[1]]]
    rows, entries = int(is_own.sum()), pair.shape[1]
    number = is_own.cumsum(0) - 1  # of own nodes among themselves
    far = ~is_own[pair[0]]
    others, which = torch.unique(pair[0][far], return_inverse=True)
    column = number[pair[0]].masked_scatter(far, which + rows)
    row = number[pair[1]]
    order = row.argsort(stable=True)
    row, column = row[order], column[order]
    halo = len(others)
    lengths = torch.bincount(row, minlength=rows).double()
    uses = torch.bincount(column, minlength=rows + halo).double()
    distance = (row - column).abs().double()
    wanted = is_own[edge_index[0]] & ~is_own[edge_index[1]]
    given = _pairs(edge_index[0][wanted], owner[edge_index[1][wanted]], len(owner))
    mean = entries / max(rows, 1)
    found = {
        "rows": float(rows),
        "columns": float(rows + halo),
        "entries": float(entries),
        "halo": float(halo),
        "halo entries": float(far.sum()),
        "given": float(given),
        "density": entries / max(rows * (rows + halo), 1),
        "self-loops": float((row == column).sum()),
        "row mean": mean,
        "row deviation": _deviation(lengths),
        "row variation": _deviation(lengths) / max(mean, 1e-12),
        "row skew": _skew(lengths),
        "row max": _maximum(lengths),
        "rows empty": float((lengths == 0).sum()),
        "row Gini": gini(lengths),
        "row entropy": _entropy(lengths),
        "column max": _maximum(uses),
        "column deviation": _deviation(uses),
        "column Gini": gini(uses),
        "columns used once": float((uses == 1).sum()),
        "distance mean": float(distance.mean()) if entries else 0.0,
        "distance max": _maximum(distance),  # the bandwidth of the matrix
        "near": float((distance < _NEAR).sum()) / max(entries, 1),
        "fresh in windows": _fresh(column, rows + halo),
        "step in rows": _step(row, column),
    }
    if rows:
        quantiles = torch.quantile(
            _thinned(lengths), torch.tensor(_QUANTILES, device=HOST).double()
        ).tolist()
    else:
        quantiles = [0.0] * len(_QUANTILES)
    found |= {f"row quantile {q:g}": v for q, v in zip(_QUANTILES, quantiles, strict=True)}
    return found


def gini(values: Tensor) -> float:
    """The Gini coefficient of values of at least 0: 0 if all are equal, near 1 if one has all."""
    n, total = len(values), float(values.sum())
    if not total:
        return 0.0
    ranks = torch.arange(1, n + 1, dtype=torch.float64, device=HOST)
    return float(2 * (ranks * values.sort().values).sum() / (n * total) - (n + 1) / n)


def _pairs(nodes: Tensor, parts: Tensor, n: int) -> int:
    """The number of different pairs: rows that are sent."""
    return len(torch.unique(parts * n + nodes))


def _deviation(values: Tensor) -> float:
    return float(values.std(correction=0)) if len(values) else 0.0


def _maximum(values: Tensor) -> float:
    return float(values.max()) if len(values) else 0.0


def _skew(values: Tensor) -> float:
    deviation = _deviation(values)
    return float(((values - values.mean()) / deviation).pow(3).mean()) if deviation else 0.0


def _entropy(lengths: Tensor) -> float:
    """That of the distribution of entries over rows, of the largest possible."""
    total = lengths.sum()
    if len(lengths) < 2 or not total:
        return 0.0
    return float(torch.special.entr(lengths / total).sum()) / float(
        torch.log(torch.tensor(float(len(lengths)), device=HOST))
    )


def _thinned(values: Tensor) -> Tensor:
    """At most some million values, which is what ``torch.quantile`` takes."""
    return values[:: max(1, len(values) // 2**20)]


def _fresh(column: Tensor, columns: int) -> float:
    """The share of entries whose column is not among those before in its window."""
    if not len(column):
        return 0.0
    window = torch.arange(len(column), device=HOST) // _WINDOW
    return len(torch.unique(window * columns + column)) / len(column)


def _step(row: Tensor, column: Tensor) -> float:
    """The mean step between the columns of a row's entries, as they are stored."""
    if len(row) < 2:
        return 0.0
    same = row[1:] == row[:-1]
    steps = (column[1:] - column[:-1]).abs().double()[same]
    return float(steps.mean()) if len(steps) else 0.0
