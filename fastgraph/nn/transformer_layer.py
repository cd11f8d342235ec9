"""A layer of a transformer on graphs: attention that takes turns, and a feed-forward network."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastgraph.layers.arguments import (
    check_choices,
    check_flags,
    check_integers,
    check_probabilities,
    check_rates,
)
from fastgraph.nn.dual_attention import DualInterleavedAttention
from fastgraph.nn.dual_pattern import DualPattern


class TransformerLayer(nn.Module):
    """``torch.nn.TransformerEncoderLayer`` for the nodes of graphs.

    With its parameters under its names: a dense turn computes on the nodes of a graph what torch's
    layer does, but for the numbers of dropout.

    Args:
        channels: of nodes.
        heads: of attention.
        feed_forward: channels between the two products of the feed-forward network.
        norm_first: whether normalisation is before attention and feed-forward network, and not
            behind the sums.
        activation: "relu" or "gelu".
        dropout: of what is added to nodes, and within the feed-forward network.
        attention_dropout: of weights of attention.
        attention: further options of :class:`DualInterleavedAttention`.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        channels: int,
        heads: int,
        feed_forward: int,
        *,
        norm_first: bool,
        activation: str,
        dropout: float,
        attention_dropout: float,
        **attention: Any,
    ) -> None:
        super().__init__()
        check_choices(activation=(activation, ("relu", "gelu")))
        check_integers(feed_forward=feed_forward)
        check_flags(norm_first=norm_first)
        check_probabilities(dropout=dropout)
        check_rates(attention_dropout=attention_dropout)
        self.norm_first, self.dropout = norm_first, dropout
        self.activation = nn.GELU() if activation == "gelu" else nn.ReLU()
        self.self_attn = DualInterleavedAttention(
            channels, heads, dropout=attention_dropout, **attention
        )
        self.linear1 = nn.Linear(channels, feed_forward)
        self.linear2 = nn.Linear(feed_forward, channels)
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        for module in (self.self_attn, self.linear1, self.linear2, self.norm1, self.norm2):
            module.reset_parameters()

    def forward(
        self, x: Tensor, pattern: DualPattern, token: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The nodes and tokens that follow.

        Args:
            x: ``[nodes, channels]``.
            pattern: of the nodes and tokens.
            token: of each graph, ``[graphs, channels]``.
        """
        nodes = None if token is None else len(x)
        rows = x if token is None else torch.cat([x, token])
        if self.norm_first:
            rows = rows + self._attention(self.norm1(rows), nodes, pattern)
            rows = rows + self._feed_forward(self.norm2(rows))
        else:
            rows = self.norm1(rows + self._attention(rows, nodes, pattern))
            rows = self.norm2(rows + self._feed_forward(rows))
        return rows[:nodes], None if nodes is None else rows[nodes:]

    def _attention(self, rows: Tensor, nodes: int | None, pattern: DualPattern) -> Tensor:
        token = None if nodes is None else rows[nodes:]
        out = self.self_attn(rows[:nodes], pattern, token=token)
        return self._dropped(out if token is None else torch.cat(out))

    def _feed_forward(self, rows: Tensor) -> Tensor:
        hidden = self._dropped(self.activation(self.linear1(rows)))
        return self._dropped(self.linear2(hidden))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)
