"""A variational graph autoencoder, whose state is saved and loaded again."""

import os

import torch
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.nn import VGAE, GCNConv
from torch_geometric.utils import negative_sampling

seed_everything(9)
data = Data(x=torch.randn(40, 8), edge_index=torch.randint(0, 40, (2, 160)))


class VariationalEncoder(torch.nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv1 = GCNConv(in_channels, 2 * out_channels)
        self.conv_mu = GCNConv(2 * out_channels, out_channels)
        self.conv_logstd = GCNConv(2 * out_channels, out_channels)

    def forward(self, x, edge_index):
        x = self.conv1(x, edge_index).relu()
        return self.conv_mu(x, edge_index), self.conv_logstd(x, edge_index)


model = VGAE(VariationalEncoder(8, 6))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
os.makedirs("checkpoints", exist_ok=True)
best = float("inf")
for epoch in range(1, 7):
    model.train()
    optimizer.zero_grad()
    z = model.encode(data.x, data.edge_index)
    negative = negative_sampling(data.edge_index, num_nodes=40, num_neg_samples=160)
    loss = model.recon_loss(z, data.edge_index, negative)
    loss = loss + (1 / data.num_nodes) * model.kl_loss()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    if loss.item() < best:
        best = loss.item()
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch},
            os.path.join("checkpoints", "best.pt"),
        )
    print(f"Epoch: {epoch:03d}, Loss: {loss:.6f}, Best: {best:.6f}")

state = torch.load(os.path.join("checkpoints", "best.pt"))
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
model.eval()
with torch.no_grad():
    z = model.encode(data.x, data.edge_index)
    scores = model.decode(z, data.edge_index)
print(f"Epoch {state['epoch']} again: mean {scores.mean():.6f}, first {scores[0]:.6f}")
