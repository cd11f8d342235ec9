"""The hooks through which a plugin adds backends and routes.

A plugin is a module or object with functions marked by :data:`hookimpl`, installed under the
entry-point group ``fastgraph``, or registered with ``fastgraph.hookspecs.plugin_manager()`` before
fastgraph is first enabled or used. Hooks are never called in a layer's forward.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from fastgraph.backends.base import Backend
    from fastgraph.routing.route import Route

hookspec = pluggy.HookspecMarker("fastgraph")
hookimpl = pluggy.HookimplMarker("fastgraph")


@hookspec
def fastgraph_backends() -> Sequence[Backend]:  # type: ignore[empty-body]
    """Backends to offer; the one with the highest priority that has a kernel computes it."""


@hookspec
def fastgraph_routes() -> Sequence[Route]:  # type: ignore[empty-body]
    """Routes from upstream classes or functions to operators, applied by ``fastgraph.enable()``."""


@functools.cache
def plugin_manager() -> pluggy.PluginManager:
    """The manager of all plugins, with the built-in ones and installed entry points registered."""
    import sys

    from fastgraph.backends import builtin as builtin_backends
    from fastgraph.routing import builtin as builtin_routes

    manager = pluggy.PluginManager("fastgraph")
    manager.add_hookspecs(sys.modules[__name__])
    manager.register(builtin_backends, "fastgraph.backends")
    manager.register(builtin_routes, "fastgraph.routes")
    manager.load_setuptools_entrypoints("fastgraph")
    return manager
