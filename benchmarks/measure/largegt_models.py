"""The models that LargeGT is compared with, and how each sees its batches and predicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GAT, MLP, GraphSAGE, TransformerConv

from fastgraph.nn import LargeGT
from fastgraph.nn.positions import positions_by_powers
from fastgraph.pyg.local_tokens import LocalTokens
from fastgraph.pyg.token_loader import TokenLoader

FANOUTS = [20, 10]
MESSAGE_PASSING = ("GraphSAGE", "GAT", "GT-sparse")
MODULES = {"NAGphormer-like": "local", "GOAT-global": "global"} | {
    f"LargeGT-{module}": module for module in ("local", "full")
}
MODELS = ("MLP", *MESSAGE_PASSING, *MODULES)
OWN_TOKENS, WITH_HOPS = "MLP of own tokens", "LargeGT-local, told hops"
BEYOND = (OWN_TOKENS, WITH_HOPS)
"""Of no paper, to tell what LargeGT-local lacks: an MLP of the seed's own features and contexts,
and LargeGT-local whose tokens say what they are, and how far their node is from the seed."""


class Sizes(NamedTuple):
    """Of the models and batches for a graph.

    Attributes:
        k: local nodes.
        hidden: channels.
        batch: training nodes of a step.
        centroids: of the codebook.
        positions: channels.
        dropout: of all models; that of LargeGT's encoder is the same.
        lr: of Adam.
    """

    k: int
    hidden: int = 64
    batch: int = 512
    centroids: int = 256
    positions: int = 32
    dropout: float = 0.2
    lr: float = 0.003


class SparseTransformer(nn.Module):
    """Layers of a transformer whose attention is that of neighbours (Dwivedi & Bresson, 2021)."""

    def __init__(
        self, channels: int, hidden: int, out: int, heads: int, layers: int, dropout: float
    ) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(channels, hidden), nn.Linear(hidden, out)
        self.attention = nn.ModuleList(
            TransformerConv(hidden, hidden // heads, heads, root_weight=False)
            for _ in range(layers)
        )
        self.ffn = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.ReLU(), nn.Linear(2 * hidden, hidden))
            for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2 * layers))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """``[nodes, channels]`` to ``[nodes, out]``."""
        h = self.first(x)
        for i, (attention, ffn) in enumerate(zip(self.attention, self.ffn, strict=True)):
            h = self.norms[2 * i](h + self.dropout(attention(h, edge_index)))
            h = self.norms[2 * i + 1](h + self.dropout(ffn(h)))
        out: Tensor = self.head(h)
        return out


class Way(NamedTuple):
    """How a model trains and predicts.

    Attributes:
        model: with its parameters.
        batches: an epoch of training, as arguments of the model, and classes of its first rows.
        predict: scores of given nodes, in evaluation mode.
        steps: of an epoch.
    """

    model: nn.Module
    batches: Callable[[], Iterator[tuple[tuple[Any, ...], Tensor]]]
    predict: Callable[[Tensor], Tensor]
    steps: int


class Source:
    """A graph, and what models read of it, which is made once.

    Args:
        graph: a ``LabelledGraph`` of the example.
        seed: of local nodes and positions.
    """

    def __init__(self, graph: Any, seed: int) -> None:
        self.graph, self.seed = graph, seed
        self.train = (graph.split == 0).nonzero().flatten()
        self.channels, self.classes = graph.x.shape[1], int(graph.y.max()) + 1
        self._tokens: dict[tuple[int, int, int], Data] = {}
        self._edges: Tensor | None = None

    def data(self) -> Data:
        """The graph for PyG."""
        return Data(x=self.graph.x, y=self.graph.y, edge_index=self.graph.edge_index)

    def tokens(self, k: int, hops: int, positions: int) -> Data:
        """The graph with local nodes, context features and positions."""
        key = k, hops, positions
        if key not in self._tokens:
            data = LocalTokens(k, hops=hops, seed=self.seed)(self.data())
            num_nodes, edge_index = len(self.graph.y), self.graph.edge_index
            data.positions = positions_by_powers(edge_index, num_nodes, positions, seed=self.seed)
            self._tokens[key] = data
        return self._tokens[key]

    def hops(self, nodes: Tensor, others: Tensor) -> Tensor:
        """0 for a node itself, 1 for its neighbours, 2 for others, ``[nodes, k]``."""
        num_nodes = len(self.graph.y)
        if self._edges is None:
            row, column = self.graph.edge_index
            self._edges = (row * num_nodes + column).sort().values
        wanted = nodes.unsqueeze(1) * num_nodes + others
        place = torch.searchsorted(self._edges, wanted).clamp(max=len(self._edges) - 1)
        is_neighbour = self._edges[place] == wanted
        return torch.where(others == nodes.unsqueeze(1), 0, torch.where(is_neighbour, 1, 2))


def way_of(name: str, source: Source, sizes: Sizes) -> Way:
    """A model of ``MODELS`` or ``BEYOND`` with its loader."""
    if name in MESSAGE_PASSING:
        return _message_passing(name, source, sizes)
    if name in MODULES or name == WITH_HOPS:
        return _large_gt(name, source, sizes)
    if name == "MLP":
        return _mlp(source, source.graph.x, sizes)
    own = source.tokens(1, 2, sizes.positions)
    return _mlp(source, own.hop_features.flatten(1), sizes)


def _steps(train: Tensor, sizes: Sizes) -> int:
    return -(-len(train) // sizes.batch)


def _mlp(source: Source, x: Tensor, sizes: Sizes) -> Way:
    y, train, hidden = source.graph.y, source.train, sizes.hidden
    model = MLP([x.shape[1], hidden, hidden, source.classes], dropout=sizes.dropout)

    def batches() -> Iterator[tuple[tuple[Any, ...], Tensor]]:
        for ids in train[torch.randperm(len(train))].split(sizes.batch):
            yield (x[ids],), y[ids]

    return Way(model, batches, lambda ids: model(x[ids]), _steps(train, sizes))


def _message_passing(name: str, source: Source, sizes: Sizes) -> Way:
    graph, train, channels, classes = source.graph, source.train, source.channels, source.classes
    hidden, dropout = sizes.hidden, sizes.dropout
    if name == "GraphSAGE":
        model: nn.Module = GraphSAGE(channels, hidden, len(FANOUTS), classes, dropout=dropout)
    elif name == "GAT":
        model = GAT(channels, hidden, len(FANOUTS), classes, dropout=dropout, heads=4)
    else:
        model = SparseTransformer(channels, hidden, classes, 4, len(FANOUTS), dropout)
    loader = NeighborLoader(
        source.data(), FANOUTS, input_nodes=train, batch_size=sizes.batch, shuffle=True
    )

    def batches() -> Iterator[tuple[tuple[Any, ...], Tensor]]:
        for batch in loader:
            yield (batch.x, batch.edge_index), batch.y[: batch.batch_size]

    def predict(ids: Tensor) -> Tensor:  # of all neighbours
        out: Tensor = model(graph.x, graph.edge_index)[ids]
        return out

    return Way(model, batches, predict, _steps(train, sizes))


def _large_gt(name: str, source: Source, sizes: Sizes) -> Way:
    told = name == WITH_HOPS
    module, train = "local" if told else MODULES[name], source.train
    k = sizes.k if name.startswith("LargeGT") else 1
    data = source.tokens(k, 0 if module == "global" else 2, sizes.positions)
    model = LargeGT(
        source.channels + (6 if told else 0),
        sizes.hidden,
        source.classes,
        data.num_nodes,
        module=module,
        num_centroids=sizes.centroids,
        position_channels=sizes.positions,
        dropout=sizes.dropout,
        encoder_dropout=sizes.dropout,
    )

    def loaded(ids: Tensor, **options: Any) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
        for batch in TokenLoader(data, ids, **options):
            tokens = batch.tokens
            if told:
                hops = source.hops(batch.n_id, data.local_nodes[batch.n_id].long())
                what = torch.eye(3).repeat(k, 1).expand(len(hops), -1, -1)
                far = F.one_hot(hops, 3).to(tokens.dtype).repeat_interleave(3, dim=1)
                tokens = torch.cat([tokens, what, far], dim=2)
            yield (tokens, batch.positions, batch.n_id), batch.y

    def batches() -> Iterator[tuple[tuple[Any, ...], Tensor]]:
        return loaded(train, batch_size=sizes.batch, shuffle=True)

    def predict(ids: Tensor) -> Tensor:
        return torch.cat([model(*given) for given, _ in loaded(ids, batch_size=sizes.batch)])

    return Way(model, batches, predict, _steps(train, sizes))
