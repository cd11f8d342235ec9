"""Checks of modules: whether they are accelerated, and by which edge programs."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch

from fastgraph import settings
from fastgraph.comparison.borrowing import borrowed
from fastgraph.comparison.runs import check_type, tensors_of, untouched_randomness
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing import status
from fastgraph.routing.programs import last_outcome
from fastgraph.routing.switch import SWITCH


def explain(module: torch.nn.Module | Callable[..., Any]) -> str:
    """The edge programs of layers whose messages are traced, after a call of them, as text.

    Args:
        module: a layer, or a module that has some; or a function that was passed to DGL's message
            passing, with what became of the last call of it.

    Returns:
        For each layer the program that computed its last call: its operands and instructions, the
        parts of the message that torch computes before it, once for each node, edge or parameter,
        and what is kept for the gradients. Where the last call was left to upstream, the reason.
        Layers that have a route of their own are not traced: see :func:`fastgraph.status`.

    Raises:
        TypeError: neither a ``torch.nn.Module`` nor a function.
    """
    found = []
    if isinstance(module, (FunctionType, MethodType)):
        name = module.__name__
        outcomes = [(name, last_outcome(module.__code__))]
    else:
        check_type(module)
        assert isinstance(module, torch.nn.Module)
        name = type(module).__name__
        outcomes = [
            (f"{path} ({type(layer).__name__})" if path else name, last_outcome(layer))
            for path, layer in module.named_modules()
        ]
    for title, outcome in outcomes:
        if isinstance(outcome, Refusal):
            found.append(f"{title}: left to upstream: {outcome}")
        elif outcome is not None:
            found.append(f"{title}: {outcome.explain()}")
    return "\n".join(found) or (
        f"{name}: no message was traced; fastgraph.status() says which layers were routed"
    )


def is_accelerated(module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[bool, list[str]]:
    """True if all message passing in ``module(*args, **kwargs)`` runs through fastgraph.

    The module is run once on these inputs. Afterwards its buffers, its other attributes, with what
    is in lists, dictionaries and sets of them, and the gradients of its parameters are as before.
    So are the random states of torch, on the devices of these tensors, of numpy and of python, and
    the counters of ``fastgraph.status()``. Objects of other kinds that it holds are not copied, and
    keep what ``forward`` changes in them. What ``torch.compile`` has compiled runs eagerly here:
    the compiled code takes the same routes. Graphs count as large enough to gain, unless the
    setting ``min_edges`` says otherwise.

    Args:
        module: any module, in the mode and on the device in which it is to run.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        ``(accelerated, reasons)``: true if something was routed and nothing fell back; the reasons
        name each layer that fell back, or say that no layer with a route was met.

    Raises:
        TypeError: not a ``torch.nn.Module``.
    """
    check_type(module)
    if not SWITCH.active:
        return False, ["fastgraph is not enabled"]
    with (
        untouched_randomness(0, tensors_of(module, args, kwargs)),
        torch.compiler.set_stance("force_eager"),
        status.recording() as seen,
        settings.of_any_size(),
        borrowed(module) as lent,
    ):
        lent(*args, **kwargs)
    reasons = [f"{row.layer}: {reason}" for row in seen.rows for reason in row.reasons]
    if not seen.rows:
        original = getattr(module, "_orig_mod", module)
        reasons.append(f"{type(original).__name__} runs no layer that fastgraph knows")
    return not reasons, reasons
