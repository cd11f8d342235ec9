"""Messages that raise where there are no edges, as a view with an unknown size does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fastgraph.edge_programs.called import Called, Raised
from fastgraph.edge_programs.node_counts import is_count
from fastgraph.edge_programs.traced import Argument, Index
from fastgraph.edge_programs.unchanged import unchanged


def raises_without_edges(
    message: Callable[..., Any], arguments: Mapping[str, object], device: torch.device
) -> bool:
    """True if a message raises for no edges.

    Args:
        message: as for :func:`fastgraph.edge_programs.trace.trace`, which must have traced it.
        arguments: likewise.
        device: of its tensors.
    """

    def empty(described: object) -> object:
        if isinstance(described, Argument):
            rows = () if described.place == "parameter" else (0,)
            return torch.ones(*rows, *described.channels, dtype=described.dtype, device=device)
        if isinstance(described, Index):
            return torch.empty(0, dtype=described.dtype, device=device)
        return 1 if is_count(described) else described

    call = Called(message)
    with torch.no_grad(), unchanged(call.layer):
        try:
            given = {name: empty(described) for name, described in arguments.items()}
            call.run(given, call.state(), lambda _: None)
        except Raised:
            return True
    return False
