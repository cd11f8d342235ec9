"""Graphs of which tests of loaders make mini-batches, where PyG has no sampler of its own."""

from __future__ import annotations

import pytest
import torch
import torch_geometric.typing
from torch_geometric.data import Data, HeteroData

WITHOUT_SAMPLER = pytest.mark.skipif(
    torch_geometric.typing.WITH_PYG_LIB or torch_geometric.typing.WITH_TORCH_SPARSE,
    reason="PyG has a sampler",
)


def graph() -> Data:
    generator = torch.Generator().manual_seed(7)
    index = torch.randint(60, (2, 400), generator=generator)
    return Data(
        x=torch.arange(60.0).unsqueeze(1), edge_index=index, edge_attr=torch.arange(400), y=None
    )


def hetero() -> HeteroData:
    data = HeteroData()
    data["paper"].x = torch.arange(30.0)
    data["author"].x = torch.arange(20.0)
    generator = torch.Generator().manual_seed(3)
    ends = [torch.randint(size, (150,), generator=generator) for size in (20, 30)]
    data["author", "writes", "paper"].edge_index = torch.stack(ends)
    data["paper", "by", "author"].edge_index = torch.stack(ends[::-1])
    return data
