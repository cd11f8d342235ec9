"""Random programs for tensors of nodes, which run alike on one process and on sharded tensors.

A program is drawn from a seed and from shapes, which are the same in both cases: it selects,
reshapes, edits in place, reduces, passes messages, and goes backward with explicit gradients.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import (
    EdgeConv,
    GATv2Conv,
    GCNConv,
    GENConv,
    GINEConv,
    MedianAggregation,
    MulAggregation,
    QuantileAggregation,
    ResGatedGraphConv,
    SAGEConv,
)
from torch_geometric.utils import add_self_loops, dropout_edge, dropout_node

_LENGTH = 7


def drawn_graph(seed: int) -> tuple[Data, list[float]]:
    """A small graph, some of them stars, and the shares of its nodes, of which some are nothing."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    n = draw.choice([1, 2, 3, 5, 12, 30])
    edges = torch.randint(0, n, (2, draw.choice([0, 1, 4 * n])), generator=generator)
    if draw.random() < 0.3:
        edges = torch.stack([torch.arange(n), torch.zeros(n, dtype=torch.int64)])
    if draw.random() < 0.3:
        edges = edges.t().contiguous().t()
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    mask = torch.rand(n, generator=generator) < 0.5
    y = torch.randint(0, 4, (n,), generator=generator)
    order = torch.randperm(n, generator=generator)
    data = Data(x=x, edge_index=edges, mask=mask, y=y, order=order)
    return data, [draw.choice([0.0, 0.0, 1.0, 3.0]) for _ in range(4)]


def run(seed: int, data: Data) -> list[Tensor]:
    """The tensors that a program leaves, gradients last."""
    torch.manual_seed(seed)
    program = _Program(random.Random(seed), data)
    for _ in range(_LENGTH):
        program.step()
    return program.finish()


class _Program:
    def __init__(self, draw: random.Random, data: Data) -> None:
        self._draw, self._data = draw, data
        self._leaf = data.x.detach().clone().requires_grad_()
        self._weight = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
        self._rows = [self._leaf]  # [nodes, 4]
        self._others: list[Tensor] = []
        self._n = len(data.x)

    def step(self) -> None:
        """Append what a drawn operation makes of drawn tensors."""
        x = self._draw.choice(self._rows)
        kind = self._draw.choice(list(_OPERATIONS))
        operation = self._draw.choice(_OPERATIONS[kind])
        out = operation(self, x)
        same = out.shape == x.shape
        (self._rows if same else self._others).append(out)

    def other(self) -> Tensor:
        return self._draw.choice(self._rows)

    def number(self, below: int) -> int:
        return self._draw.randrange(below)

    @property
    def data(self) -> Any:
        return self._data

    @property
    def weight(self) -> Tensor:
        return self._weight

    def gradient_of(self, out: Tensor) -> Tensor:
        """An explicit gradient: made from the tensor, or one that every rank has whole."""
        if self._draw.random() < 0.5:
            return torch.ones(out.shape, dtype=out.dtype)
        return torch.ones_like(out) * 0.5

    def finish(self) -> list[Tensor]:
        """Go backward from some results, by one of the ways that there are."""
        results = [*self._rows[1:], *self._others]
        ends = [x for x in results if x.requires_grad]
        out = self._draw.choice(ends) if ends else self._leaf * 2
        leaves = [self._leaf, self._weight]
        way = self._draw.choice(["sum", "explicit", "grad", "several", "twice"])
        if way == "sum":
            out.square().sum().backward()
            gradients = [leaf.grad for leaf in leaves]
        elif way == "explicit":
            out.backward(self.gradient_of(out))
            gradients = [leaf.grad for leaf in leaves]
        elif way == "grad":
            given = self.gradient_of(out)
            gradients = list(torch.autograd.grad(out, leaves, given, allow_unused=True))
        elif way == "twice":
            first = torch.autograd.grad(out.tanh().square().sum(), self._leaf, create_graph=True)
            (first[0] * self._data.x.flip(0)).sum().backward()
            gradients = [leaf.grad for leaf in leaves]
        else:
            loss = out.square().mean()
            torch.autograd.backward([out, loss], [self.gradient_of(out), None])
            gradients = [leaf.grad for leaf in leaves]
        return [*results, *(torch.zeros(()) if g is None else g for g in gradients)]


Operation = Callable[[_Program, Tensor], Tensor]


def _edited(p: _Program, x: Tensor, edit: Callable[[Tensor], object]) -> Tensor:
    out = x.clone()
    edit(out)
    return out


def _messages(p: _Program, x: Tensor) -> Tensor:
    source, target = p.data.edge_index
    return torch.zeros_like(x).index_add(0, target, x.index_select(0, source))


