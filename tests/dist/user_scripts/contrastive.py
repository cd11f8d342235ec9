"""Two views of a graph, edges dropped in pairs, a teacher that follows, and a triplet loss."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GCN
from torch_geometric.utils import dropout_edge, to_undirected

torch.manual_seed(5)
n = 60
data = Data(x=torch.randn(n, 6), edge_index=to_undirected(torch.randint(0, n, (2, 150))))
encoder = GCN(6, 8, 2)
projector = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.PReLU(), nn.Linear(8, 8))
optimizer = torch.optim.Adam([*encoder.parameters(), *projector.parameters()], lr=0.01)
teacher = copy.deepcopy(encoder).requires_grad_(False)


def view():
    edges, _ = dropout_edge(data.edge_index, 0.3, force_undirected=True)
    x = data.x.clone()
    x[:, torch.rand(6) < 0.2] = 0
    return x, edges


for epoch in range(4):
    z = F.normalize(projector(encoder(*view())), dim=-1)
    target = F.normalize(teacher(*view()), dim=-1)
    loss = F.cross_entropy(z @ target.t() / 0.5, torch.arange(n))
    loss = loss + F.triplet_margin_loss(z, target, target[torch.randperm(n)])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for mean, parameter in zip(teacher.parameters(), encoder.parameters()):
        mean.data.mul_(0.99).add_(parameter.data, alpha=0.01)
    print(f"{epoch} {loss.item():.6f} {sum(p.norm() for p in teacher.parameters()).item():.6f}")
