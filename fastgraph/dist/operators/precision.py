"""Message passing in bfloat16 on ranks that have too much to do.

The fused operators of such a rank get the rows of this rank and those of the halo in bfloat16, in
which they read half as much, and add up in float32 as ever. What goes in and comes out is float32:
parameters, gradients, losses, what is exchanged, and everything that is not a fused operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.counts import COUNTS
from fastgraph.dist.ranks.own_device import HOST
from fastgraph.dist.ranks.phases import THRESHOLD, overloaded
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.collectives import applied, records_gradient
from fastgraph.dist.tensor.memo import cached
from fastgraph.machine import native
from fastgraph.machine.memory import new_rows
from fastgraph.ops.library import Context

if TYPE_CHECKING:
    from fastgraph.dist.balance.balance import Balance

Result = TypeVar("Result")

FULL, REDUCED = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class ReducedPrecision:
    """The decision of :func:`reduce_precision`; the same on all ranks.

    Attributes:
        ranks: whose message passing is in bfloat16 from now on.
        refused: of others that should have been among them, why they cannot.
    """

    ranks: tuple[int, ...]
    refused: dict[int, str]


class Precision:
    """That of the message passing of this rank.

    Attributes:
        is_reduced: whether it is in bfloat16.
    """

    is_reduced = False

    def run(self, operator: Callable[..., Result], *arguments: object) -> Result:
        """The results of an operator, or of a function that calls several of them.

        Args:
            operator: of fastgraph, or a function of operands of this rank.
            arguments: its own; tensors of float32 and those in lists are given in bfloat16 where
                precision is reduced.

        Returns:
            Its results, those in bfloat16 as float32.
        """
        if not self.is_reduced:
            return operator(*arguments)
        dtype = next(x.dtype for x in _tensors(arguments) if x.is_floating_point())
        if dtype != FULL:
            COUNTS.precision[f"{dtype}, as the operands are"] += 1
            return operator(*arguments)
        COUNTS.precision[str(REDUCED)] += 1
        found = operator(*map(_lowered, arguments))
        raised: Any = _raised(found) if isinstance(found, Tensor) else _each_raised(found)
        result: Result = raised  # as many as there were
        return result


PRECISION = Precision()


def _tensors(arguments: Sequence[object]) -> list[Tensor]:
    found = []
    for x in arguments:
        found += [x] if isinstance(x, Tensor) else _tensors(x) if type(x) is list else []
    return found


def _lowered(x: object) -> object:
    if type(x) is list:
        return [_lowered(one) for one in x]
    if not isinstance(x, Tensor) or x.dtype != FULL:
        return x
    if records_gradient(x):
        return applied(_Cast, x, REDUCED)
    return cached(x, ("in bfloat16",), lambda: applied(_Cast, x, REDUCED))


def _each_raised(found: object) -> tuple[object, ...]:
    assert isinstance(found, (list, tuple))
    return tuple(map(_raised, found))


def _raised(x: object) -> object:
    return applied(_Cast, x, FULL) if isinstance(x, Tensor) and x.dtype == REDUCED else x


class _OfDtype(Context):
    dtype: torch.dtype


class _Cast(Function):
    """A tensor in another dtype, in memory as that of other large results."""

    @staticmethod
    def forward(ctx: _OfDtype, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = x.dtype
        return new_rows(x, x.shape, dtype).copy_(x)

    @staticmethod
    def backward(ctx: _OfDtype, grad: Tensor) -> tuple[Tensor, None]:
        return applied(_Cast, grad, ctx.dtype), None


def why_not_here() -> str | None:
    """Why this rank should not compute in bfloat16, or ``None`` if its device can do it fast."""
    if WORLD.device != HOST:
        module = torch.get_device_module(WORLD.device)
        if module.is_bf16_supported(including_emulation=False):
            return None
        return f"{WORLD.device} has no bfloat16 in hardware"
    why_not = native.why_unavailable()
    if why_not is None and native.cpu_level() == "baseline":
        why_not = (
            "its kernels are those for processors without AVX2, which widen four values of "
            "bfloat16 by two instructions"
        )
    return why_not


def reduce_precision(
    balance: Balance | None = None,
    *,
    ranks: Sequence[int] | None = None,
    threshold: float = THRESHOLD,
) -> ReducedPrecision:
    """Have overloaded ranks pass messages in bfloat16. All ranks must call it.

    Results change: rows that such a rank computes have the error of bfloat16, some 3 significant
    digits, and so has whatever is made of them. So this is for where :func:`rebalance` cannot help,
    as by a lack of memory. It is for fused operators on float32, computed by halo; what is computed
    by heads, on a grid, or by upstream's own message passing stays as it is. Each call decides for
    all ranks anew.

    Args:
        balance: what :func:`fastgraph.dist.measured` has measured.
        ranks: whose precision is reduced, the same on all ranks, instead. With ``[]``, that of none
            is any more.
        threshold: with ``balance``, a rank is overloaded that computes more than so many times as
            long as the mean of all.

    Returns:
        Which ranks do so now. One whose processor or GPU has no fast bfloat16 stays as it is.

    Raises:
        ValueError: an argument that cannot be used, or ``ranks`` differ between ranks.
    """
    if (balance is None) == (ranks is None):
        raise ValueError("either balance or ranks must be given, and not both")
    if not threshold >= 1:
        raise ValueError(f"threshold must be at least 1, got {threshold}")
    if balance is not None:
        if not balance.measured:
            raise ValueError("balance must be complete: use it after the block that is measured")
        wanted = overloaded(balance.measured, threshold)
    else:
        assert ranks is not None
        wanted = sorted(set(ranks))
    found = transport.gather_objects((wanted, why_not_here()))
    if any(other != wanted for other, _ in found):
        raise ValueError(
            f"ranks must be the same on all ranks, got {[other for other, _ in found]}"
        )
    if not all(rank in range(WORLD.size) for rank in wanted):
        raise ValueError(f"ranks must be numbers from 0 to {WORLD.size - 1}, got {wanted}")
    reasons = [(rank, found[rank][1]) for rank in wanted]
    refused = {rank: why_not for rank, why_not in reasons if why_not is not None}
    chosen = tuple(rank for rank in wanted if rank not in refused)
    PRECISION.is_reduced = WORLD.rank in chosen
    return ReducedPrecision(chosen, refused)
