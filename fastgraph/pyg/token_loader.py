"""A loader of tokens: mini-batches for which nobody looks at the graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.sampler import BaseSampler, NodeSamplerInput, SamplerOutput

from fastgraph.tokens.byte_counts import byte_count
from fastgraph.tokens.gathering import gather_tokens
from fastgraph.tokens.hop_features import HopFeatures
from fastgraph.tokens.row_cache import LocalNodes, RowCache, count_reads, most_read

LOCAL_NODES, HOP_FEATURES = "local_nodes", "hop_features"
"""Attributes of a graph that ``LocalTokens`` has transformed."""
_OF_BATCHES = ("num_nodes", "n_id", "input_id", "batch_size", "tokens")


class CacheInfo(NamedTuple):
    """The reads that a loader's cache has saved.

    Attributes:
        hits: rows that came from it, in all batches so far, those of workers included.
        reads: all rows so far.
        rows: how many it holds.
        nbytes: its size.
    """

    hits: int
    reads: int
    rows: int
    nbytes: int


class TokenLoader(NodeLoader):  # type: ignore[misc]  # PyG has no types
    """Loads batches of input nodes with the tokens of each (LargeGT's algorithm 2, "InputTokens").

    Batches are as those of :class:`torch_geometric.loader.NodeLoader`, of ``M`` input nodes alone:
    ``x``, ``y`` and other attributes of nodes, ``n_id``, ``input_id`` and ``batch_size``. Beside
    them they have ``tokens``, ``[M, (hops + 1) * k, channels]`` in the dtype of the features: for
    each local node its own features and then its contexts, the node itself first.

    Args:
        data: a graph that :class:`LocalTokens` has transformed, whose edges are not kept, or local
            nodes in files, such as a :class:`fastgraph.tokens.TokenStore`.
        input_nodes: a mask ``[nodes]`` or ids of the nodes that are loaded; default: all that have
            local nodes.
        features: with files, the :class:`fastgraph.tokens.HopFeatures`, or a tensor
            ``[nodes, hops + 1, channels]``.
        attributes: with files, other attributes of nodes by name, such as ``y``: tensors or arrays
            of a row for each node, which may be mapped.
        cache: how much memory may hold the rows that an epoch reads most often, as ``"2GiB"``. The
            local nodes of all input nodes are read once to find out.
        transform: takes a batch, and gives what is loaded in its place.
        **kwargs: those of ``DataLoader``: ``batch_size``, ``shuffle``, ``sampler``,
            ``num_workers``.

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: shapes do not fit, there are no input nodes, or some have no local nodes.
        IndexError: an input node is not in the graph.
    """

    def __init__(
        self,
        data: Data | LocalNodes,
        input_nodes: Any = None,
        *,
        features: HopFeatures | Tensor | None = None,
        attributes: Mapping[str, Any] | None = None,
        cache: int | str | None = None,
        transform: Callable[[Data], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.local: LocalNodes
        if isinstance(data, Data):
            if features is not None or attributes is not None:
                raise ValueError("features and attributes must be those of data, got others")
            self.local, features = _in_memory(data)
            kept = _without_graph(data, self.local.num_nodes)
        elif not isinstance(getattr(data, "num_nodes", None), int) or not hasattr(data, "lookup"):
            raise TypeError(
                "data must be a Data that LocalTokens has transformed, or a TokenStore, got "
                f"{type(data).__name__}"
            )
        else:
            self.local = data
            kept = Data(num_nodes=data.num_nodes, **_checked_attributes(attributes, data.num_nodes))
        self.features = _checked_features(features, self.local.num_nodes)
        nodes = _checked_nodes(input_nodes, self.local)
        self.cache = None if cache is None else self._chosen_rows(nodes, cache)
        workers = int(kwargs.get("num_workers") or 0)
        self._counts = torch.zeros(workers + 1, 2, dtype=torch.int64).share_memory_()
        kwargs.setdefault("filter_per_worker", True)  # else the program would gather
        super().__init__(
            kept,
            _Seeds(),
            nodes,
            transform=_WithTokens(self, transform),
            **kwargs,
        )

    @property
    def table(self) -> Tensor:
        """Features and context of all nodes, ``[nodes, hops + 1, channels]``."""
        return self.features if isinstance(self.features, Tensor) else self.features.rows

    def cache_info(self) -> CacheInfo:
        """How many rows came from the cache so far."""
        hits, reads = self._counts.sum(0).tolist()
        held = (len(self.cache.rows), self.cache.nbytes) if self.cache is not None else (0, 0)
        return CacheInfo(hits, reads, *held)

    def tokens(self, nodes: Tensor) -> Tensor:
        """The tokens of some nodes, ``[len(nodes), (hops + 1) * k, channels]``."""
        local = self.local.lookup(nodes)
        is_elsewhere = isinstance(self.features, HopFeatures) and self.features.is_elsewhere
        tokens, hits = gather_tokens(self.table, local, self.cache, is_elsewhere=is_elsewhere)
        worker = get_worker_info()
        # The worker may be of another loader, which has more.
        own = self._counts[0 if worker is None else (worker.id + 1) % len(self._counts)]
        own += torch.tensor([hits, local.numel()])
        return tokens

    def _chosen_rows(self, nodes: Tensor, cache: int | str) -> RowCache | None:
        budget = byte_count("cache", cache)
        ids = nodes.nonzero().squeeze(1) if nodes.dtype == torch.bool else nodes
        return most_read(self.table, count_reads(self.local, ids), budget)


class _WithTokens:
    """Adds tokens to a batch before the user's transform sees it."""

    def __init__(self, loader: TokenLoader, transform: Callable[[Data], Any] | None) -> None:
        self.loader = loader
        self.transform = transform

    def __call__(self, batch: Data) -> Any:
        batch.tokens = self.loader.tokens(batch.n_id)
        if "x" not in batch:
            batch.x = batch.tokens[:, 0]
        return batch if self.transform is None else self.transform(batch)


class _Seeds(BaseSampler):  # type: ignore[misc]  # PyG has no types
    """Samples the input nodes themselves."""

    def sample_from_nodes(self, index: NodeSamplerInput, **_: Any) -> SamplerOutput:
        none = index.node.new_empty(0)
        metadata = (index.input_id, index.time)
        return SamplerOutput(index.node, none, none, None, metadata=metadata)

    def sample_from_edges(self, *_: Any, **__: Any) -> SamplerOutput:
        raise NotImplementedError("tokens are those of nodes, not of edges")


class _LocalNodesInMemory:
    """Local nodes of all nodes of a graph."""

    nodes: Tensor | None = None

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self.num_nodes, self.k = rows.shape

    def lookup(self, nodes: Tensor) -> Tensor:
        return self.rows.index_select(0, nodes)


def _in_memory(data: Data) -> tuple[LocalNodes, Tensor]:
    if LOCAL_NODES not in data or HOP_FEATURES not in data:
        raise ValueError(
            f"data must have {LOCAL_NODES} and {HOP_FEATURES}, which LocalTokens gives it, got "
            f"{data}"
        )
    rows = data[LOCAL_NODES]
    fits = isinstance(rows, Tensor) and rows.dtype == torch.int32 and rows.dim() == 2
    if not fits or rows.shape[0] != data.num_nodes or rows.shape[1] < 1:
        raise ValueError(
            f"{LOCAL_NODES} must be int32 [{data.num_nodes}, k], got {_described(rows)}"
        )
    return _LocalNodesInMemory(rows), data[HOP_FEATURES]


def _without_graph(data: Data, num_nodes: int) -> Data:
    """The attributes of nodes and of the graph as a whole."""
    kept = copy.copy(data)
    for key in data.keys():  # noqa: SIM118  # a method of PyG's, not of a dict
        if key in (LOCAL_NODES, HOP_FEATURES) or data.is_edge_attr(key):
            del kept[key]
    kept.num_nodes = num_nodes
    return kept


def _checked_attributes(attributes: Mapping[str, Any] | None, num_nodes: int) -> dict[str, Any]:
    for name, value in (attributes or {}).items():
        if not isinstance(name, str) or name in _OF_BATCHES or "edge" in name or "adj" in name:
            raise ValueError(
                f"attributes must be of nodes, and none of {_OF_BATCHES}, which batches have "
                f"anyway, got {name!r}"
            )
        if not isinstance(value, Tensor | np.ndarray) or value.shape[:1] != (num_nodes,):
            raise ValueError(
                f"attributes[{name!r}] must be a tensor or an array with a row for each of "
                f"{num_nodes} nodes, got {_described(value)}"
            )
    return dict(attributes or {})


def _checked_features(features: Any, num_nodes: int) -> HopFeatures | Tensor:
    shape = tuple(getattr(features, "shape", ()))
    if not isinstance(features, HopFeatures | Tensor) or len(shape) != 3 or shape[0] != num_nodes:
        raise ValueError(
            "features must be HopFeatures or a tensor [nodes, hops + 1, channels] of the "
            f"{num_nodes} nodes of the graph, got {_described(features)}"
        )
    if isinstance(features, Tensor) and not (
        features.device.type == "cpu" and features.is_contiguous()
    ):
        raise ValueError(
            f"features must be contiguous and on the CPU, got strides {features.stride()} on "
            f"{features.device}"
        )
    return features


def _checked_nodes(input_nodes: Any, local: LocalNodes) -> Tensor:
    """Input nodes, as a mask if they are one."""
    if input_nodes is None:
        input_nodes = torch.arange(local.num_nodes) if local.nodes is None else local.nodes
    try:
        nodes: Tensor = torch.as_tensor(input_nodes)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"input_nodes must be integers or a mask, got {type(input_nodes).__name__}: {error}"
        ) from error
    if nodes.numel() == 0 or (nodes.dtype == torch.bool and not bool(nodes.any())):
        raise ValueError("input_nodes must hold at least one node, got none")
    if nodes.dtype == torch.bool:
        if nodes.shape != (local.num_nodes,):
            raise ValueError(
                f"input_nodes must be a mask of shape [{local.num_nodes}], got {list(nodes.shape)}"
            )
        ids = nodes.nonzero().squeeze(1)
    else:
        if nodes.is_floating_point() or nodes.is_complex():
            raise TypeError(f"input_nodes must be integers or a mask, got {nodes.dtype}")
        if nodes.dim() != 1:
            raise ValueError(f"input_nodes must have one dimension, got shape {list(nodes.shape)}")
        nodes = ids = nodes.long()
    low, high = map(int, ids.aminmax())
    if low < 0 or high >= local.num_nodes:
        wrong = low if low < 0 else high
        raise IndexError(f"input_nodes holds {wrong}, expected 0 <= node < {local.num_nodes}")
    if local.nodes is not None:
        lacks = ~torch.isin(ids, local.nodes)
        if bool(lacks.any()):
            missing = int(ids[lacks][0])
            raise ValueError(f"input_nodes holds {missing}, which has no local nodes in {local}")
    return nodes


def _described(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray | HopFeatures):
        return f"{value.dtype} {list(value.shape)}"
    return type(value).__name__
