"""TorchScript reads source code, so it must see upstream's own.

It looks into functions through a few functions of torch, whoever asks it to compile what. They are
replaced rather than ``torch.jit.script``, which finds the names that a class uses in the frame of
its caller: a wrapper around it would be that caller.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch._jit_internal
import torch._sources
import torch.jit._script

from fastgraph.plugins.hookspecs import hookimpl
from fastgraph.plugins.patching import Patches
from fastgraph.plugins.route import Route

# All take a function first: for the names that it uses, its source, and its overloads, which torch
# keeps for the very function that they were declared for.
_READERS = (
    (torch._jit_internal, "get_closure"),
    (torch._sources, "get_source_lines_and_file"),
    (torch.jit._script, "_get_overloads"),
    (torch.jit._script, "_check_directly_compile_overloaded"),
)


def _install(patches: Patches) -> None:
    for owner, name in _READERS:
        patches.replace(owner, name, _reading_upstream(getattr(owner, name), patches))


def _reading_upstream(reader: Callable[..., Any], patches: Patches) -> Callable[..., Any]:
    @functools.wraps(reader)
    def read(function: Any, *args: Any, **kwargs: Any) -> Any:
        return reader(patches.upstream_of(function), *args, **kwargs)

    return read


@hookimpl
def fastgraph_routes() -> list[Route]:
    """The route of torch's readers of source code."""
    return [Route(name="TorchScript", module="torch.jit", install=_install)]
