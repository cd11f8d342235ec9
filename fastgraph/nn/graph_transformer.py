"""The graph transformer GT, with attention that takes turns."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from fastgraph.layers.arguments import check_integers
from fastgraph.nn.dual_pattern import DualPattern
from fastgraph.nn.graph_model import GraphModel
from fastgraph.nn.positions import with_random_signs
from fastgraph.nn.transformer_layer import TransformerLayer


class GraphTransformer(GraphModel):
    """GT, as TorchGT trains it, for nodes or graphs.

    Dwivedi and Bresson ("A generalization of transformer networks to graphs", 2021) with the
    attention of TorchGT (Zhang et al., SC 2024, table IV: 4 layers of 128 channels and 8 heads).
    Layers normalise behind their sums, have ReLU, and a feed-forward network twice as wide. There
    is no token; graphs are read out by the mean of their nodes.

    Args:
        in_channels: of nodes.
        out_channels: of results.
        channels: of layers.
        layers: how many, at least 1.
        heads: of attention.
        level: of results, "node" or "graph".
        position_channels: of positions of nodes, such as eigenvectors of the Laplacian by
            :class:`fastgraph.transforms.LaplacianPositions`; their signs are drawn anew in each
            step of training.
        max_degree: larger degrees count as this in embeddings of degrees, which are added to
            features; default: there are none.
        dropout: of what layers add.
        attention_dropout: of weights of attention.
        attention: further options of :class:`DualInterleavedAttention`: ``policy``, ``schedule``,
            ``path``, ``type_bias``, ``hops``, ``max_pairs``.

    Raises:
        ValueError: an argument is out of its range.
    """

    has_token = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        channels: int = 128,
        layers: int = 4,
        heads: int = 8,
        *,
        level: str = "node",
        position_channels: int = 0,
        max_degree: int | None = None,
        dropout: float = 0.1,
        attention_dropout: float = 0.1,
        **attention: Any,
    ) -> None:
        super().__init__(channels, layers, level, max_degree)
        check_integers(in_channels=in_channels, out_channels=out_channels)
        check_integers(0, position_channels=position_channels)
        self.position_channels = position_channels
        self.features = nn.Linear(in_channels, channels)
        self.positions = nn.Linear(position_channels, channels) if position_channels else None
        self.layers = nn.ModuleList(
            TransformerLayer(
                channels,
                heads,
                2 * channels,
                norm_first=False,
                activation="relu",
                dropout=dropout,
                attention_dropout=attention_dropout,
                layers=layers,
                layer=layer,
                **attention,
            )
            for layer in range(layers)
        )
        self.out = nn.Linear(channels, out_channels)

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        embeddings = self.in_degrees, self.out_degrees
        for module in (*embeddings, self.features, self.positions, *self.layers, self.out):
            if module is not None:
                cast(TransformerLayer | nn.Linear | nn.Embedding, module).reset_parameters()

    def forward(
        self,
        x: Tensor,
        edges: Tensor | DualPattern,
        batch: Tensor | None = None,
        num_graphs: int | None = None,
        *,
        types: Tensor | None = None,
        degrees: tuple[Tensor, Tensor] | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The result for each node or graph.

        Args:
            x: ``[nodes, in_channels]``.
            edges: int64 or int32 ``[2, E]``, or a pattern without tokens.
            batch: the graph of each node, int64 ``[nodes]``, ascending; default: one graph. Not
                beside a pattern, which has it, and neither are ``num_graphs`` and ``types``.
            num_graphs: default: the last graph of ``batch``, and those before it.
            types: of the edges, uint8 ``[E]``, as :func:`fastgraph.nn.dual_pattern` takes them.
            degrees: with ``max_degree``, of edges into and out of each node, int64 ``[nodes]``
                each; default: those of ``edges``, which a part of a graph may have lost some of.
            positions: of nodes, ``[nodes, position_channels]``.

        Returns:
            ``[nodes, out_channels]``, or ``[graphs, out_channels]``, of graphs without nodes those
            of a mean of 0.

        Raises:
            ValueError: positions are missing or not expected, or as
                :meth:`DualInterleavedAttention.forward`.
            IndexError: ``edges`` points outside the nodes.
        """
        pattern = self.pattern_of_call(len(x), edges, batch, num_graphs, types)
        h = self.with_degrees(self.features(x), pattern, degrees)
        if self.positions is not None:
            h = h + self.positions(self._signed(positions, len(x)))
        elif positions is not None:
            raise ValueError("positions: expected None without position_channels, got a tensor")
        for layer in self.layers:
            h, _ = layer(h, pattern)
        if self.level == "graph":
            h = _means(h, pattern)
        out: Tensor = self.out(h)
        return out

    def _signed(self, positions: Tensor | None, nodes: int) -> Tensor:
        """Positions, in training mode with the sign of each channel drawn anew."""
        if positions is None or list(positions.shape) != [nodes, self.position_channels]:
            got = "None" if positions is None else str(list(positions.shape))
            raise ValueError(f"positions: expected [{nodes}, {self.position_channels}], got {got}")
        return with_random_signs(positions) if self.training else positions


def _means(h: Tensor, pattern: DualPattern) -> Tensor:
    """The mean of the nodes of each graph, ``[graphs, channels]``."""
    sums = h.new_zeros(pattern.num_graphs, h.shape[1]).index_add(0, pattern.graph_of_nodes, h)
    return sums / pattern.offsets.diff().clamp(min=1).unsqueeze(1)
