"""A batch of graphs, and layers of GPS for it with parameters that are always the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import GINConv
from torch_geometric.nn import GPSConv as OfPyG

from fastgraph.nn import GPSConv

SIZES = [1, 7, 20, 2]
NODES, CHANNELS, HEADS = sum(SIZES), 12, 3
BATCH = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))


def layer(cls: type[OfPyG] = GPSConv, **options: Any) -> OfPyG:
    torch.manual_seed(5)
    conv = GINConv(nn.Linear(CHANNELS, CHANNELS))
    options = {"norm": "layer_norm"} | options
    made = cls(CHANNELS, conv, HEADS, **options).double()
    for parameter in made.attn.parameters():  # biases are 0 at first
        nn.init.normal_(parameter, std=0.4)
    return made


def features() -> Tensor:
    torch.manual_seed(4)
    return torch.randn(NODES, CHANNELS, dtype=torch.float64, requires_grad=True)


class Masked(nn.MultiheadAttention):
    """Attention with a mask of pairs."""

    mask: Tensor

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return super().forward(*arguments, attn_mask=self.mask, **options)
