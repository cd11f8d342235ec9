"""Entities of a knowledge graph, classified by an RGCN whose weights are sums of few bases."""

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import RGCNConv

torch.manual_seed(12)
num_nodes, num_relations, num_classes = 60, 4, 3
data = Data(
    edge_index=torch.randint(0, num_nodes, (2, 240)),
    edge_type=torch.randint(0, num_relations, (240,)),
    num_nodes=num_nodes,
)
entities = torch.randperm(num_nodes)
train_idx, test_idx = entities[:30], entities[30:45]
train_y, test_y = torch.randint(0, num_classes, (30,)), torch.randint(0, num_classes, (15,))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = torch.nn.Embedding(num_nodes, 8)
        self.conv1 = RGCNConv(8, 16, num_relations, num_bases=3)
        self.conv2 = RGCNConv(16, num_classes, num_relations, num_bases=3, aggr="add")

    def forward(self, edge_index, edge_type):
        x = F.relu(self.conv1(self.emb.weight, edge_index, edge_type))
        x = self.conv2(x, edge_index, edge_type)
        return F.log_softmax(x, dim=1)


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.0005)


@torch.no_grad()
def test():
    model.eval()
    pred = model(data.edge_index, data.edge_type).argmax(dim=-1)
    train_acc = float((pred[train_idx] == train_y).double().mean())
    return train_acc, float((pred[test_idx] == test_y).double().mean())


for epoch in range(1, 6):
    model.train()
    optimizer.zero_grad()
    out = model(data.edge_index, data.edge_type)
    loss = F.nll_loss(out[train_idx], train_y)
    loss.backward()
    optimizer.step()
    train_acc, test_acc = test()
    print(f"Epoch: {epoch:02d}, Loss: {loss:.6f}, Train: {train_acc:.4f}, Test: {test_acc:.4f}")
