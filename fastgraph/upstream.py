"""Names in the libraries that have routes, for code that must import neither them nor torch."""

from __future__ import annotations

import sys

PACKAGES = ("torch_geometric", "dgl")
"""As programs import them."""

ATTENTION = {
    "torch_geometric.nn.conv": ("GATConv", "GATv2Conv", "TransformerConv"),
    "dgl.nn.pytorch.conv": ("GATConv", "GATv2Conv", "EdgeGATConv"),
}
"""By module, the layers that draw other random numbers for dropout on their route."""


def label_of(cls: type) -> str:
    """The name under which calls of a layer are counted: with its package, except for PyG's own.

    Two libraries have layers of the same name; your own classes go by theirs.
    """
    package = cls.__module__.partition(".")[0]
    return f"{package}.{cls.__name__}" if package in PACKAGES[1:] else cls.__name__


def attention_classes() -> tuple[type, ...]:
    """Those whose module the program has imported, or is importing just now."""
    return tuple(
        vars(sys.modules[module])[name]
        for module, names in ATTENTION.items()
        if module in sys.modules
        for name in names
        if name in vars(sys.modules[module])
    )
