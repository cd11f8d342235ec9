"""The parts of a PyG graph as files hold them: attributes by stores, by row or whole.

:mod:`fastgraph.dist.files.dgl_stores` has the same for DGL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fastgraph.dist.graphs.protocols import (
    Attribute,
    EdgeStore,
    NodeStore,
    PygGraph,
    TypeOfNodes,
)
from fastgraph.dist.graphs.pyg import by_row
from fastgraph.dist.tensor.layout import Layout

Key = str | Sequence[str] | None  # of nodes, of edges, or of a whole graph, as JSON has it


@dataclass
class Store:
    """The attributes of a type of nodes or edges, or of a graph.

    Attributes:
        key: which type, as JSON has it.
        label: the same in names of tensors, of which it must be the only one.
        values: the attributes by name.
        rows: of those that ranks share out, the dimension and whose rows these are.
    """

    key: Key
    label: str
    values: dict[str, Attribute]
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


def contents(data: PygGraph, parts: Sequence[Tensor]) -> Contents:
    """The parts of a ``Data`` or ``HeteroData``, as files hold them.

    Args:
        data: the graph, of which it shares the memory.
        parts: for each type of nodes the rank of each, int64.
    """
    from torch_geometric.data import HeteroData

    owners: dict[str, Tensor] = {}
    of_nodes: dict[TypeOfNodes, Tensor] = {}
    belonging: dict[int, list[tuple[Callable[[str], bool], str]]] = {}
    for store, owner in zip(data.node_stores, parts, strict=True):
        of_nodes[store._key] = owner
        name = f"nodes of {_label(store)}"
        owners[name] = owner
        belonging.setdefault(id(store), []).append((store.is_node_attr, name))
    for edges in data.edge_stores:
        index = edges.get("edge_index")
        if type(index) is Tensor:
            name = f"edges of {_label(edges)}"
            owners[name] = of_nodes[edges._key[2] if edges._key else None][index[1]]
            belonging.setdefault(id(edges), []).append((edges.is_edge_attr, name))
    stores = []
    for one in data.stores:
        rows: dict[str, tuple[int, str]] = {}
        for belongs, name in belonging.get(id(one), []):
            for key, axis in by_row(one, belongs, len(owners[name])).items():
                rows.setdefault(key, (axis, name))
        stores.append(Store(one._key, _label(one), dict(one.items()), rows))
    kind = "HeteroData" if isinstance(data, HeteroData) else "Data"
    return Contents(kind, stores, owners)


def graph_of(
    kind: str, stores: Sequence[tuple[Key, dict[str, Attribute]]], layouts: Mapping[str, Layout]
) -> PygGraph:
    """A graph of what one was made of.

    Args:
        kind: the name of its class.
        stores: the key and the attributes of each.
        layouts: of each type of nodes and edges, by the names that owners had.
    """
    from torch_geometric.data import Data, HeteroData

    data: PygGraph = {"Data": Data, "HeteroData": HeteroData}[kind]()
    for key, values in stores:
        store = data if key is None else data[key if isinstance(key, str) else tuple(key)]
        for name, value in values.items():
            store[name] = value
    return data


def name_of_type(key: str | Sequence[str]) -> str:
    """The name of a type of nodes or edges, which no other one has, whatever they are called."""
    return f"type {key!r}" if isinstance(key, str) else f"type {list(key)!r}"


def _label(store: NodeStore | EdgeStore) -> str:
    return "graph" if store._key is None else name_of_type(store._key)
