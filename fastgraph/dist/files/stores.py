"""The parts of a PyG graph as files hold them: attributes by stores, by row or whole.

:mod:`fastgraph.dist.files.dgl_stores` has the same for DGL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fastgraph.dist.graphs.pyg import by_row
from fastgraph.dist.tensor.layout import Layout


@dataclass
class Store:
    """The attributes of a type of nodes or edges, or of a graph.

    Attributes:
        key: which type, as JSON has it.
        label: the same in names of tensors, of which it must be the only one.
        values: the attributes by name.
        rows: of those that ranks share out, the dimension and whose rows these are.
    """

    key: Any
    label: str
    values: dict[str, Any]
    rows: dict[str, tuple[int, str]] = field(default_factory=dict)


@dataclass
class Contents:
    """A graph.

    Attributes:
        kind: the name of its class.
        stores: all of its attributes.
        owners: of each type of nodes and edges the rank of each, int64.
    """

    kind: str
    stores: list[Store]
    owners: dict[str, Tensor]


def contents(data: Any, parts: Sequence[Tensor]) -> Contents:
    """The parts of a ``Data`` or ``HeteroData``, as files hold them.

    Args:
        data: the graph, of which it shares the memory.
        parts: for each type of nodes the rank of each, int64.
    """
    from torch_geometric.data import HeteroData

    owners, of_nodes = {}, {}
    belonging: dict[int, list[tuple[Any, str]]] = {}
    for store, owner in zip(data.node_stores, parts, strict=True):
        of_nodes[store._key] = owner
        name = f"nodes of {_label(store)}"
        owners[name] = owner
        belonging.setdefault(id(store), []).append((store.is_node_attr, name))
    for store in data.edge_stores:
        index = store.get("edge_index")
        if type(index) is Tensor:
            name = f"edges of {_label(store)}"
            owners[name] = of_nodes[store._key[2] if store._key else None][index[1]]
            belonging.setdefault(id(store), []).append((store.is_edge_attr, name))
    stores = []
    for store in data.stores:
        rows: dict[str, tuple[int, str]] = {}
        for belongs, name in belonging.get(id(store), []):
            for key, axis in by_row(store, belongs, len(owners[name])).items():
                rows.setdefault(key, (axis, name))
        stores.append(Store(store._key, _label(store), dict(store.items()), rows))
    kind = "HeteroData" if isinstance(data, HeteroData) else "Data"
    return Contents(kind, stores, owners)


def graph_of(
    kind: str, stores: Sequence[tuple[Any, dict[str, Any]]], layouts: Mapping[str, Layout]
) -> Any:
    """A graph of what one was made of.

    Args:
        kind: the name of its class.
        stores: the key and the attributes of each.
        layouts: of each type of nodes and edges, by the names that owners had.
    """
    from torch_geometric.data import Data, HeteroData

    data = {"Data": Data, "HeteroData": HeteroData}[kind]()
    for key, values in stores:
        store = data if key is None else data[key if isinstance(key, str) else tuple(key)]
        for name, value in values.items():
            store[name] = value
    return data


def name_of_type(key: str | Sequence[str]) -> str:
    """The name of a type of nodes or edges, which no other one has, whatever they are called."""
    return f"type {key!r}" if isinstance(key, str) else f"type {list(key)!r}"


def _label(store: Any) -> str:
    return "graph" if store._key is None else name_of_type(store._key)
