"""Rules for products of matrices, dense and sparse."""

from __future__ import annotations

import string
from collections.abc import Sequence

import torch
from torch import Tensor

from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.collectives import split, sum_of_ranks
from fastgraph.dist.tensor.digests import DIGESTS
from fastgraph.dist.tensor.exchange import take
from fastgraph.dist.tensor.layout import Layout
from fastgraph.dist.tensor.memo import cached_with_all, on, on_host
from fastgraph.dist.tensor.sharded import ShardedTensor, aligned, enter, is_sharded
from fastgraph.dist.tensor.table import (
    NoRuleError,
    TorchFunction,
    is_in_place,
    name_of,
    rule,
    unpacked,
)
from fastgraph.layers.linear import linear as in_memory_of_results


@rule("linear")
@unpacked
def linear(
    func: TorchFunction, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> ShardedTensor:
    """``linear``: local rows times replicated weights."""
    sharded = is_sharded(weight) or is_sharded(bias)
    if sharded or not is_sharded(x) or x.axis == x.local.dim() - 1:
        raise NoRuleError
    # As one process has large products of the layers that are routed.
    local = in_memory_of_results(x.local, enter(weight), enter(bias))
    return ShardedTensor(local, x.rows, x.axis)


@rule("matmul mm bmm mv dot __matmul__ __rmatmul__")
@unpacked
def matmul(func: TorchFunction, x: Tensor, other: object) -> Tensor:
    """``matmul``; if the inner dimension is sharded, products are summed over ranks."""
    if not isinstance(other, Tensor):
        raise NoRuleError
    a, b = x, other
    if func.__name__ == "__rmatmul__":
        a, b = b, a
    if a.layout != torch.strided or b.layout != torch.strided:
        return _sparse_product(a, b)
    if not a.dim() or not b.dim():
        raise NoRuleError
    inner = -2 if b.dim() > 1 else -1
    if a.shape[-1] != b.shape[inner]:
        raise NoRuleError  # upstream's own message
    if is_sharded(a):
        return _of_two_sharded(a, b, inner) if is_sharded(b) else _of_sharded_first(a, b, inner)
    if not is_sharded(b):
        raise NoRuleError
    at = _from_the_right(b)
    if at == inner:
        DIGESTS.compare(a)
        return sum_of_ranks(torch.matmul(split(a, b.rows, a.dim() - 1), b.local))
    if at == -1:
        return _sharded(torch.matmul(enter(a), b.local), b.rows, -1)
    return _sharded(torch.matmul(aligned(a, b.rows, at), b.local), b.rows, at)


def _of_two_sharded(a: ShardedTensor, b: ShardedTensor, inner: int) -> Tensor:
    """Both are sharded along the inner dimension, the second's ``inner``, or along a batch's."""
    at = _from_the_right(a)
    if at == -1 and _from_the_right(b) == inner:
        return sum_of_ranks(torch.matmul(a.local, b.aligned(a.rows)))
    if at == _from_the_right(b) and at <= -3:
        return _sharded(torch.matmul(a.local, b.aligned(a.rows)), a.rows, at)
    raise NoRuleError


def _of_sharded_first(a: ShardedTensor, b: Tensor, inner: int) -> Tensor:
    """Rows, columns or a batch's dimension of the first are sharded; the second is replicated."""
    at = _from_the_right(a)
    if at == -1:
        DIGESTS.compare(b)
        own = split(b, a.rows, b.dim() + inner)
        return sum_of_ranks(torch.matmul(a.local, own))
    other = enter(b) if at == -2 else aligned(b, a.rows, at)
    if at <= -3 and -b.dim() <= at and b.shape[at] == 1 != a.rows.n:
        other = enter(b)
    return _sharded(torch.matmul(a.local, other), a.rows, at if b.dim() > 1 else at + 1)


def _from_the_right(x: ShardedTensor) -> int:
    """The position of the sharded dimension, counted from the last one, which is -1."""
    return x.axis - x.local.dim()


def _sharded(local: Tensor, rows: Layout, axis: int) -> ShardedTensor:
    if local.shape[axis] != rows.mine:
        raise NoRuleError
    return ShardedTensor(local, rows, axis + local.dim())


@rule("addmm addmv baddbmm", in_place=True)
@unpacked
def addmm(
    func: TorchFunction, x: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1
) -> Tensor:
    """``addmm`` and its like: a product plus another tensor."""
    product = torch.matmul(a, b)
    product = product if alpha == 1 else alpha * product
    if is_in_place(name_of(func)):
        return (x.zero_() if beta == 0 else x.mul_(beta) if beta != 1 else x).add_(product)
    if beta == 0:  # which drops NaN
        return product
    return (x if beta == 1 else beta * x) + product


@rule("bilinear")
@unpacked
def bilinear(
    func: TorchFunction, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None
) -> ShardedTensor:
    """Products of two rows and replicated weights."""
    a, b = input1, input2
    lead = a if is_sharded(a) else b
    if is_sharded(weight) or is_sharded(bias) or not is_sharded(lead) or a.dim() != b.dim():
        raise NoRuleError
    if lead.axis == lead.dim() - 1 or a.shape[:-1] != b.shape[:-1]:
        raise NoRuleError
    rows, axis = lead.rows, lead.axis
    local = func(aligned(a, rows, axis), aligned(b, rows, axis), enter(weight), enter(bias))
    return ShardedTensor(local, rows, axis)


@rule("einsum")
@unpacked
def einsum(func: TorchFunction, equation: str, *given: Tensor | Sequence[Tensor]) -> Tensor:
    """``einsum``: sums of products, by the names of dimensions."""
    operands: list[Tensor] = []
    for x in given:
        operands += [x] if isinstance(x, Tensor) else x
    left, arrow, result = equation.replace(" ", "").partition("->")
    names = left.split(",")
    if not arrow or len(names) != len(operands):
        raise NoRuleError
    if "." in equation:
        names, result = _spelled_out(names, result, operands)
        equation = f"{','.join(names)}->{result}"
    lead, letters = next((x, n) for x, n in zip(operands, names, strict=True) if is_sharded(x))
    letter = letters[lead.axis]
    local = []
    for x, n in zip(operands, names, strict=True):
        if n.count(letter) > 1 or (is_sharded(x) and n[x.axis] != letter) or len(n) != x.dim():
            raise NoRuleError
        if letter in n and x.shape[n.index(letter)] != lead.rows.n:
            raise NoRuleError
        local.append(aligned(x, lead.rows, n.index(letter)) if letter in n else enter(x))
    out = torch.einsum(equation, *local)
    if letter in result:
        return ShardedTensor(out, lead.rows, result.index(letter))
    return sum_of_ranks(out)


def _spelled_out(
    names: list[str], result: str, operands: Sequence[Tensor]
) -> tuple[list[str], str]:
    """The names of dimensions with letters in the place of ``...``, which stand for as many."""
    counts = {
        x.dim() - len(n) + 3 for x, n in zip(operands, names, strict=True) if n.count("...") == 1
    }
    if len(counts) != 1 or min(counts) < 0 or any("." in n.replace("...", "") for n in names):
        raise NoRuleError
    unused = [c for c in string.ascii_letters if not any(c in n for n in (*names, result))]
    letters = "".join(unused[: counts.pop()])
    return [n.replace("...", letters) for n in names], result.replace("...", letters)


def _own_rows(matrix: Tensor, rows: Layout) -> tuple[Tensor, Tensor]:
    """The rows of a replicated sparse matrix that this rank holds, and which columns they have.

    They are cached with the matrix, and with the columns the plan of their exchange.
    """
    *index, values = _components(matrix)
    for part in (*index, values):
        DIGESTS.compare(part, "a part of a sparse matrix")
    given = [(part, False) for part in (*index, values)]
    make = lambda: _part(matrix, rows)  # noqa: E731
    return cached_with_all(given, ("own rows", rows, matrix.layout), make)


def _components(matrix: Tensor) -> list[Tensor]:
    """The memory of a sparse matrix."""
    if matrix.layout == torch.sparse_coo:
        return [matrix._indices(), matrix._values()]
    if matrix.layout == torch.sparse_csr:
        return [matrix.crow_indices(), matrix.col_indices(), matrix.values()]
    if matrix.layout == torch.sparse_csc:
        return [matrix.ccol_indices(), matrix.row_indices(), matrix.values()]
    raise NoRuleError


def _part(matrix: Tensor, rows: Layout) -> tuple[Tensor, Tensor]:
    entries = matrix.to_sparse_coo().coalesce()
    device = entries.device
    row, column = on_host(entries.indices())
    mine = (rows.held(row).owner == WORLD.rank).nonzero().view(-1)
    found, place = column[mine].unique(return_inverse=True)
    index = torch.stack([rows.held(row[mine]).row, place])
    values, size = entries.values()[on(mine, device)], (rows.mine, len(found))
    own = torch.sparse_coo_tensor(index.to(device), values, size, device=device)
    return own.coalesce().to_sparse_csr(), found


@rule("_sparse_mm spmm sparse_mm")
@unpacked
def sparse_product(func: TorchFunction, matrix: Tensor, x: Tensor) -> ShardedTensor:
    """A replicated sparse matrix of nodes times sharded rows."""
    return _sparse_product(matrix, x)


def _sparse_product(matrix: Tensor, x: Tensor) -> ShardedTensor:
    if is_sharded(matrix) or not is_sharded(x) or x.axis != 0 or x.dim() != 2:
        raise NoRuleError
    if matrix.requires_grad or matrix.layout == torch.strided or matrix.dim() != 2:
        raise NoRuleError
    if tuple(matrix.shape) != (x.rows.n, x.rows.n):
        raise NoRuleError
    own, columns = _own_rows(matrix, x.rows)
    rows = take(x.local, 0, columns, x.rows)
    return ShardedTensor(torch.sparse.mm(own, rows), x.rows, 0)
