"""Gradients, optimisers and what is wrapped around them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.utils as pyg
from torch import Tensor
from torch_geometric.data import Data

from tests.dist.probes.probe import C, D, N, h, m, probe, simple

simple(
    "no_grad, detach",
    lambda d: (
        h(d).detach() * (1.0 if not h(d).detach().requires_grad and h(d).requires_grad else 0.0)
    ),
)


simple("custom function", lambda d: Exponential.apply(h(d)), "Exponential.apply")


simple(
    "checkpoint",
    lambda d: torch.utils.checkpoint.checkpoint(
        lambda x: m.lin(x).tanh(), h(d), use_reentrant=False
    ),
)


simple(
    "reentrant checkpoint",
    lambda d: torch.utils.checkpoint.checkpoint(
        lambda x: m.lin(x).tanh(), h(d), use_reentrant=True
    ),
    "CheckpointFunction.apply",
)


simple(
    "torch.compile",
    lambda d: torch.compile(lambda x: m.lin(x).relu().sum(1), backend="eager")(d.x),
    "torch.compile (not compiled)",
)


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp() + x.size(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0].exp()


@probe("double backward")
def _(d: Data) -> Tensor:
    x = d.x.clone().requires_grad_()
    conv = m.edge_convs["TransformerConv"]
    out = conv(x, d.edge_index, d.edge_attr).square().sum()
    (grad,) = torch.autograd.grad(out, x, create_graph=True)
    return grad.square().sum()


@probe("gradient of a leaf")
def _(d: Data) -> Tensor:
    x = d.x.clone().requires_grad_()
    m.lin(x).relu().mean().backward()
    return x.grad


@probe("hooks")
def _(d: Data) -> Tensor:
    seen = []
    x = h(d)
    x.register_hook(lambda grad: seen.append(grad.shape[0]) or grad * 2)
    x.retain_grad()
    (x * d.x).sum().backward()
    m.lin.zero_grad()
    return x.grad * seen[0]


@probe("a sharded parameter and Adam")
def _(d: Data) -> Tensor:
    parameter = torch.nn.Parameter(d.x.clone())
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    for _step in range(3):
        optimizer.zero_grad()
        (parameter - 1).square().mean().backward()
        optimizer.step()
    return parameter.detach()


@probe("Adam and clipped gradients")
def _(d: Data) -> Tensor:
    torch.manual_seed(0)
    model = torch.nn.Linear(D, C)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _step in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(d.x)[d.train_mask], d.y[d.train_mask]).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return model.weight.detach().sum(1) + norm


@probe("autocast")
def _(d: Data) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(d.x.float(), m.weight.float()).float().sum(1).double().detach()


@probe("inference mode")
def _(d: Data) -> Tensor:
    with torch.inference_mode():
        x = m.lin(d.x)[d.train_mask]
        x += 1
        return pyg.scatter(m.lin(d.x)[d.edge_index[0]], d.edge_index[1], 0, N).sum(0) + x.sum()
