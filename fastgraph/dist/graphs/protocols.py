"""The graphs of PyG and DGL as this package takes them: what it asks of each, and no more.

Neither library has types that a checker could read, and neither is imported before the program has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, ItemsView, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

TypeOfNodes = str | None
"""A type of nodes; ``None`` in a ``Data``."""

TypeOfEdges = tuple[str, str, str] | None
"""The types of sources and destinations, and between them the relation; ``None`` in a ``Data``."""

Attribute = Any  # of a store, under a name that the program chose: a tensor or anything else


class PygStore(Protocol):
    """The attributes of the nodes or edges of one type, or of a whole ``Data``."""

    def items(self) -> ItemsView[str, Attribute]:
        """Names and values."""

    def values(self) -> Iterable[Attribute]:
        """All values."""

    def get(self, key: str, /) -> Attribute:
        """A value; ``None`` if there is none."""

    def __getitem__(self, key: str, /) -> Attribute: ...

    def __setitem__(self, key: str, value: object, /) -> None: ...

    def _parent(self) -> PygGraph: ...


class NodeStore(PygStore, Protocol):
    """The attributes of the nodes of one type."""

    num_nodes: int | None
    _key: TypeOfNodes

    def is_node_attr(self, key: str) -> bool:
        """True if a tensor has a row for each node."""


class EdgeStore(PygStore, Protocol):
    """The attributes of the edges of one type."""

    _key: TypeOfEdges

    def is_edge_attr(self, key: str) -> bool:
        """True if a tensor has a row for each edge."""


class PygGraph(Protocol):
    """A ``Data`` or ``HeteroData``."""

    stores: Sequence[NodeStore | EdgeStore]
    node_stores: Sequence[NodeStore]
    edge_stores: Sequence[EdgeStore]
    x: Tensor
    edge_index: Tensor
    x_dict: dict[str, Tensor]
    edge_index_dict: dict[tuple[str, str, str], Tensor]

    def get(self, key: str, /) -> Attribute:
        """A value; ``None`` if there is none."""

    def __getitem__(self, key: str | tuple[str, ...], /) -> Attribute: ...

    def __setitem__(self, key: str, value: object, /) -> None: ...

    def apply(self, function: Callable[[Tensor], Tensor], /) -> PygGraph:
        """Replace all tensors."""

    def subgraph(self, nodes: Tensor | Mapping[str, Tensor], /) -> PygGraph:
        """Some nodes, and the edges between them."""

    def __cat_dim__(self, key: str, value: Tensor, store: PygStore) -> int: ...


Initializer = Callable[[tuple[int, ...], torch.dtype, torch.device, slice], Tensor]
"""Makes the features of nodes that get none, of a shape, dtype, device and rows."""


class Frame(Protocol):
    """The features of the nodes or edges of one type in a graph of DGL."""

    num_rows: int
    _initializers: dict[str, Initializer]
    _default_initializer: Initializer | None

    def keys(self) -> Collection[str]:
        """Their names."""

    def __getitem__(self, key: str, /) -> Tensor: ...

    def __setitem__(self, key: str, value: Tensor, /) -> None: ...

    def clone(self) -> Frame:
        """The same features, to be replaced one by one."""

    def subframe(self, rows: Tensor) -> Frame:
        """Some rows."""

    def get_initializer(self, column: str) -> Initializer | None:
        """That of a feature."""


class Metagraph(Protocol):
    """DGL's graph of types of nodes and relations."""

    def find_edge(self, etype: int, /) -> tuple[int, int]:
        """The types of the sources and destinations of a relation."""


class GraphIndex(Protocol):
    """The edges of a graph of DGL: a handle of its C++ library, or a ``ShardedIndex``."""

    metagraph: Metagraph

    def edges(self, etype: int, order: str, /) -> tuple[Tensor, Tensor, Tensor]:
        """Sources, destinations and numbers of the edges of a relation."""

    def num_nodes(self, ntype: int, /) -> int:
        """The number of nodes of a type."""

    def number_of_ntypes(self) -> int:
        """The number of types of nodes."""


class DglGraph(Protocol):
    """A ``DGLGraph``."""

    ntypes: list[str]
    dsttypes: list[str]
    canonical_etypes: list[tuple[str, str, str]]
    is_block: bool
    batch_size: int
    device: torch.device
    idtype: torch.dtype
    ndata: Mapping[str, Tensor]
    _graph: GraphIndex
    _node_frames: list[Frame]
    _edge_frames: list[Frame]

    def num_nodes(self, ntype: str | None = None) -> int:
        """The number of nodes of a type, or of all."""

    def num_edges(self) -> int:
        """The number of edges of all relations."""

    def to(self, device: torch.device, /) -> DglGraph:
        """The same graph on a device."""

    def local_var(self) -> DglGraph:
        """The same graph, whose features can be replaced."""

    def get_etype_id(self, etype: object) -> int:
        """The number of a relation, of the only one for ``None``."""

    def get_ntype_id_from_dst(self, ntype: str) -> int:
        """The number of a type of destinations."""


AnyGraph = PygGraph | DglGraph
