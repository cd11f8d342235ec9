"""The global module of LargeGT: attention of nodes to the centroids of a codebook."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastgraph.layers.arguments import check_choices, check_integers, check_kinds, check_rates
from fastgraph.nn.codebook import Codebook
from fastgraph.nn.large_gt_release import VARIANTS
from fastgraph.nn.ranks import Ranks
from fastgraph.nn.token_attention import split_heads


class GlobalModule(nn.Module):
    """Attention of nodes to the centroids of a codebook of all nodes (Algorithm 3).

    In training mode each call takes a step of the codebook after its attention.

    Args:
        channels: of the nodes' features.
        position_channels: of their positions, and of what the codebook keeps of features.
        num_nodes: of the graph.
        num_centroids: of the codebook, in the paper ``B``.
        heads: of attention; with ``variant="release"`` each is as wide as the features.
        decay: of the codebook's averages.
        variant: "paper" or "release", see :class:`LargeGT`.
        ranks: that train together.
    """

    def __init__(
        self,
        channels: int,
        position_channels: int,
        num_nodes: int,
        num_centroids: int = 4096,
        heads: int = 2,
        decay: float = 0.99,
        variant: str = "paper",
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        check_choices(variant=(variant, VARIANTS))
        check_integers(channels=channels, position_channels=position_channels, heads=heads)
        check_integers(num_nodes=num_nodes, num_centroids=num_centroids)
        check_rates(decay=decay)
        check_kinds(Ranks, or_none=True, ranks=ranks)
        released, pair = variant == "release", 2 * position_channels
        self.heads, self.position_channels = heads, position_channels
        self.out_channels = channels * heads if released else channels
        self.features = (
            nn.Linear(channels, position_channels)
            if released
            else _mlp(channels, channels, position_channels)
        )
        self.query = nn.Linear(pair, self.out_channels)
        self.key = nn.Linear(pair, self.out_channels)
        self.value = nn.Linear(position_channels, self.out_channels)
        self.out = nn.Identity() if released else _mlp(*(3 * [channels]))
        self.codebook = Codebook(
            num_nodes, num_centroids, pair, variant=variant, decay=decay, ranks=ranks
        )

    def forward(self, h: Tensor, positions: Tensor, n_id: Tensor | None = None) -> Tensor:
        """Attention of nodes to the codebook.

        Args:
            h: ``[M, channels]``.
            positions: ``[M, position_channels]``.
            n_id: the nodes, int64 ``[M]``; needed in training mode.

        Returns:
            ``[M, channels]``; with ``variant="release"`` ``[M, heads * channels]``.
        """
        x = torch.cat([self.features(h), positions], dim=1)
        centroids, bias = self.codebook.rows.to(x.dtype), self.codebook.bias()
        q, k = self.query(x), self.key(centroids)
        v = self.value(centroids[:, : self.position_channels])
        # All nodes attend to one set of centroids: to attention, one long sequence of queries.
        q, k, v = (split_heads(t.unsqueeze(0), self.heads) for t in (q, k, v))
        mask = bias.to(q.dtype).expand(1, 1, len(x), -1)
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        if self.training and n_id is not None:
            self.codebook.update(x.detach(), n_id)
        out: Tensor = self.out(found.squeeze(0).transpose(0, 1).flatten(1))
        return out


def _mlp(channels: int, hidden: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(channels, hidden), nn.ReLU(), nn.Linear(hidden, out_channels))