def _conv(layer: Callable[[], Any]) -> Operation:
    def convolve(p: _Program, x: Tensor) -> Tensor:
        return layer().double()(x, p.data.edge_index)  # type: ignore[no-any-return]

    return convolve


def _masked(p: _Program, x: Tensor) -> Tensor:
    def edit(out: Tensor) -> None:
        out[p.data.mask] = 0.25

    return _edited(p, x, edit)


def _column(p: _Program, x: Tensor) -> Tensor:
    def edit(out: Tensor) -> None:
        out[:, p.number(4)] += 1.5

    return _edited(p, x, edit)


def _row(p: _Program, x: Tensor) -> Tensor:
    def edit(out: Tensor) -> None:
        out[p.number(len(x))] = 2.0

    return _edited(p, x, edit)


def _masked_by_rows(p: _Program, x: Tensor) -> Tensor:
    def edit(out: Tensor) -> None:
        out[p.data.mask] = p.other()[p.data.mask] * 0.5

    return _edited(p, x, edit)


def _masked_in_place(p: _Program, x: Tensor) -> Tensor:
    def edit(out: Tensor) -> None:
        out[~p.data.mask] *= 2.0
        out[p.data.mask, p.number(4)] = 0.5

    return _edited(p, x, edit)


def _indexed(p: _Program, x: Tensor) -> Tensor:
    def edit(out: Tensor) -> None:
        rows = p.data.order[: 1 + p.number(len(x))]
        out[rows] = p.other()[rows] - 1.0

    return _edited(p, x, edit)


def _kept_edges(p: _Program, x: Tensor) -> Tensor:
    undirected = bool(p.number(2))
    edges, _ = dropout_edge(p.data.edge_index, 0.3, force_undirected=undirected)
    return torch.zeros_like(x).index_add(0, edges[1], x.index_select(0, edges[0]))


def _weighed_edges(p: _Program, x: Tensor) -> Tensor:
    """Edge features follow the mask of the edges that are left."""
    undirected = bool(p.number(2))
    kept, of = dropout_edge(p.data.edge_index, 0.3, force_undirected=undirected)
    source, target = p.data.edge_index
    weight = (x[source] - x[target]).sigmoid()[of]
    return torch.zeros_like(x).index_add(0, kept[1], weight * x[kept[0]])


def _kept_nodes(p: _Program, x: Tensor) -> Tensor:
    edges, _, nodes = dropout_node(p.data.edge_index, 0.3, num_nodes=len(x))
    x = x * nodes.unsqueeze(1)
    return torch.zeros_like(x).index_add(0, edges[1], x.index_select(0, edges[0]))


def _aggregated(aggregation: Callable[[], Any]) -> Operation:
    def aggregate(p: _Program, x: Tensor) -> Tensor:
        edges, _ = add_self_loops(p.data.edge_index, num_nodes=len(x))
        source, target = edges  # upstream takes no quantile where the last node has no edge
        return aggregation()(x[source], target, dim_size=len(x), dim=0)  # type: ignore[no-any-return]

    return aggregate


def _edge_conv(layer: Callable[[], Any]) -> Operation:
    """A layer that takes features of edges."""

    def convolve(p: _Program, x: Tensor) -> Tensor:
        source, target = p.data.edge_index
        features = (x[source] * x[target]).tanh()
        return layer().double()(x, p.data.edge_index, features)  # type: ignore[no-any-return]

    return convolve


def _dropped_across(p: _Program, x: Tensor) -> Tensor:
    if len(x) <= 3:  # where no rank has two rows, none knows how one process lays them out
        return F.dropout(x, 0.3)
    return F.dropout(x.t(), 0.3).t()


