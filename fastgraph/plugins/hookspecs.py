"""The hooks through which a plugin adds backends, routes and frameworks.

A plugin is a module or object with functions marked by :data:`hookimpl`, installed under the
entry-point group ``fastgraph``, or registered with :func:`plugin_manager` before fastgraph is first
enabled or used. Hooks are never called in a layer's forward.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from fastgraph.plugins.backend import Backend
    from fastgraph.plugins.framework import Framework
    from fastgraph.plugins.route import Route

hookspec = pluggy.HookspecMarker("fastgraph")
hookimpl = pluggy.HookimplMarker("fastgraph")

BUILT_IN = (
    "fastgraph.backends.builtin",
    "fastgraph.routing.scripting",
    "fastgraph.pyg",
    "fastgraph.dgl",
    "fastgraph.comparison",
)
"""The plugins that come with fastgraph. They are named, not imported: they stand on this module."""


@hookspec
def fastgraph_backends() -> Sequence[Backend]:  # type: ignore[empty-body]
    """Backends to offer; the one with the highest priority that has a kernel computes it."""


@hookspec
def fastgraph_routes() -> Sequence[Route]:  # type: ignore[empty-body]
    """Routes from upstream classes or functions to operators, applied by ``fastgraph.enable()``."""


@hookspec
def fastgraph_frameworks() -> Sequence[Framework]:  # type: ignore[empty-body]
    """Libraries of graph layers that have routes: what comparisons and reports ask about them."""


@hookspec
def fastgraph_switched(active: bool) -> None:
    """Called after fastgraph was enabled or disabled, once its settings are in force."""


@functools.cache
def plugin_manager() -> pluggy.PluginManager:
    """The manager of all plugins, with the built-in ones and installed entry points registered."""
    manager = pluggy.PluginManager("fastgraph")
    manager.add_hookspecs(sys.modules[__name__])
    for name in BUILT_IN:
        manager.register(importlib.import_module(name), name)
    manager.load_setuptools_entrypoints("fastgraph")
    return manager
