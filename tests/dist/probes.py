"""Operations to be done on an ordinary and on a sharded graph, and what they must gather.

Each gives a tensor, which is compared, as are the gradients of all parameters for the sum of its
squares.
"""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
import torch_geometric.utils as pyg
from torch import Tensor
from torch_geometric.data import Data

from tests.dist.graphs import NUM_CLASSES, NUM_FEATURES, NUM_NODES

N, D, C = NUM_NODES, NUM_FEATURES, NUM_CLASSES


class Probe(NamedTuple):
    """An operation, and the names under which something is gathered for it."""

    run: Callable[[Data], Tensor]
    gathers: frozenset[str] = frozenset()


class Modules:
    """Replicated parameters and indices, the same on every rank."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(2)
        torch.manual_seed(3)
        self.lin = torch.nn.Linear(D, D)
        self.weight = torch.randn(D, D, generator=g, requires_grad=True)
        self.index = torch.randperm(N, generator=g)[:20]
        self.order = torch.randperm(N, generator=g)
        self.batch = torch.arange(N) // 20
        self.attention = torch.nn.MultiheadAttention(D, 2, batch_first=True)
        self.gru = torch.nn.GRU(D, D, batch_first=True)
        self.norms = [
            gnn.GraphNorm(D), gnn.PairNorm(), gnn.InstanceNorm(D), gnn.DiffGroupNorm(D, 2),
            gnn.MeanSubtractionNorm(), gnn.LayerNorm(D),
        ]  # fmt: skip
        mlp = lambda *sizes: gnn.MLP(list(sizes), norm=None)  # noqa: E731
        degrees = torch.ones(20, dtype=torch.long)
        self.convs = {
            "PNAConv": gnn.PNAConv(D, D, ["mean", "max", "std"], ["identity"], degrees),
            "SAGEConv max": gnn.SAGEConv(D, D, "max"),
            "EdgeConv": gnn.EdgeConv(gnn.MLP([2 * D, D, D])),
            "ChebConv": gnn.ChebConv(D, D, 2),
            "FiLMConv": gnn.FiLMConv(D, D),
            "ResGatedGraphConv": gnn.ResGatedGraphConv(D, D),
            "GatedGraphConv": gnn.GatedGraphConv(D, 2),
            "SuperGATConv": gnn.SuperGATConv(D, D).eval(),
            "ARMAConv": gnn.ARMAConv(D, D),
            "GENConv": gnn.GENConv(D, D),
            "TAGConv": gnn.TAGConv(D, D),
            "SAGEConv to sources": gnn.SAGEConv(D, D, flow="target_to_source"),
        }
        self.edge_convs = {
            "GINEConv": gnn.GINEConv(mlp(D, D), edge_dim=3),
            "NNConv": gnn.NNConv(D, D, torch.nn.Linear(3, D * D)),
            "GATv2Conv": gnn.GATv2Conv(D, D, edge_dim=3),
            "TransformerConv": gnn.TransformerConv(D, D, edge_dim=3),
            "CGConv": gnn.CGConv(D, 3),
        }
        self.aggregations = {
            "softmax": gnn.SoftmaxAggregation(learn=True),
            "power mean": gnn.PowerMeanAggregation(),
            "std": gnn.StdAggregation(),
        }
        self.pool = gnn.TopKPooling(D)
        self.jumping = gnn.JumpingKnowledge("lstm", D, 2)

    def parameters(self) -> list[Tensor]:
        found = [self.weight]
        for value in vars(self).values():
            modules = value.values() if isinstance(value, dict) else value
            for module in modules if isinstance(value, (dict, list)) else [value]:
                if isinstance(module, torch.nn.Module):
                    found.extend(module.parameters())
        return found

    def hidden(self, data: Data) -> Tensor:
        return self.lin(data.x).relu()


PROBES: dict[str, Probe] = {}
m: Modules  # made by `prepare`, in the dtype that is the default then


def prepare() -> None:
    """Make the parameters."""
    global m
    m = Modules()


def probe(name: str, *gathers: str) -> Callable[[Callable[[Data], Tensor]], None]:
    def add(run: Callable[[Data], Tensor]) -> None:
        PROBES[name] = Probe(run, frozenset(gathers))

    return add


def h(d: Data) -> Tensor:
    return m.hidden(d)


def simple(name: str, run: Callable[[Data], Tensor], *gathers: str) -> None:
    PROBES[name] = Probe(run, frozenset(gathers))


simple(
    "sizes",
    lambda d: torch.tensor(
        [
            *d.x.shape,
            d.num_nodes,
            len(d.x),
            d.num_edges,
            d.x.numel(),
            d.edge_index.size(1),
            d.x.dim(),
            d.x.stride(0),
        ]
    ),
)
simple("x[indices]", lambda d: F.cross_entropy(h(d)[m.index], d.y[m.index]))
simple(
    "x[list], x[-1], x[3:50:2], x[:, 2:5]",
    lambda d: (
        d.x[[1, 5, 2]].sum(1) @ torch.ones(3)
        + d.x[-1].sum()
        + h(d)[3:50:2].sum()
        + d.x[:, 2:5].mean()
        + d.x[..., None].max()
    ),
)
simple("x[numbers, classes]", lambda d: h(d)[torch.arange(N), d.y], "__getitem__")
simple("sharded negative index", lambda d: h(d)[d.y - 4])
simple(
    "replicated table at sharded index",
    lambda d: m.weight[d.y].sum(1) + F.embedding(d.y - 0, m.weight).sum(1),
)
simple(
    "sum, mean, var, std, norm",
    lambda d: torch.stack(
        [
            h(d).sum(),
            h(d).mean(),
            h(d).var(),
            h(d).std(0).sum(),
            h(d).norm(),
            h(d).norm(dim=1).sum(),
            torch.linalg.vector_norm(h(d), dim=0).sum(),
            h(d).sum(axis=0).prod(),
            h(d).mean((0, 1)),
        ]
    ),
)
simple(
    "extremes",
    lambda d: torch.stack(
        [
            h(d).max(),
            h(d).min(),
            h(d).amax(0).sum(),
            d.x.amin((0, 1)),
            d.y.max().double(),
            h(d).max(1)[0].sum(),
            h(d).max(dim=-1).values.sum(),
        ]
    ),
)
simple(
    "any, all, count_nonzero",
    lambda d: torch.stack(
        [
            d.train_mask.any(),
            d.train_mask.all(),
            (d.x > -9).all(),
            (d.x > 9).any(),
            d.train_mask.count_nonzero(),
        ]
    ).double(),
)
simple("max over rows with indices", lambda d: d.x.max(0)[1], "max")
simple("argmax", lambda d: (h(d).argmax(-1) == d.y).sum() / N)
simple(
    "softmax and logsumexp over rows",
    lambda d: (
        h(d).softmax(0).square().sum() + h(d).logsumexp(0).sum() + F.log_softmax(h(d), 0).sum()
    ),
)
simple(
    "cumsum, sort over rows", lambda d: d.x.cumsum(0).sum(1) + d.x[:, 0].sort()[0], "cumsum", "sort"
)
simple(
    "along columns",
    lambda d: (
        h(d).softmax(1).sum(1)
        + h(d).cumsum(1)[:, 3]
        + h(d).sort(1)[0][:, 2]
        + h(d).topk(3)[0].sum(1)
        + h(d).flip(1)[:, 0]
        + h(d).roll(1, 1)[:, 1]
    ),
)
simple("bincount, unique", lambda d: torch.bincount(d.y) + d.y.unique(), "bincount", "unique")
simple(
    "x.t() @ x, x @ x.t()",
    lambda d: (h(d).t() @ d.x).sum() + (d.x @ d.x.t()).abs().mean(),
    "matmul",
    "__matmul__",
)
simple(
    "products",
    lambda d: (
        (h(d) @ m.weight).sum(1)
        + torch.addmm(m.weight[0], d.x, m.weight).sum(1)
        + torch.mm(d.x, m.weight)[:, 0]
        + d.x @ m.weight[0]
    ),
)
simple("products over rows", lambda d: h(d).t() @ d.x + torch.ones(D, N) @ h(d))
simple(
    "einsum",
    lambda d: (
        torch.einsum("nd,de,ne->n", d.x, m.weight, h(d))
        + torch.einsum("nd,ne->de", d.x, h(d)).sum()
    ),
)
simple(
    "view(-1) and back",
    lambda d: (
        (h(d).view(-1) * d.x.reshape(-1)).view(-1, D).sum(1) + h(d).view(-1, 2, 4).flatten(1).sum(1)
    ),
)
simple(
    "cat of rows",
    lambda d: (
        torch.cat([h(d), torch.zeros(3, D)], 0).square().sum()
        + torch.cat([h(d), d.x])[N - 5 : N + 5].sum()
    ),
)
simple(
    "cat of columns, stack",
    lambda d: (
        torch.cat([h(d), d.x, torch.ones(N, 1)], 1).sum(1) + torch.stack([h(d), d.x], 0).sum((0, 2))
    ),
)
simple(
    "permute, unsqueeze, expand",
    lambda d: (
        torch.stack([d.x, h(d)], 1).permute(1, 0, 2).unsqueeze(0).expand(2, 2, N, D) * d.x
    ).sum((0, 1, 3)),
)
simple(
    "squeeze",
    lambda d: d.w.squeeze() + d.w.squeeze(-1) * d.w[:, 0] + d.w.unsqueeze(0).squeeze().sum(),
)
simple(
    "losses of elements",
    lambda d: (
        F.binary_cross_entropy_with_logits(
            h(d)[:, 0], d.y.double() / 4, pos_weight=torch.tensor(2.0)
        )
        + F.mse_loss(h(d), d.x)
        + F.l1_loss(h(d), d.x, reduction="sum")
        + F.kl_div(h(d).log_softmax(1), d.x.softmax(1), reduction="batchmean")
        + F.smooth_l1_loss(h(d), torch.zeros(N, D))
    ),
)
simple(
    "losses of classes",
    lambda d: (
        F.cross_entropy(h(d)[:, :C], d.y, weight=torch.arange(1.0, 5.0))
        + F.cross_entropy(h(d)[:, :C], d.y, ignore_index=2)
        + F.cross_entropy(h(d)[:, :C], d.y, label_smoothing=0.1)
        + F.cross_entropy(h(d)[:, :C], d.x[:, :C].softmax(1))
        + F.cross_entropy(h(d)[:, :C], d.y, reduction="sum")
        + F.nll_loss(h(d)[:, :C].log_softmax(-1), d.y)
    ),
)
simple(
    "loss modules",
    lambda d: (
        torch.nn.CrossEntropyLoss()(h(d)[:, :C], d.y)
        + torch.nn.BCEWithLogitsLoss()(h(d)[:, 0], d.y.double() / 4)
    ),
)
simple(
    "row norms",
    lambda d: (
        F.normalize(h(d)).sum()
        + F.cosine_similarity(h(d), d.x).sum()
        + F.layer_norm(h(d), (D,), m.weight[0]).square().mean()
    ),
)
simple("one_hot", lambda d: F.one_hot(d.y, C).double().sum(0) + F.one_hot(d.y).double().sum(0))
simple(
    "pooling by a replicated batch",
    lambda d: (
        gnn.global_mean_pool(h(d), m.batch).sum(1)
        + gnn.global_add_pool(h(d), m.batch)[0].sum()
        + gnn.global_add_pool(h(d), None).sum()
    ),
)
simple("max pooling", lambda d: gnn.global_max_pool(h(d), m.batch), "scatter_reduce_")
simple("pooling by a sharded batch", lambda d: gnn.global_mean_pool(h(d), d.y, size=C).sum(1))
simple("degree", lambda d: pyg.degree(d.edge_index[1], N) + pyg.degree(d.edge_index[0], N))
simple(
    "homophily, isolated nodes",
    lambda d: torch.tensor(
        pyg.homophily(d.edge_index, d.y) + pyg.contains_isolated_nodes(d.edge_index, N)
    ),
    "unique",
    "__setitem__",
    "view",
)
simple(
    "dense adjacency",
    lambda d: pyg.to_dense_adj(d.edge_index, max_num_nodes=N)[0].sum(),
    "scatter_add_",
    "scatter_",
)
simple(
    "own messages",
    lambda d: pyg.scatter(
        h(d)[d.edge_index[0]] * d.edge_attr[:, :1], d.edge_index[1], 0, N, "mean"
    ),
)
simple(
    "own messages to sources",
    lambda d: torch.zeros(N, D).index_add_(0, d.edge_index[0], h(d)[d.edge_index[1]]),
)
simple(
    "maxima for sources",
    lambda d: pyg.scatter(h(d)[d.edge_index[1]], d.edge_index[0], 0, N, "max"),
    "scatter_reduce_",
)
simple(
    "edge softmax",
    lambda d: pyg.softmax(
        d.edge_attr[:, 0] * h(d)[d.edge_index[0]].sum(1), d.edge_index[1], num_nodes=N
    ),
)
simple(
    "dropout of nothing",
    lambda d: (
        F.dropout(h(d), 0.0).sum()
        + F.dropout(h(d), 0.5, training=False).sum()
        + pyg.dropout_edge(d.edge_index, 0.0)[0].sum()
    ),
)
simple(
    "no_grad, detach",
    lambda d: (
        h(d).detach() * (1.0 if not h(d).detach().requires_grad and h(d).requires_grad else 0.0)
    ),
)
simple(
    "where, allclose, equal",
    lambda d: (
        torch.where(d.train_mask[:, None], h(d), torch.zeros(1)).sum(1)
        + float(torch.equal(d.x, d.x))
        + float(torch.allclose(d.x, d.x + 1))
    ),
)
simple("where of one argument", lambda d: torch.where(d.train_mask)[0], "where")
simple(
    "nonzero of a mask as index",
    lambda d: (
        F.cross_entropy(h(d)[d.train_mask.nonzero().view(-1)], d.y[d.train_mask])
        + d.train_mask.nonzero().sum()
    ),
)
simple(
    "logic of masks",
    lambda d: (d.train_mask ^ (d.y == 1) | ~d.train_mask & (d.y > 2)).sum().double(),
)
simple(
    "new_zeros, replicated operands",
    lambda d: d.x.new_zeros(N, D) + torch.ones(N, D) * h(d) + torch.arange(N)[:, None],
)
simple(
    "more dimensions than the sharded operand", lambda d: (torch.ones(3, N, D) * h(d)).sum((0, 2))
)
simple(
    "permuted rows, then messages",
    lambda d: pyg.scatter(h(d)[m.order][d.edge_index[0]], d.edge_index[1], 0, N, "sum"),
)
simple(
    "x[x > 0]",
    lambda d: d.x[d.x > 0].sum() + d.x.masked_select(d.x > 1).sum(),
    "__getitem__",
    "masked_select",
)
simple("gather along columns", lambda d: h(d).gather(1, d.y[:, None]).sum(1))
simple(
    "gather of few rows",
    lambda d: h(d).gather(1, torch.zeros(5, 2, dtype=torch.long)).sum(1),
    "gather",
)
simple("iteration over rows", lambda d: sum(r.sum() for r in h(d)), "unbind")
simple(
    "parts of columns",
    lambda d: (
        sum(a.sum(1) for a in h(d).chunk(2, -1)) + h(d).split(4, 1)[0].sum(1) + h(d).unbind(1)[3]
    ),
)
simple("loop over classes", lambda d: torch.stack([h(d)[d.y == c].mean(0) for c in range(C)]))
simple("branch on a value", lambda d: h(d).sum() if h(d).sum() > 0 else d.x.sum())
simple(
    "kwargs",
    lambda d: (
        torch.sum(input=h(d), dim=0)
        + torch.mul(input=h(d), other=d.w).sum(0)
        + torch.index_select(h(d), dim=0, index=m.index).sum(0)
    ),
)
simple(
    "nested lists",
    lambda d: (
        torch.cat(tensors=[torch.stack([h(d), d.x])[0], d.x], dim=-1).sum(1)
        + torch.block_diag(d.w[:3], d.w[:2]).sum()
    ),
    "block_diag",
)
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
simple(
    "sparse product",
    lambda d: pyg.to_torch_csr_tensor(d.edge_index, size=(N, N)) @ h(d),
    "add_",
    "__setitem__",
    "sparse_csr_tensor",
    "sort",
    "argsort",
    "_index_fill_helper",
    "index_sort",
    "unique",
    "bincount",
    "cat",
    "cumsum",
    "scatter_add_",
    "__getitem__",
    "scatter_",
    "scatter_reduce_",
    "_convert_indices_from_coo_to_csr",
    "masked_select",
    "sum",
    "index2ptr",
    "sparse_coo_tensor",
    "__setitem__",
    "searchsorted",
    "max",
    "diff",
    "any",
    "all",
    "lexsort",
)
simple("prelu", lambda d: F.prelu(d.x, m.weight[0]) + F.prelu(d.x, m.weight[0, :1]))
simple(
    "attention module, nodes as batch",
    lambda d: m.attention(*[h(d)[:, None, :].expand(-1, 3, -1)] * 3, need_weights=False)[0].sum(
        (1, 2)
    ),
    "multi_head_attention_forward",
    "scaled_dot_product_attention",
    "baddbmm",
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
simple(
    "subgraph",
    lambda d: (lambda s: s.x.sum(0) + s.num_edges + s.edge_index.sum())(d.subgraph(d.train_mask)),
    "__setitem__",
    "view",
    "__getitem__",
    "index_select",
    "scatter_",
)
simple(
    "k-hop subgraph",
    lambda d: pyg.k_hop_subgraph(3, 2, d.edge_index, num_nodes=N)[0].double().sum(),
    "cat",
    "unique",
    "__getitem__",
    "index_select",
    "__setitem__",
    "bincount",
)
simple(
    "coalesce",
    lambda d: pyg.coalesce(d.edge_index),
    "add_",
    "index_sort",
    "sort",
    "argsort",
    "__getitem__",
    "__setitem__",
    "lexsort",
    "mul",
    "sub",
    "cat",
    "gather",
    "index_select",
    "__gt__",
    "gt",
)
simple(
    "self-loops, undirected",
    lambda d: (
        pyg.add_remaining_self_loops(d.edge_index, d.edge_weight, num_nodes=N)[1].sum()
        + pyg.to_undirected(d.edge_index).double().sum()
    ),
    "add_",
    "index_sort",
    "sort",
    "argsort",
    "__getitem__",
    "__setitem__",
    "lexsort",
    "gt",
)


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp() + x.size(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0].exp()


@probe("x[mask] = value")
def _(d: Data) -> Tensor:
    x = h(d).clone()
    x[d.train_mask] = 1.5
    x[~d.train_mask, 0] = 0.0
    x[d.train_mask] += m.lin(d.x[d.train_mask])
    out = d.train_mask.clone()
    out[d.train_mask] = torch.arange(int(d.train_mask.sum())) % 2 == 0
    return x * out[:, None]


@probe("x[index] = rows")
def _(d: Data) -> Tensor:
    x = h(d).clone()
    x[m.index] = torch.arange(20.0 * D).view(20, D)
    x[:, 3] = 7.0
    x[5] = 1.0
    x[-6] = m.weight[0]
    x[2:9] = d.x[2:9]
    x[..., 1] = d.w[:, 0]
    return x


@probe("views of rows are written through")
def _(d: Data) -> Tensor:
    x = h(d).clone()
    x[5] += 1
    x[7].zero_()
    x[10:20] *= 2
    x[20:30].fill_(3.0)
    row = x[31]
    row.add_(m.weight[1])
    x[:, 2:4].zero_()
    x[40:50, 1].sub_(1)
    return x


@probe("rows of a replicated tensor by a sharded mask", "__setitem__")
def _(d: Data) -> Tensor:
    z = torch.zeros(N, D)
    z[d.train_mask] = h(d)[d.train_mask]
    return z


@probe("in-place operations")
def _(d: Data) -> Tensor:
    x = m.lin(d.x) * 1
    x = x.relu_() * 1
    x += d.x
    x.mul_(2).clamp_(max=3).add_(d.w)
    return F.relu(x * 1, inplace=True)


@probe("in-place operation without a rule", "cumsum_", "_foreach_add_")
def _(d: Data) -> Tensor:
    x = d.x.clone()
    x.cumsum_(0)
    y = d.x.clone()
    torch._foreach_add_([x, y], 1.0)
    return x + y


@probe("out=", "copy_")
def _(d: Data) -> Tensor:
    out = torch.zeros_like(d.x)
    torch.add(d.x, 1, out=out)
    replicated = torch.empty(N, D)
    torch.mul(d.x, 2, out=replicated)
    return out + replicated


@probe("negative sampling and a link loss", "numpy", "__setitem__", "unique", "cpu")
def _(d: Data) -> Tensor:
    random.seed(0)
    negative = pyg.negative_sampling(d.edge_index, N, 50)
    z = h(d)
    s = (z[negative[0]] * z[negative[1]]).sum(-1)
    p = (z[d.edge_index[0]] * z[d.edge_index[1]]).sum(-1)
    scores = torch.cat([s, p])
    labels = torch.cat([s.new_zeros(s.size(0)), torch.ones(p.size(0))])
    loss = F.binary_cross_entropy_with_logits(scores, labels)
    return loss + gnn.GAE(None).recon_loss(z, d.edge_index, negative)


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


@probe("batch norm")
def _(d: Data) -> Tensor:
    norm = torch.nn.BatchNorm1d(D)
    out = norm(h(d)).square() * d.x
    norm.eval()
    return out + norm(d.x).sum() + norm.running_var


@probe("files", "__reduce_ex__")
def _(d: Data) -> Tensor:
    buffer = io.BytesIO()
    torch.save(d.to_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)["x"]


@probe("repr", "repr")
def _(d: Data) -> Tensor:
    return torch.tensor([ord(c) for c in repr(d.x) + str(d.y)])


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


@probe("norm layers", "index_select", "batch_norm", "instance_norm", "scatter_")
def _(d: Data) -> Tensor:
    return sum(norm(h(d)).square().sum() * (i + 1) for i, norm in enumerate(m.norms))


@probe("recurrent layers", "gru", "lstm")
def _(d: Data) -> Tensor:
    sequences = h(d)[:, None, :].expand(-1, 3, -1)
    return m.gru(sequences)[0].sum((1, 2)) + m.jumping([h(d), d.x]).sum(1)


@probe(
    "TopK pooling",
    "topk",
    "sort",
    "scatter_",
    "cumsum",
    "__getitem__",
    "index_select",
    "scatter_reduce_",
    "max",
    "argsort",
    "cat",
    "nonzero",
    "new_full",
    "repeat_interleave",
)
def _(d: Data) -> Tensor:
    return m.pool(h(d), d.edge_index)[0].square().sum()


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


def _layers() -> None:
    convs = """
        SAGEConv max, SAGEConv to sources, PNAConv, EdgeConv, ChebConv, FiLMConv, ResGatedGraphConv,
        GatedGraphConv, SuperGATConv, ARMAConv, GENConv, TAGConv
    """
    for name in map(str.strip, convs.split(",")):
        gathers = {"SuperGATConv": ("numpy",), "GatedGraphConv": ("gru_cell",)}.get(name, ())
        simple(name, lambda d, name=name: m.convs[name](h(d), d.edge_index), *gathers)
    for name in ("GINEConv", "NNConv", "GATv2Conv", "TransformerConv", "CGConv"):
        simple(
            f"{name} with features of edges",
            lambda d, name=name: m.edge_convs[name](h(d), d.edge_index, d.edge_attr),
        )
    for name in ("softmax", "power mean", "std"):
        gathers = ("scatter_reduce_",) if name == "softmax" else ()
        simple(
            f"{name} aggregation",
            lambda d, name=name: m.aggregations[name](h(d), d.y, dim_size=C),
            *gathers,
        )


_layers()
