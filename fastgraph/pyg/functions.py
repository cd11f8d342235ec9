"""Functions of PyG that have routes, replaced in all modules that have imported them.

Within layers, whose calls are routed or left to upstream as a whole, they run as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastgraph.graphs.memo import is_recording
from fastgraph.plugins.patching import Patches, modules_with
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.dispatch import Computation, run_upstream
from fastgraph.routing.parts import Parts, report
from fastgraph.routing.status import THREAD
from fastgraph.routing.switch import SWITCH
from fastgraph.routing.wrappers import wrapped

Function = Callable[..., Any]

Planned = Computation | Refusal | None
"""The computation of a call, why it is left to upstream, or ``None`` where it has no operator."""


def routed(upstream: Function, plan: Callable[..., Planned]) -> Function:
    """A function that computes what ``plan`` of its arguments returns, or runs upstream's.

    Args:
        upstream: a function of PyG. Compiled code calls it, and what looks at each operation.
        plan: takes the same arguments.
    """
    name = plan.__qualname__ = upstream.__name__  # which wrong calls are reported with
    is_tracing = torch._C._is_tracing  # of TorchScript, to which sizes are tensors
    is_seen_by_dynamo = torch.compiler.is_dynamo_compiling

    def function(*args: Any, **kwargs: Any) -> Any:
        if is_seen_by_dynamo() or not SWITCH.active or is_recording() or is_tracing():
            return upstream(*args, **kwargs)
        planned = plan(*args, **kwargs)
        if planned is None:
            return upstream(*args, **kwargs)
        if not isinstance(planned, Refusal):
            report(name, None)
            return planned()
        report(name, planned)
        under_way = THREAD.counted
        under_way.append(upstream)  # which calls others of these functions
        try:
            return run_upstream(planned, upstream, *args, **kwargs)
        finally:
            under_way.pop()

    def is_left() -> bool:
        """True within a call that was left to upstream and counted with all that it calls."""
        if is_seen_by_dynamo():
            return False
        under_way = THREAD.counted
        return bool(under_way) and type(under_way[-1]) is not Parts

    wrapper = wrapped(upstream, is_left, (), function, is_part=True)
    assert wrapper is not None  # none of them takes any number of arguments
    wrapper._fastgraph_upstream = upstream  # type: ignore[attr-defined]
    return wrapper


def replace_functions(patches: Patches, functions: Sequence[tuple[Function, Function]]) -> None:
    """Replace functions in all modules that have them by their own names.

    Args:
        patches: by which they are replaced.
        functions: each of upstream's, and the one that takes its place.
    """
    for module in modules_with(*(upstream.__name__ for upstream, _ in functions)):
        own = vars(module)
        for upstream, function in functions:
            if own.get(upstream.__name__) is upstream:
                patches.replace(module, upstream.__name__, function)
