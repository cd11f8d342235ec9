"""A message, called with other tensors in the place of its layer's parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fastgraph.edge_programs.recorded import Refused

Made = TypeVar("Made")


class Raised(Refused):
    """A message that raises while it is traced.

    Attributes:
        kind: the class of what it raises.
    """

    def __init__(self, kind: type[Exception]) -> None:
        super().__init__(f"it raises {kind.__name__} when it is traced")
        self.kind = kind


class Called(nn.Module):
    """A module whose state is that of a message's layer, and whose call is that of the message."""

    def __init__(self, message: Callable[..., Any]) -> None:
        super().__init__()
        self._message = message
        layer = getattr(message, "__self__", None)
        self.layer = layer if isinstance(layer, nn.Module) else None

    def forward(self, given: Mapping[str, object], then: Callable[[Any], Any]) -> Any:
        """The value made of the message, which takes the arguments ``given``."""
        return then(self._message(**given))

    def state(self) -> dict[str, Tensor]:
        """The parameters and buffers of the layer, by their names in it."""
        if self.layer is None:
            return {}
        return {**dict(self.layer.named_parameters()), **dict(self.layer.named_buffers())}

    def run(
        self,
        given: Mapping[str, object],
        state: Mapping[str, Tensor],
        then: Callable[[Any], Made],
    ) -> Made:
        """The value made of the message with another state, which leaves no trace in the layer.

        Raises:
            Refused: it raises.
        """
        named = {f"layer.{name}": tensor for name, tensor in state.items()}
        try:
            out: Made = torch.func.functional_call(self, named, (given, then))
        # Any code of users runs here on tensors that have no data, which any of it may not bear.
        # Nothing has been computed yet: upstream shows the error, if it is one.
        except Exception as error:
            raise Raised(type(error)) from None
        return out
