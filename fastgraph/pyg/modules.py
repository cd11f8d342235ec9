"""PyG's own modules within layers whose ``forward`` is replaced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch_geometric.nn import GENConv, Linear

from fastgraph.layers.modules import KnownLinear
from fastgraph.layers.sums import add_to

LINEAR = KnownLinear(Linear)

project = LINEAR.project


_LAZY: dict[type, dict[str, tuple[str, int | None]]] = {
    GENConv: {"lin_edge": ("edge_attr", None), "lin_dst": ("x", 1)}
}
"""By classes of PyG, the projections that get their weights in the first call after its start, in
their order: the argument of ``propagate`` that each takes, and the position in a pair."""


def make_lazy_weights(module: Any, arguments: Mapping[str, Any]) -> None:
    """Make the weights that upstream's code makes within and behind the first message of a layer.

    From the same random numbers, and so the first call can be routed as those that follow. Classes
    of users may do other things behind the message, and are left as they are.

    Args:
        module: the layer.
        arguments: those of ``propagate``.
    """
    for name, (argument, position) in _LAZY.get(type(module), {}).items():
        lazy, given = module._modules.get(name), arguments.get(argument)
        if type(lazy) is not Linear or not lazy.__dict__.get("_hook"):
            continue
        if position is not None:
            given = given[position] if isinstance(given, (tuple, list)) else None
        if isinstance(given, Tensor) and given.dim() > 0:
            lazy.initialize_parameters(lazy, (given,))


def pair_of(x: Any) -> Any:
    """Features of sources and of destinations; ``None`` for what is neither one tensor nor two."""
    if isinstance(x, Tensor):
        return (x, x)
    return x if isinstance(x, (tuple, list)) and len(x) == 2 else None


def add_root(out: Tensor, owned: bool, lin_root: Any, root: Tensor) -> Tensor:
    """``out + lin_root(root)``; ``owned`` says that ``out`` may be changed."""
    term = project(lin_root, root)
    return add_to(out, term) if owned else out + term
