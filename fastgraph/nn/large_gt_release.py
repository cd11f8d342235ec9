"""LargeGT as its authors released it: an encoder layer, and the names of parameters.

github.com/snap-research/LargeGT. How it departs from the paper :class:`fastgraph.nn.LargeGT` says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastgraph.nn.token_attention import attend

VARIANTS = ("paper", "release")
"""Of what differs between both."""

_NAMES = {
    "fc_in.": "projection.",
    "fc_in_seq.": "token_projection.",
    "ffs.0.": "ffn.",
    "fc_out.": "head.",
    "convs.0.local_module.att_embeddings_nope.": "local_module.projection.",
    "convs.0.local_module.layers.0.self_attention_norm.": "local_module.layers.0.norm.",
    "convs.0.local_module.layers.0.self_attention.linear_q.": "local_module.layers.0.query.",
    "convs.0.local_module.layers.0.self_attention.linear_k.": "local_module.layers.0.key.",
    "convs.0.local_module.layers.0.self_attention.linear_v.": "local_module.layers.0.value.",
    "convs.0.local_module.layers.0.self_attention.output_layer.": "local_module.layers.0.out.",
    "convs.0.local_module.layers.0.res_proj.": "local_module.layers.0.residual.",
    "convs.0.local_module.final_ln.": "local_module.norm.",
    "convs.0.local_module.attn_layer.": "local_module.readout.score.",
    "convs.0.lin_proj_g.": "global_module.features.",
    "convs.0.lin_query_g.": "global_module.query.",
    "convs.0.lin_key_g.": "global_module.key.",
    "convs.0.lin_value_g.": "global_module.value.",
    "convs.0.vq.bn.": "global_module.codebook.norm.",
    "convs.0.vq._embedding_output": "global_module.codebook.rows",
    "convs.0.vq._embedding": "global_module.codebook.centroids",
    "convs.0.vq._ema_cluster_size": "global_module.codebook.ema_sizes",
    "convs.0.vq._ema_w": "global_module.codebook.ema_sums",
}
"""Beginnings of names in the release, and here; of two that fit the longer comes first."""

_UNUSED = ("lin_key.", "lin_query.", "lin_value.", "lin_skip.", "local_module.out_proj.")
"""Layers of its ``convs.0`` that the release has and never calls."""

_UNUSED_IN = {
    "local": ("fc_in.",),
    "global": ("fc_in_seq.", "convs.0.local_module."),
    "full": (),
}
"""Those that compute nothing with one module alone."""


class ReleaseEncoderLayer(nn.Module):
    """The encoder layer of the release: heads as wide as the tokens, no FFN.

    Args:
        channels: of the tokens.
        heads: of attention.
        dropout: of what attention adds, and of the result.
    """

    def __init__(self, channels: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, wide = heads, heads * channels
        self.norm = nn.LayerNorm(channels)
        self.query, self.key, self.value = (nn.Linear(channels, wide) for _ in range(3))
        self.out = nn.Linear(wide, wide)
        self.residual = nn.Linear(channels, wide)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``[M, tokens, channels]`` to ``[M, tokens, heads * channels]``."""
        y = self.norm(x)
        y = self.out(attend(self.query(y), self.key(y), self.value(y), self.heads))
        out: Tensor = self.dropout(self.residual(x) + self.dropout(y))
        return out


def initialise(module: nn.Module) -> None:
    """Parameters of a linear layer as the release draws them in its local module."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)


def renamed(model: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Give the entries of a release's ``state_dict`` the names that they have here, in place.

    A hook before a :class:`fastgraph.nn.LargeGT` loads; another ``state_dict`` is left as it is.
    """
    if f"{prefix}fc_out.weight" not in state:
        return
    unused = tuple(f"convs.0.{name}" for name in _UNUSED) + _UNUSED_IN[model.module]
    for key in [key for key in state if key.startswith(prefix)]:
        name, value = key.removeprefix(prefix), state.pop(key)
        if name.startswith(unused):
            continue
        if name == "convs.0.c_idx" and model.global_module is not None:
            codebook = model.global_module.codebook
            place = f"{prefix}global_module.codebook."
            extra = {"num_nodes": len(value), "first": 0, "assigned": value}
            state[f"{place}_extra_state"] = extra
            state[f"{place}counts"] = codebook.counted(value)
            state[f"{place}steps"] = torch.zeros((), dtype=torch.int64)
            continue
        begin = next((begin for begin in _NAMES if name.startswith(begin)), None)
        new = name if begin is None else _NAMES[begin] + name.removeprefix(begin)
        state[prefix + new] = value
