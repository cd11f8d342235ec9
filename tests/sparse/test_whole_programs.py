"""Whole programs on sparse matrices beside dense ones in float64: samples, dropout, 1 over 0."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastgraph.sparse as fgs
from fastgraph.sparse import SparseMatrix
from tests.sparse.matrices import dense, places

Mean = Callable[[Tensor], Tensor]
"""Of the features of rows for each column, where columns aggregate."""


def mean_by_algebra(a: SparseMatrix) -> Mean:
    averaging = (a @ fgs.diag(a.sum(0)) ** -1).T
    return lambda x: averaging @ x


def dense_mean(a: SparseMatrix) -> Mean:
    matrix = dense(a.pattern, a.val)
    return lambda x: torch.where(matrix != 0, matrix / matrix.sum(0), 0.0).T @ x


class SAGE(nn.Module):
    """Two layers, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.ModuleList([nn.Linear(5, 8), nn.Linear(8, 3)])
        self.other = nn.ModuleList([nn.Linear(5, 8), nn.Linear(8, 3)])

    def forward(self, means: Sequence[Mean], x: Tensor, counts: Sequence[int]) -> Tensor:
        for k, (mean, count) in enumerate(zip(means, counts, strict=True)):
            x = self.own[k](x[:count]) + mean(self.other[k](x))
            if k == 0:
                x = F.dropout(x.relu(), 0.5)
        return x


def sampled(a: SparseMatrix, seeds: Tensor) -> tuple[list[SparseMatrix], Tensor]:
    """Two hops, the farther first, and the nodes whose features they need."""
    found: list[SparseMatrix] = []
    for _ in range(2):
        block, seeds = a.sample(1, 4, ids=seeds).coalesce().compact(0, seeds)
        found.insert(0, block)
    return found, seeds


def test_training_on_samples() -> None:
    """Given the same sample and the same state of the generator, parameters end the same."""
    torch.manual_seed(0)
    a = fgs.spmatrix(places((60, 60), 500, distinct=True), shape=(60, 60))
    a = a.to(dtype=torch.float64)
    x, label = torch.randn(60, 5, dtype=torch.float64), torch.randint(3, (60,))
    ours = SAGE().double()
    theirs, start = copy.deepcopy(ours), copy.deepcopy(ours)
    rates = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs)]
    for _ in range(5):
        seeds = torch.randperm(60)[:12]
        blocks, nodes = sampled(a, seeds)
        state = torch.get_rng_state()
        for model, rate, mean in zip(
            (ours, theirs), rates, (mean_by_algebra, dense_mean), strict=True
        ):
            torch.set_rng_state(state)  # dropout draws after samples, of the same generator
            out = model([mean(b) for b in blocks], x[nodes], [b.shape[1] for b in blocks])
            rate.zero_grad()
            F.cross_entropy(out, label[seeds]).backward()
            rate.step()
    for one, other, old in zip(*(m.parameters() for m in (ours, theirs, start)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)
        assert not torch.equal(one, old)


def test_pagerank() -> None:
    """With columns without entries: the division by their number is infinite, and no factor."""
    a = fgs.spmatrix(places((40, 40), 90, distinct=True), shape=(40, 40))
    a = a.to(dtype=torch.float64)
    matrix = dense(a.pattern, a.val)
    links = a.sum(0)
    assert (links == 0).any() and torch.equal(links, matrix.sum(0))
    ours = theirs = torch.full((40,), 1 / 40, dtype=torch.float64)
    for _ in range(10):
        ours = 0.15 / 40 + 0.85 * a @ (ours / links)
        terms = torch.where(matrix != 0, matrix * (theirs / links), 0.0)
        theirs = 0.15 / 40 + 0.85 * terms.sum(1)
    assert ours.isfinite().all()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-15)
