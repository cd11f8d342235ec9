"""Where calls of a layer end differently without and with fastgraph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tests.ab import Arguments
from tests.outcomes import difference, tensors_in
from tests.wrong_calls.cases import Case
from tests.wrong_calls.forking import Ended, outcomes

_HALVES = {torch.bfloat16, torch.float16}
_ROUNDING = 1e-2  # of bfloat16, whose unit is 4e-3


class Difference(NamedTuple):
    """A call that ends differently.

    Attributes:
        layer: the configuration.
        case: the name of the call.
        kind: in a few words; ``"upstream differs from itself"`` where nothing can be compared.
        text: both endings.
    """

    layer: str
    case: str
    kind: str
    text: str


def compared(
    name: str,
    module: nn.Module,
    cases: Sequence[Case],
    seconds: float = 5.0,
    is_meant: Callable[[Difference], bool] = lambda _: False,
) -> list[Difference]:
    """The calls of a layer that end differently, confirmed in processes of their own.

    Args:
        name: of the configuration.
        module: the layer.
        cases: the calls.
        seconds: of processor time after which a call is ended.
        is_meant: true for a difference that need not be confirmed.
    """
    ours = outcomes(module, cases, seconds, routed=True)
    upstreams = outcomes(module, cases, seconds, routed=False)
    found, doubtful = [], []
    for case, a, b in zip(cases, upstreams, ours, strict=True):
        differs = described(a, b, _coarsest(module, case.call))
        if differs is None:
            continue
        found.append(Difference(name, case.name, *differs))
        if not is_meant(found[-1]):
            found.pop()
            doubtful.append(case)
    first, again = (
        outcomes(module, doubtful, seconds, routed=False, isolated=True) for _ in range(2)
    )
    ours = outcomes(module, doubtful, seconds, routed=True, isolated=True)
    for case, a, b, c in zip(doubtful, first, again, ours, strict=True):
        coarsest = _coarsest(module, case.call)
        differs = described(a, c, coarsest)
        if differs is None:
            continue
        if described(a, b, coarsest) is not None:
            differs = "upstream differs from itself", differs[1]
        elif coarsest in _HALVES and is_nearer(c, a, _in_float64(module, case, seconds)):
            continue
        found.append(Difference(name, case.name, *differs))
    return found


def _in_float64(module: nn.Module, case: Case, seconds: float) -> Ended:
    """How a call ends upstream if all that it is given is in float64."""
    exact = case._replace(call=tree_map(_doubled, case.call))
    return outcomes(copy.deepcopy(module).double(), [exact], seconds, routed=False)[0]


def _doubled(value: Any) -> Any:
    is_number = isinstance(value, Tensor) and value.is_floating_point()
    return value.double() if is_number else value


def is_nearer(ours: Ended, upstream: Ended, exact: Ended) -> bool:
    """True if all results are like upstream's, and none is farther from the exact one.

    The rounding of a sum in half precision decides whether a ReLU after it lets a gradient pass, so
    that upstream's may be wrong by a whole gradient.
    """
    if isinstance(ours, str) or isinstance(upstream, str) or isinstance(exact, str):
        return False
    if ours.error or upstream.error or exact.error:
        return False
    if [_form(result) for result in ours.results] != [_form(r) for r in upstream.results]:
        return False
    for found, theirs, right in zip(ours.results, upstream.results, exact.results, strict=True):
        if found is None or theirs is None or right is None or not found.numel():
            continue
        if not _error(found, right) <= max(_error(theirs, right), _ROUNDING):  # or it is NaN
            return False
    return True


def _form(result: Tensor | None) -> tuple[object, ...]:
    return () if result is None else (result.shape, result.dtype, result.device, result.layout)


def _error(found: Tensor, right: Tensor) -> float:
    """The largest error, relative to the largest value above 1."""
    return float((found - right).abs().max() / right.abs().max().clamp(min=1.0))


def _coarsest(module: nn.Module, call: Arguments) -> torch.dtype:
    """The dtype with the largest rounding error among parameters and arguments."""
    given = [*module.parameters(), *tensors_in(call)]
    dtypes = {t.dtype for t in given if t.is_floating_point()} or {torch.float32}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def described(
    upstream: Ended, ours: Ended, coarsest: torch.dtype = torch.float32
) -> tuple[str, str] | None:
    """How two endings differ, in a few words and in full; ``None`` where they do not.

    Args:
        upstream: how the call ends upstream.
        ours: how it ends with fastgraph.
        coarsest: as for :func:`tests.outcomes.difference`.
    """
    if isinstance(upstream, str) or isinstance(ours, str):
        if upstream == ours:
            return None
        return f"{_short(upstream)} / {_short(ours)}", f"upstream {upstream}\n    ours {ours}"
    text = difference(upstream, ours, coarsest)
    if text is None:
        return None
    return f"{_short(upstream)} / {_short(ours)}", text


def _short(ended: Ended) -> str:
    if isinstance(ended, str):
        return ended
    if ended.error is None:
        return "computes"
    return f"{ended.error[0].rpartition('.')[2]} in {ended.step}"
