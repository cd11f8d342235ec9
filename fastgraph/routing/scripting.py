"""TorchScript reads source code, so it must see upstream's own."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.jit._script

from fastgraph.routing.patching import Patches
from fastgraph.routing.route import Route


def _install(patches: Patches) -> None:
    from fastgraph.routing.state import SWITCH

    upstream = torch.jit.script

    @functools.wraps(upstream)
    def script(*args: Any, **kwargs: Any) -> Any:
        with SWITCH.upstream():
            return upstream(*args, **kwargs)

    for owner in (torch.jit, torch.jit._script):
        patches.replace(owner, "script", script)


ROUTE = Route(name="torch.jit.script", module="torch.jit", install=_install)
