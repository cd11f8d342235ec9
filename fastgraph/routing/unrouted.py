"""Code without a route of its own that passes no messages: it runs as it is, and is counted.

Nothing would tell otherwise that a model aggregates there, too. Functions that it calls may have
routes (:mod:`fastgraph.routing.parts`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from fastgraph.plugins.patching import Patches
from fastgraph.routing.parts import Parts
from fastgraph.routing.status import THREAD
from fastgraph.routing.switch import SWITCH
from fastgraph.upstream import UNROUTED, label_of

Seen = Callable[[tuple[Any, ...], dict[str, Any]], tuple[str, str]]
"""From positional and keyword arguments, the name under which a call is counted, and the reason why
it runs upstream's code where nothing in it has a route."""


def count_calls(patches: Patches, owner: Any, name: str, seen: Seen) -> None:
    """Have the calls of a function counted that are no part of one that is counted as a whole.

    ``strict`` is no matter here: it is for layers that have a route.

    Args:
        patches: by which it is replaced.
        owner: a class or a module.
        name: of the function in it.
        seen: what is counted.
    """
    patches.replace(owner, name, counting(getattr(owner, name), seen))


def counting(upstream: Callable[..., Any], seen: Seen) -> Callable[..., Any]:
    """The function that :func:`count_calls` puts in the place of another.

    Args:
        upstream: the other.
        seen: what is counted.
    """
    is_compiling, is_seen_by_dynamo = (
        torch.compiler.is_compiling,
        torch.compiler.is_dynamo_compiling,
    )

    @functools.wraps(upstream)
    def counted(*args: Any, **kwargs: Any) -> Any:
        # First of all what holds for a layer that is left to upstream, which loses this time.
        if is_seen_by_dynamo() or THREAD.counted:
            return upstream(*args, **kwargs)
        if is_compiling() or not SWITCH.active:
            return upstream(*args, **kwargs)
        with Parts(*seen(args, kwargs)):
            return upstream(*args, **kwargs)

    return counted


def count_modules(patches: Patches, module: str) -> None:
    """Have the calls of the classes in :data:`fastgraph.upstream.UNROUTED` counted.

    Args:
        patches: by which their ``forward`` is replaced.
        module: where they are defined; old versions have some of them only.
    """
    for name, reason in UNROUTED[module].items():
        cls = getattr(sys.modules[module], name, None)
        if cls is not None:
            count_calls(patches, cls, "forward", _of_class(cls, reason))


def _of_class(cls: type, reason: str) -> Seen:
    seen = label_of(cls), reason

    def by_name(args: tuple[Any, ...], _: dict[str, Any]) -> tuple[str, str]:
        own = type(args[0])
        return seen if own is cls else (label_of(own), reason)

    return by_name
