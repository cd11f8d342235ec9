"""The schedule of learning rates by which graph transformers are trained."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fastgraph.layers.arguments import check_integers, check_kinds, check_numbers


def polynomial_decay(
    optimizer: Optimizer, warm_up: int, steps: int, *, end: float = 1e-9, power: float = 1.0
) -> LambdaLR:
    r"""A scheduler whose rates rise to those of the optimizer, and fall to ``end``.

    That of Graphormer and TorchGT. In step :math:`t`, from 1 on, the rate is :math:`r\,t / w` up to
    the end of the warm-up, :math:`w`, and :math:`e + (r - e) ((n - t) / (n - w))^p` after it, until
    step :math:`n`, from which on it is :math:`e`.

    Args:
        optimizer: with its largest rates; groups with a rate of 0 keep it.
        warm_up: steps in which rates rise, at least 0.
        steps: in all, more than ``warm_up``.
        end: the last rate, at least 0.
        power: of the decay, above 0.

    Raises:
        TypeError: ``optimizer`` is none.
        ValueError: a number is out of its range.
    """
    check_kinds(Optimizer, optimizer=optimizer)
    check_integers(0, warm_up=warm_up)
    check_integers(steps=steps)
    if steps <= warm_up:
        raise ValueError(f"steps: expected more than warm_up, {warm_up}, got {steps}")
    check_numbers("a number of at least 0", lambda rate: 0 <= rate < math.inf, end=end)
    check_numbers("a number above 0", lambda exponent: 0 < exponent < math.inf, power=power)

    def factor_of(rate: float) -> Callable[[int], float]:
        def factor(before: int) -> float:
            step = before + 1
            if step <= warm_up:
                return step / warm_up
            if rate == 0:
                return 1.0
            left = max(steps - step, 0) / (steps - warm_up)
            return float(end + (rate - end) * left**power) / rate

        return factor

    rates = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
    return LambdaLR(optimizer, [factor_of(rate) for rate in rates])
