"""Graphormer on nodes in the order of clusters, with attention that takes turns."""

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.transforms import Compose

from fastgraph.nn import Graphormer, Schedule
from fastgraph.transforms import AttentionPattern, ClusterOrder, Degrees

torch.manual_seed(2)
group = torch.arange(60) % 3
x = torch.randn(60, 5) + group.view(-1, 1)
index = torch.randint(60, (2, 240))
index = index[:, (group[index[0]] == group[index[1]]) | (torch.rand(240) < 0.2)]
data = Data(x=x, y=group, edge_index=index)
data = Compose([ClusterOrder(3), AttentionPattern(2), Degrees()])(data)
model = Graphormer(
    5, 3, 16, 2, 4, hops=2, schedule=Schedule("layer", 2), attention_dropout=0.0, dropout=0.2
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(4):
    model.train()
    optimizer.zero_grad()
    out = model(
        data.x, data.attn_index, types=data.attn_type, degrees=(data.in_degree, data.out_degree)
    )
    loss = F.cross_entropy(out, data.y)
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        out = model(data.x, data.attn_index, types=data.attn_type)
    back = ClusterOrder.back(out, data)
    print(f"Epoch {epoch}, loss {loss.item():.6f}, first {back[:2].flatten().tolist()[0]:.5f}")
