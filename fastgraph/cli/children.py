"""Processes that a program under the runner starts by multiprocessing's spawn or forkserver.

They import the program anew, without the runner. Those that are forked are enabled already.
"""

from __future__ import annotations

import functools
from typing import Any

from wrapt import register_post_import_hook


def enable_in_children(arguments: dict[str, Any]) -> None:
    """Enable fastgraph in processes spawned while it is enabled here, and in their children.

    Args:
        arguments: those of ``fastgraph.enable()``.
    """
    from multiprocessing import spawn

    upstream = spawn.get_preparation_data

    @functools.wraps(upstream)
    def get_preparation_data(name: str) -> dict[str, Any]:
        import fastgraph

        data = upstream(name)
        if fastgraph.is_enabled():
            # A child loads this before it imports the program, and ignores keys it does not know.
            data["fastgraph"] = _Preparation(arguments)
        return data

    spawn.get_preparation_data = get_preparation_data


class _Preparation:
    """Loading it, as the child does, calls :func:`_prepare`."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return _prepare, (self._arguments,)


def _prepare(arguments: dict[str, Any]) -> None:
    import fastgraph

    enable_in_children(arguments)
    # Children that do not use torch need not wait for it.
    register_post_import_hook(lambda _: fastgraph.enable(**arguments), "torch")
