"""The local module of LargeGT: a transformer's encoder on the tokens of a node."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastgraph.layers.arguments import check_choices, check_integers, check_probabilities
from fastgraph.nn.large_gt_release import VARIANTS, ReleaseEncoderLayer, initialise
from fastgraph.nn.token_attention import attend


class EncoderLayer(nn.Module):
    """A layer of a transformer's encoder, which normalises before attention and before its FFN.

    Args:
        channels: of the tokens; a multiple of ``heads``.
        heads: of attention.
        dropout: of what attention and the FFN add.
    """

    def __init__(self, channels: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(channels)
        self.query_key_value = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)
        self.ffn = nn.Sequential(
            nn.LayerNorm(channels),
            nn.Linear(channels, 2 * channels),
            nn.GELU(),
            nn.Linear(2 * channels, channels),
            nn.Dropout(dropout),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``[M, tokens, channels]`` to the same."""
        q, k, v = self.query_key_value(self.attention_norm(x)).chunk(3, dim=-1)
        x = x + self.dropout(self.out(attend(q, k, v, self.heads)))
        out: Tensor = x + self.ffn(x)
        return out


class Readout(nn.Module):
    r"""The seed's token and the others, by :math:`\mathrm{softmax}(\mathrm{Linear}[seed\,\|\,t])`.

    The half of the weight that sees the seed, and the bias, move all scores of a seed alike, of
    which softmax takes no notice: they get gradients of zero. They are there as in the paper.

    Args:
        channels: of the tokens.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.score = nn.Linear(2 * channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """``[M, tokens, channels]``, the seed's first, to ``[M, channels]``."""
        seed, others = x[:, 0], x[:, 1:]
        of_seed, of_others = self.score.weight.chunk(2, dim=1)
        scores = F.linear(others, of_others) + F.linear(seed, of_seed, self.score.bias).unsqueeze(1)
        return seed + torch.einsum("mt,mtc->mc", scores.squeeze(2).softmax(1), others)


class LocalModule(nn.Module):
    """A transformer's encoder on the tokens of a node, and a readout (equation 3).

    Scores of pairs of tokens are not stored.

    Args:
        channels: of the tokens.
        heads: of attention; with ``variant="release"`` each is as wide as the tokens.
        num_layers: of the encoder; 1 with ``variant="release"``.
        dropout: within the encoder.
        variant: "paper" or "release", see :class:`LargeGT`.
    """

    def __init__(
        self,
        channels: int,
        heads: int = 2,
        num_layers: int = 1,
        dropout: float = 0.3,
        variant: str = "paper",
    ) -> None:
        super().__init__()
        check_choices(variant=(variant, VARIANTS))
        check_integers(channels=channels, heads=heads, num_layers=num_layers)
        check_probabilities(dropout=dropout)
        released = variant == "release"
        self.out_channels = channels * heads if released else channels
        make: Callable[..., nn.Module] = ReleaseEncoderLayer if released else EncoderLayer
        self.projection = nn.Linear(channels, channels) if released else nn.Identity()
        self.layers = nn.Sequential(*(make(channels, heads, dropout) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(self.out_channels)
        self.readout = Readout(self.out_channels)
        if released:
            self.apply(initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        """The node's representation.

        Args:
            tokens: ``[M, tokens, channels]``; the seed's token is the first.

        Returns:
            ``[M, channels]``; with ``variant="release"`` ``[M, heads * channels]``.
        """
        out: Tensor = self.readout(self.norm(self.layers(self.projection(tokens))))
        return out
