"""Probes of operations that take numbers, text, copies and files out of a sharded tensor."""

from __future__ import annotations

import copy
import io

import torch
from torch import Tensor
from torch_geometric.data import Data

from tests.dist.probes.probe import h, probe, simple

simple(
    "torch.tensor of rows",
    lambda d: torch.as_tensor(d.x).sum() + torch.tensor(d.x.tolist()).sum(),
    "as_tensor",
    "tolist",
)


simple(
    "numpy, item",
    lambda d: torch.tensor(h(d).detach().numpy().sum() + float(d.x[0, 0]) + d.x.sum().item()),
    "numpy",
)


simple("copies", lambda d: copy.deepcopy(d).x + d.clone().x + copy.copy(d).x + d.to("cpu").x)


@probe("files")
def _(d: Data) -> Tensor:
    buffer = io.BytesIO()
    torch.save(d.to_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)["x"]


@probe("repr", "repr")
def _(d: Data) -> Tensor:
    return torch.tensor([ord(c) for c in repr(d.x) + str(d.y)])
