"""Node embeddings without labels by Deep Graph Infomax, then a linear classifier on them."""

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import DeepGraphInfomax, GCNConv

torch.manual_seed(5)
data = Data(
    x=torch.randn(45, 12),
    edge_index=torch.randint(0, 45, (2, 200)),
    y=torch.randint(0, 3, (45,)),
)


class Encoder(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels):
        super().__init__()
        self.conv = GCNConv(in_channels, hidden_channels)
        self.prelu = torch.nn.PReLU(hidden_channels)

    def forward(self, x, edge_index):
        return self.prelu(self.conv(x, edge_index))


def corruption(x, edge_index):
    return x[torch.randperm(x.size(0), device=x.device)], edge_index


model = DeepGraphInfomax(
    hidden_channels=16,
    encoder=Encoder(12, 16),
    summary=lambda z, *args, **kwargs: z.mean(dim=0).sigmoid(),
    corruption=corruption,
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
for epoch in range(1, 6):
    model.train()
    optimizer.zero_grad()
    pos_z, neg_z, summary = model(data.x, data.edge_index)
    loss = model.loss(pos_z, neg_z, summary)
    loss.backward()
    optimizer.step()
    print(f"Epoch: {epoch:03d}, Loss: {loss:.6f}")

model.eval()
with torch.no_grad():
    z, _, _ = model(data.x, data.edge_index)
linear = torch.nn.Linear(16, 3)
optimizer = torch.optim.SGD(linear.parameters(), lr=0.1, momentum=0.9)
for _ in range(10):
    optimizer.zero_grad()
    loss = F.cross_entropy(linear(z[:30]), data.y[:30])
    loss.backward()
    optimizer.step()
acc = (linear(z[30:]).argmax(dim=1) == data.y[30:]).sum().item() / 15
print(f"Loss: {loss:.6f}, Accuracy: {acc:.4f}")
