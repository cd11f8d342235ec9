"""The routes that come with fastgraph, as a plugin."""

from __future__ import annotations

from collections.abc import Sequence

from fastgraph import pyg
from fastgraph.hookspecs import hookimpl
from fastgraph.routing import scripting
from fastgraph.routing.route import Route


@hookimpl
def fastgraph_routes() -> Sequence[Route]:
    return [scripting.ROUTE, *pyg.ROUTES]
