"""Graphormer, with attention that takes turns."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastgraph.layers.arguments import check_integers, check_probabilities
from fastgraph.nn.dual_pattern import DualPattern
from fastgraph.nn.graph_model import GraphModel
from fastgraph.nn.transformer_layer import TransformerLayer


class Graphormer(GraphModel):
    """Graphormer, as TorchGT trains it, for nodes or graphs.

    Ying et al. ("Do transformers really perform bad for graph representation?", NeurIPS 2021) with
    the attention of TorchGT (Zhang et al., SC 2024). Layers normalise first, have GELU, a
    feed-forward network as wide as they, and weights drawn from a normal distribution of deviation
    ``0.02 / sqrt(layers)``. Degrees are embedded and added to features, and distances, up to
    ``hops`` in dense turns, have biases that all layers share. A global token for each graph goes
    along, from which graphs are read out.

    Presets are ``slim``, ``large`` (TorchGT, table IV) and ``zinc`` (Graphormer's own slim).

    Args:
        in_channels: of nodes.
        out_channels: of results.
        channels: of layers.
        layers: how many, at least 1.
        heads: of attention.
        level: of results, "node" or "graph".
        dropout: of what layers add, and of results.
        input_dropout: of features.
        attention_dropout: of weights of attention.
        max_degree: larger degrees count as this.
        hops: up to which distance pairs have biases of their own.
        attention: further options of :class:`DualInterleavedAttention`: ``policy``, ``schedule``,
            ``path``, ``max_pairs``.

    Raises:
        ValueError: an argument is out of its range.
    """

    has_token = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        channels: int = 64,
        layers: int = 4,
        heads: int = 8,
        *,
        level: str = "node",
        dropout: float = 0.1,
        input_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        max_degree: int = 512,
        hops: int = 5,
        **attention: Any,
    ) -> None:
        super().__init__(channels, layers, level, max_degree)
        check_integers(in_channels=in_channels, out_channels=out_channels)
        check_probabilities(dropout=dropout, input_dropout=input_dropout)
        self.dropout, self.input_dropout = dropout, input_dropout
        self.features = nn.Linear(in_channels, channels)
        self.token = nn.Parameter(torch.empty(1, channels))
        made = [
            TransformerLayer(
                channels,
                heads,
                channels,
                norm_first=True,
                activation="gelu",
                dropout=dropout,
                attention_dropout=attention_dropout,
                layers=layers,
                layer=layer,
                type_bias=True,
                hops=hops,
                **attention,
            )
            for layer in range(layers)
        ]
        for layer in made:
            layer.self_attn.type_bias = made[0].self_attn.type_bias
        self.layers = nn.ModuleList(made)
        self.norm = nn.LayerNorm(channels)
        self.out = nn.Linear(channels, out_channels)
        self.reset_parameters()

    @classmethod
    def slim(cls, in_channels: int, out_channels: int, **options: Any) -> Graphormer:
        """4 layers of 64 channels and 8 heads (TorchGT)."""
        return cls(in_channels, out_channels, 64, 4, 8, **options)

    @classmethod
    def large(cls, in_channels: int, out_channels: int, **options: Any) -> Graphormer:
        """12 layers of 768 channels and 32 heads."""
        return cls(in_channels, out_channels, 768, 12, 32, **options)

    @classmethod
    def zinc(cls, in_channels: int, out_channels: int, **options: Any) -> Graphormer:
        """12 layers of 80 channels and 8 heads (Graphormer's slim)."""
        return cls(in_channels, out_channels, 80, 12, 8, **options)

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
        deviation = 0.02 / len(self.layers) ** 0.5
        for name, parameter in self.named_parameters():
            if "degrees" in name or name == "token" or name.endswith("type_bias"):
                nn.init.normal_(parameter, std=0.02)  # embeddings
            elif name.endswith("bias") and "norm" not in name:
                nn.init.zeros_(parameter)
            elif "norm" not in name:
                nn.init.normal_(parameter, std=deviation)

    def forward(
        self,
        x: Tensor,
        edges: Tensor | DualPattern,
        batch: Tensor | None = None,
        num_graphs: int | None = None,
        *,
        types: Tensor | None = None,
        degrees: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The result for each node or graph.

        Args:
            x: ``[nodes, in_channels]``.
            edges: int64 or int32 ``[2, E]``, or the :meth:`pattern`.
            batch: the graph of each node, int64 ``[nodes]``, ascending; default: one graph. Not
                beside a pattern, which has it, and neither are ``num_graphs`` and ``types``.
            num_graphs: default: the last graph of ``batch``, and those before it.
            types: of the edges, uint8 ``[E]``, as :func:`fastgraph.nn.dual_pattern` takes them.
            degrees: of edges into and out of each node, int64 ``[nodes]`` each; default: those of
                ``edges``, which a part of a graph may have lost some of.

        Returns:
            ``[nodes, out_channels]`` or ``[graphs, out_channels]``.

        Raises:
            ValueError: as :meth:`DualInterleavedAttention.forward`.
            IndexError: ``edges`` points outside the nodes.
        """
        pattern = self.pattern_of_call(len(x), edges, batch, num_graphs, types)
        h = self.with_degrees(self.features(x), pattern, degrees)
        h = F.dropout(h, self.input_dropout, self.training)
        token = self.token.expand(pattern.num_graphs, -1)
        for layer in self.layers:
            h, token = layer(h, pattern, token)
        found = self.norm(h if self.level == "node" else token)
        out: Tensor = self.out(F.dropout(found, self.dropout, self.training))
        return out
