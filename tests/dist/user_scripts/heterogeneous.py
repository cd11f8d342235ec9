"""Papers and authors: a transformer for heterogeneous graphs, then sums by relation."""

import torch
import torch.nn.functional as F
from torch_geometric.data import HeteroData
from torch_geometric.nn import HeteroConv, HGTConv, SAGEConv

torch.manual_seed(7)
data = HeteroData()
data["paper"].x, data["author"].x = torch.randn(40, 6), torch.randn(30, 6)
data["paper"].y = torch.randint(0, 3, (40,))
writes = torch.stack([torch.randint(0, 30, (100,)), torch.randint(0, 40, (100,))])
data["author", "writes", "paper"].edge_index = writes
data["paper", "rev_writes", "author"].edge_index = writes.flip(0)
data["paper", "cites", "paper"].edge_index = torch.randint(0, 40, (2, 120))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.hgt = HGTConv(6, 8, data.metadata(), heads=2)
        self.sums = HeteroConv({kind: SAGEConv(8, 8) for kind in data.edge_types}, aggr="max")
        self.lin = torch.nn.Linear(8, 3)

    def forward(self, x_dict, edge_index_dict):
        x_dict = {key: F.gelu(x) for key, x in self.hgt(x_dict, edge_index_dict).items()}
        return self.lin(self.sums(x_dict, edge_index_dict)["paper"].relu())


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(4):
    optimizer.zero_grad()
    out = model(data.x_dict, data.edge_index_dict)
    loss = F.cross_entropy(out[:20], data["paper"].y[:20])
    loss.backward()
    optimizer.step()
    acc = (out[20:].argmax(dim=-1) == data["paper"].y[20:]).double().mean()
    print(f"Epoch: {epoch}, Loss: {loss:.6f}, Acc: {acc:.4f}, out {out[3, 1]:.4f}")
