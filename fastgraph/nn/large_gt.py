"""LargeGT: a graph transformer on the tokens of a node and a codebook of all nodes.

"Graph Transformers for Large Graphs" (Dwivedi et al., arXiv 2312.11109). Its layers see tokens,
positions and the names of nodes; they never see the graph.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fastgraph.layers.arguments import (
    check_choices,
    check_integers,
    check_kinds,
    check_probabilities,
    check_rates,
)
from fastgraph.nn.batch_norm import BatchNorm
from fastgraph.nn.global_module import GlobalModule
from fastgraph.nn.large_gt_release import VARIANTS, renamed
from fastgraph.nn.local_module import LocalModule
from fastgraph.nn.ranks import Ranks

MODULES = ("local", "global", "full")
NORMS = ("batch", "layer")


class LargeGT(nn.Module):
    r"""The model of "Graph Transformers for Large Graphs" (arXiv 2312.11109), equations 3 to 6.

    Tokens come from :class:`fastgraph.pyg.TokenLoader`, so that training never sees the graph.

    ``variant="paper"``: tokens, and with them :math:`H^{in}`, are projected to the hidden channels;
    :math:`H^{out} = H^{in} + \mathrm{Norm}(\mathrm{FFN}(H^{local} \| H^{global}))`, and a linear
    layer makes the predictions.

    ``variant="release"`` computes as the authors' code at github.com/snap-research/LargeGT: seeds
    and tokens have an MLP each, heads are as wide as the hidden channels, the encoder has no FFN,
    equation 6 no residual, the global module no MLPs. It loads that code's ``state_dict``, of
    which the layers that computed nothing are left out.

    Under ``DistributedDataParallel`` the sums, counts and batch statistics are those of all ranks:
    :math:`P` ranks with batches of :math:`M` are one with :math:`P M`, if each rank's loss is its
    rows' sum times :math:`P` over the number of all rows. All parameters are used in each step.

    Args:
        in_channels: of a token.
        hidden_channels: a multiple of ``heads``.
        out_channels: of a prediction.
        num_nodes: of the graph; needed but for ``module="local"``.
        module: "local", "global", or "full", both.
        variant: "paper" or "release".
        heads: of both modules.
        num_layers: of the encoder; 1 with ``variant="release"``.
        num_centroids: of the codebook.
        position_channels: of positions.
        dropout: of the model's MLPs.
        encoder_dropout: of the local module.
        norm: "batch" or "layer".
        decay: of the codebook's averages.
        process_group: the ranks that train together, as they have
            ``DistributedDataParallel(..., process_group=)``; None for one process.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_nodes: int | None = None,
        *,
        module: str = "full",
        variant: str = "paper",
        heads: int = 2,
        num_layers: int = 1,
        num_centroids: int = 4096,
        position_channels: int = 64,
        dropout: float = 0.5,
        encoder_dropout: float = 0.3,
        norm: str = "batch",
        decay: float = 0.99,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        check_choices(module=(module, MODULES), variant=(variant, VARIANTS), norm=(norm, NORMS))
        check_integers(
            in_channels=in_channels,
            hidden_channels=hidden_channels,
            out_channels=out_channels,
            heads=heads,
            num_layers=num_layers,
            num_centroids=num_centroids,
            position_channels=position_channels,
        )
        if module != "local":
            check_integers(num_nodes=num_nodes)
        check_probabilities(dropout=dropout, encoder_dropout=encoder_dropout)
        check_rates(decay=decay)
        if process_group is not None:  # torch may be built without distribution
            check_kinds(dist.ProcessGroup, process_group=process_group)
        released = variant == "release"
        if released and num_layers != 1:
            raise ValueError(f'num_layers: expected 1 with variant="release", got {num_layers}')
        if not released and hidden_channels % heads:
            raise ValueError(
                f"hidden_channels: expected a multiple of heads ({heads}), got {hidden_channels}"
            )
        self.in_channels, self.position_channels = in_channels, position_channels
        self.module, self.variant, self.num_nodes = module, variant, num_nodes
        self.ranks = Ranks(process_group)

        def make_norm(channels: int) -> nn.Module:
            is_batch = norm == "batch"
            return BatchNorm(channels, ranks=self.ranks) if is_batch else nn.LayerNorm(channels)

        hidden, width = hidden_channels, 0
        self.local_module = self.global_module = self.projection = self.token_projection = None
        if module != "local" or not released:
            self.projection = (
                _release_mlp(in_channels, hidden, dropout, make_norm(hidden))
                if released
                else nn.Linear(in_channels, hidden)
            )
        if module != "global":
            if released:
                self.token_projection = _release_mlp(in_channels, hidden, dropout)
            self.local_module = LocalModule(hidden, heads, num_layers, encoder_dropout, variant)
            width += self.local_module.out_channels
        if module != "local":
            assert num_nodes is not None
            self.global_module = GlobalModule(
                hidden,
                position_channels,
                num_nodes,
                num_centroids,
                heads,
                decay,
                variant,
                self.ranks,
            )
            width += self.global_module.out_channels
        if released:
            wide = heads * hidden
            self.ffn = nn.Sequential(
                *(nn.Linear(width, wide), make_norm(wide), nn.ReLU(), nn.Dropout(dropout)),
                *(nn.Linear(wide, hidden), make_norm(hidden), nn.ReLU(), nn.Dropout(dropout)),
            )
        else:
            self.ffn = nn.Sequential(
                *(nn.Linear(width, 2 * hidden), nn.ReLU(), nn.Dropout(dropout)),
                *(nn.Linear(2 * hidden, hidden), nn.Dropout(dropout)),
            )
            self.norm = make_norm(hidden)
        self.head = nn.Linear(hidden, out_channels)
        if released:
            self.register_load_state_dict_pre_hook(renamed)  # type: ignore[no-untyped-call]

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, n_id: Tensor | None = None
    ) -> Tensor:
        """Predictions for seeds.

        Args:
            tokens: ``[M, 3K, in_channels]`` of any floating dtype, the seed's features first; for
                ``module="global"`` ``[M, in_channels]`` will do. ``M`` may be 1, or 0 on a rank.
            positions: ``[M, position_channels]``; not used with ``module="local"``.
            n_id: the seeds, int64 ``[M]``; used in training mode alone, but not with
                ``module="local"``.

        Returns:
            ``[M, out_channels]``, of the dtype of the parameters.

        Raises:
            ValueError: shapes do not fit, an argument is missing, it trains under
                ``DistributedDataParallel`` without ``process_group``, or ``variant="release"`` has
                a global module in float16.
            TypeError: ``n_id`` is not of int64.
            IndexError: ``n_id`` has no node of the graph.
        """
        self._check(tokens, positions, n_id)
        tokens = tokens.to(self.head.weight.dtype)
        seeds = tokens[:, 0] if tokens.dim() == 3 else tokens
        parts, h = [], None
        if self.local_module is not None:
            project = self.token_projection or self.projection
            assert project is not None
            tokens = project(tokens)
            parts.append(self.local_module(tokens))
        if self.variant == "paper" and self.local_module is not None:
            h = tokens[:, 0]
        elif self.projection is not None:
            h = self.projection(seeds)
        if self.global_module is not None:
            assert h is not None and positions is not None
            parts.append(self.global_module(h, positions.to(h.dtype), n_id))
        out = self.ffn(torch.cat(parts, dim=1))
        if self.variant == "paper":
            out = h + self.norm(out)
        predictions: Tensor = self.head(out)
        return predictions

    def full_state_dict(self) -> dict[str, Any]:
        """The ``state_dict`` that one process would have; all ranks must call it.

        That of a rank has the assignments of a share of the nodes. Both load on a rank of as many
        ranks; this one loads on any number.
        """
        state: dict[str, Any] = self.state_dict()
        if self.global_module is not None:
            gathered = self.global_module.codebook.gathered_extra_state()
            state["global_module.codebook._extra_state"] = gathered
        return state

    def _check(self, tokens: Tensor, positions: Tensor | None, n_id: Tensor | None) -> None:
        shape = tuple(tokens.shape)
        is_wanted = tokens.dim() == 3 or (tokens.dim() == 2 and self.module == "global")
        if not is_wanted or shape[-1] != self.in_channels or 0 in shape[1:]:
            raise ValueError(f"tokens: expected [M, 3K, {self.in_channels}], got {list(shape)}")
        if not tokens.is_floating_point():
            raise ValueError(f"tokens: expected a floating dtype, got {tokens.dtype}")
        active = getattr(DistributedDataParallel, "_active_ddp_module", None)
        others = 0 if active is None else dist.get_world_size(active.process_group) - 1
        if self.training and others > 0 and self.ranks.size == 1:
            raise ValueError(
                "process_group: expected that of DistributedDataParallel, got None; give it to "
                "LargeGT, so that batch statistics and codebook are those of all ranks"
            )
        if self.module == "local":
            return
        if self.variant == "release" and self._dtype_of_products(tokens) == torch.float16:
            raise ValueError(
                'variant: expected "paper" in float16, got "release", whose centroids without '
                "nodes get norms of 1e5, while float16 ends at 65,504; use bfloat16"
            )
        if positions is None or positions.shape != (shape[0], self.position_channels):
            got = None if positions is None else list(positions.shape)
            raise ValueError(
                f"positions: expected [{shape[0]}, {self.position_channels}], got {got}"
            )
        if not self.training:
            return
        if n_id is None or n_id.shape != (shape[0],):
            got = None if n_id is None else list(n_id.shape)
            raise ValueError(f"n_id: expected [{shape[0]}] in training mode, got {got}")
        if n_id.dtype != torch.int64:
            raise TypeError(f"n_id: expected int64, got {n_id.dtype}")
        assert self.global_module is not None
        self.global_module.codebook.check(n_id)  # before batch statistics take notice of the batch

    def _dtype_of_products(self, tokens: Tensor) -> torch.dtype:
        device = tokens.device.type
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        return self.head.weight.dtype


def _release_mlp(
    channels: int, hidden: int, dropout: float, norm: nn.Module | None = None
) -> nn.Sequential:
    first = [nn.Linear(channels, hidden)] if norm is None else [nn.Linear(channels, hidden), norm]
    return nn.Sequential(*first, nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, hidden))
