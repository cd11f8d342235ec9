"""``explain``: the operators of a product, before it is computed."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgraph.sparse import fusing, products
from fastgraph.sparse.expression import (
    Contraction,
    Dot,
    Dropout,
    Entries,
    Expression,
    Leaf,
    Map,
    Softmax,
)
from fastgraph.sparse.groups import REDUCTIONS
from fastgraph.sparse.sparse_matrix import SparseMatrix


def explain(
    A: SparseMatrix,  # noqa: N803
    X: Tensor | None = None,  # noqa: N803
    *,
    reduce: str | None = None,
    dim: int = 1,
) -> str:
    """The expression of a matrix's values, and the operators of its product with features.

    Nothing is computed, and nothing is counted.

    Args:
        A: any matrix.
        X: the features, ``[m]``, ``[m, k]`` or ``[m, k, heads]``; default: features as wide as the
            dense matrices whose products ``A`` samples, which have a gradient if ``A`` has one.
        reduce: explain a reduction instead, ``"sum"``, ``"smax"``, ``"smin"``, ``"smean"`` or
            ``"sprod"``.
        dim: of rows, for 1, or columns, for 0.

    Returns:
        The graph of the expression, a line for each value, which group it belongs to, the kernels
        of the product forward, and the bytes that are stored and avoided.

    Raises:
        TypeError: ``A`` is not a sparse matrix.
        RuntimeError: ``X`` does not fit.
        ValueError: there is no such reduction.
    """
    if not isinstance(A, SparseMatrix):
        raise TypeError(f"A must be a SparseMatrix, got {type(A).__name__}")
    if reduce not in (None, *REDUCTIONS) or dim not in (0, 1):
        raise ValueError(
            f"reduce must be one of {[*REDUCTIONS]} and dim 0 or 1, got {reduce!r} and {dim}"
        )
    sink, last = ("product", "spmm") if reduce is None else (reduce, f"{reduce} of groups")
    if not isinstance(A.values, Expression):
        return f"values {list(A.values.shape)}, {A.dtype}: a tensor\n{sink}: {last}"
    values = A.values
    if reduce is not None:
        plan = fusing.plan_reduction(values, dim, reduce)
        has_gradient = values.requires_grad
    else:
        if X is None:
            X = _usual(values)  # noqa: N806
        products.check_spmm(values.pattern, values, X)
        plan = fusing.plan(values, X)
        has_gradient = values.requires_grad or X.requires_grad
    made = values.walk()[::-1]
    number = {id(m): f"v{k}" for k, m in enumerate(made)}
    lines = ["values, one for each entry and head:"]
    lines += [f"  {number[id(m)]} = {_line(m, number)}" for m in made]
    separate = sum(m.shape.numel() * m.dtype.itemsize for m in made if not isinstance(m, Entries))
    if isinstance(plan, str):
        kernels = [*(k for m in made if (k := _KERNELS.get(m.name)) is not None), last]
        lines += [
            f"{sink}: {len(kernels)} kernels, {', '.join(kernels)}: {plan}",
            f"stored: {separate:,} bytes of values",
        ]
        return "\n".join(lines)
    rows = values.pattern.shape[1 - dim] * values.shape[1:].numel()
    has_gradient = has_gradient and torch.is_grad_enabled()
    kept = plan.kept * rows * values.dtype.itemsize if has_gradient else 0
    lines += [
        f"{sink}: one group, {', '.join(number[id(m)] for m in made)}, by {plan.operator}",
        f"stored: {kept:,} bytes, of {plan.of_kept}",
        f"avoided: {separate:,} bytes of values",
    ]
    return "\n".join(lines)


_KERNELS = {"dot": "sddmm", "rows": "gather", "cols": "gather", "softmax": "edge_softmax"}


def _line(made: Expression, number: dict[int, str]) -> str:
    shape = f"  {list(made.shape)}"
    if isinstance(made, Leaf):
        return f"{made.name} of {' and '.join(str(list(t.shape)) for t in made.tensors)}{shape}"
    if isinstance(made, Softmax):
        return f"softmax of rows of {number[id(made.arguments[0])]}{shape}"
    if isinstance(made, Contraction):
        return f"{number[id(made.arguments[0])]} times {number[id(made.arguments[1])]}{shape}"
    if isinstance(made, Dropout):
        return f"dropout of {number[id(made.arguments[0])]}, {made.rate}{shape}"
    assert isinstance(made, Map)
    given = [number[id(a)] if isinstance(a, Expression) else str(a) for a in made.args]
    given += [f"{name}={value}" for name, value in made.kwargs.items()]
    return f"{made.name}({', '.join(given)}){shape}"


def _usual(values: Expression) -> Tensor:
    widths = [m.tensors[0].shape[1] for m in values.walk() if isinstance(m, Dot)]
    width = widths[0] if widths else 1
    heads = values.shape[1:]
    return torch.empty(
        (values.pattern.shape[1], width, *heads),
        dtype=values.dtype,
        device=values.device,
        requires_grad=values.requires_grad,
    )
