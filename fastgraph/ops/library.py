"""The ``fastgraph`` operator namespace of torch."""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("fastgraph", "DEF")

TAGS = (
    torch.Tag.pt2_compliant_tag,
    # The implementations look at the identity of the index tensors on the host, which a replayed
    # CUDA graph would not do again.
    torch.Tag.cudagraph_unsafe,
)


def define(schema: str) -> None:
    """Declare an operator of the ``fastgraph`` namespace."""
    LIBRARY.define(schema, tags=TAGS)