_OPERATIONS: dict[str, list[Operation]] = {
    "pointwise": [
        lambda p, x: x.tanh(),
        lambda p, x: x + p.other(),
        lambda p, x: x * p.other().sigmoid(),
        lambda p, x: x @ p.weight,
        lambda p, x: F.linear(x, p.weight, p.weight[0]),
        lambda p, x: torch.where(p.data.mask.unsqueeze(1), x, p.other()),
        lambda p, x: F.dropout(x, 0.3),
        lambda p, x: x + torch.rand_like(x),
        lambda p, x: x.t().tanh().t(),
        _dropped_across,
        lambda p, x: torch.einsum("...i,ij->...j", x, p.weight),
        lambda p, x: torch.einsum("...i,...i->...", x, p.other()),
        lambda p, x: torch.einsum("ni,nj->ij", x, p.other()),
    ],
    "rows": [
        lambda p, x: x[p.data.order],
        lambda p, x: x[torch.arange(len(x) - 1, -1, -1)],
        lambda p, x: x[p.data.mask],
        lambda p, x: x[p.number(len(x)) :],
        lambda p, x: x[p.number(len(x))],
        lambda p, x: x[:, p.number(4)],
        lambda p, x: x[:, 1:3],
        lambda p, x: x.flip(0),
        lambda p, x: x[p.data.mask][:1],
        lambda p, x: torch.take_along_dim(x, p.data.y.unsqueeze(1), 1),
        lambda p, x: torch.take_along_dim(x, p.other().argsort(dim=1, stable=True), 1),
        lambda p, x: torch.take_along_dim(x, p.data.order.unsqueeze(1), 0),
        lambda p, x: x.gather(1, p.data.y.unsqueeze(1)).squeeze(1),
    ],
    "edit": [
        _masked,
        _column,
        _row,
        lambda p, x: _edited(p, x, lambda out: out.mul_(0.5)),
        lambda p, x: _edited(p, x, lambda out: out.add_(p.other())),
        lambda p, x: _edited(p, x, lambda out: out.masked_fill_(p.data.mask.unsqueeze(1), 1.0)),
        lambda p, x: _edited(p, x, lambda out: out[:, 1:].zero_()),
        lambda p, x: _edited(p, x, lambda out: out.t()[0].fill_(3.0)),
        _masked_by_rows,
        _masked_in_place,
        _indexed,
        lambda p, x: _edited(p, x, lambda out: out.cumsum_(p.number(2))),
        lambda p, x: _edited(p, x, lambda out: out.scatter_(1, p.data.y.unsqueeze(1), 1.0)),
        lambda p, x: x.scatter_add(1, p.data.y.unsqueeze(1), p.other()[:, 1:2]),
        lambda p, x: torch.zeros_like(x).scatter_(1, p.data.y.unsqueeze(1), p.other()[:, 1:2]),
    ],
    "reduce": [
        lambda p, x: x.sum(0),
        lambda p, x: x.sum(1),
        lambda p, x: x.mean(),
        lambda p, x: x.max(0).values,
        lambda p, x: x.softmax(0),
        lambda p, x: x.log_softmax(1),
        lambda p, x: x.norm(dim=1),
        lambda p, x: F.cross_entropy(x, p.data.y),
        lambda p, x: x.cumsum(0),
        lambda p, x: x.argmax(1).double(),
        lambda p, x: x.median(p.number(2)).values,
        lambda p, x: x.quantile(0.3, dim=p.number(2)),
        lambda p, x: x.quantile(torch.tensor([0.25, 0.75], dtype=x.dtype), dim=0),
        lambda p, x: torch.bincount(p.data.y, minlength=4).double(),
        lambda p, x: torch.bincount(p.data.edge_index[1], minlength=len(x)).double(),
        lambda p, x: x.sort(dim=p.number(2), stable=True).values,
        lambda p, x: x[x[:, 0].argsort(stable=True)],
    ],
    "graph": [
        _messages,
        _conv(lambda: GCNConv(4, 4)),
        _conv(lambda: SAGEConv(4, 4, aggr="max")),
        _conv(lambda: GATv2Conv(4, 2, heads=2)),
        lambda p, x: x.index_select(0, p.data.edge_index[0]),
        lambda p, x: x[p.data.edge_index[1]].sum(1),
    ],
    "edges": [
        _kept_edges,
        _weighed_edges,
        _kept_nodes,
        _aggregated(MulAggregation),
        _aggregated(MedianAggregation),
        _aggregated(lambda: QuantileAggregation([0.3, 0.8])),
        _conv(lambda: ResGatedGraphConv(4, 4)),
        _conv(lambda: GENConv(4, 4, norm="layer")),
        _conv(lambda: EdgeConv(torch.nn.Linear(8, 4))),
        _edge_conv(lambda: ResGatedGraphConv(4, 4, edge_dim=4)),
        _edge_conv(lambda: GINEConv(torch.nn.Linear(4, 4))),
    ],
    "shape": [
        lambda p, x: x.reshape(-1),
        lambda p, x: x.t(),
        lambda p, x: x.t().contiguous(),
        lambda p, x: x.contiguous(),
        lambda p, x: x.view(len(x), 2, 2).transpose(1, 2).reshape(len(x), 4),
        lambda p, x: torch.cat([x, p.other()], 1),
        lambda p, x: torch.cat([x, p.other()]),
        lambda p, x: torch.stack([x, p.other()], 1).sum(1),
        lambda p, x: x.unsqueeze(1).expand(-1, 3, -1).mean(1),
    ],
}
