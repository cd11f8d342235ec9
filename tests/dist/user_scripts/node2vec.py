"""Embeddings of random walks, by the optimizer for sparse gradients."""

import torch
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from torch_geometric.utils import negative_sampling, to_undirected

seed_everything(5)
n = 30
data = Data(edge_index=to_undirected(torch.randint(0, n, (2, 90))), num_nodes=n)
data.y = torch.randint(0, 2, (n,))
embedding = torch.nn.Embedding(n, 8, sparse=True)
optimizer = torch.optim.SparseAdam(list(embedding.parameters()), lr=0.05)


def walks(edge_index, length):
    row, col = edge_index
    order = torch.argsort(row, stable=True)
    row, col = row[order], col[order]
    degree = torch.bincount(row, minlength=n)
    start = torch.cat([degree.new_zeros(1), degree.cumsum(0)[:-1]])
    nodes = torch.arange(n)[degree > 0]
    path = [nodes]
    for _ in range(length):
        step = (torch.rand(len(nodes)) * degree[path[-1]]).long()
        path.append(col[start[path[-1]] + step])
    return torch.stack(path, dim=-1)


for epoch in range(4):
    pos = walks(data.edge_index, 4)
    neg = torch.randint(0, n, pos.shape)
    loss = 0.0
    for rw, sign in ((pos, 1), (neg, -1)):
        first, rest = rw[:, :1], rw[:, 1:].contiguous()
        dot = (embedding(first) * embedding(rest)).sum(dim=-1).view(-1)
        loss = loss - torch.nn.functional.logsigmoid(sign * dot).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"Epoch: {epoch}, Loss: {loss.item():.6f}")

conv = GCNConv(8, 8)
adam = torch.optim.Adam(conv.parameters(), lr=0.02)
for epoch in range(3):
    z = conv(embedding.weight.detach(), data.edge_index)
    neg = negative_sampling(data.edge_index, n, num_neg_samples=60)
    label = torch.cat([torch.ones(data.num_edges), torch.zeros(neg.size(1))])
    edges = torch.cat([data.edge_index, neg], dim=-1)
    score = (z[edges[0]] * z[edges[1]]).sum(dim=-1)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(score, label)
    adam.zero_grad()
    loss.backward()
    adam.step()
    print(f"Links: {loss.item():.6f}, {score.sigmoid()[0]:.4f}")
