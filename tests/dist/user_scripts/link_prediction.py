"""Missing links of a graph, by products of node embeddings and sampled negatives."""

import torch
import torch_geometric.transforms as T
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from torch_geometric.utils import negative_sampling, to_undirected

seed_everything(3)
edge_index = to_undirected(torch.randint(0, 50, (2, 150)), num_nodes=50)
data = Data(x=torch.randn(50, 10), edge_index=edge_index)
transform = T.Compose(
    [
        T.NormalizeFeatures(),
        T.RandomLinkSplit(
            num_val=0.1, num_test=0.1, is_undirected=True, add_negative_train_samples=False
        ),
    ]
)
train_data, val_data, test_data = transform(data)


class Net(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels):
        super().__init__()
        self.conv1 = GCNConv(in_channels, hidden_channels)
        self.conv2 = GCNConv(hidden_channels, out_channels)

    def encode(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)

    def decode(self, z, edge_label_index):
        return (z[edge_label_index[0]] * z[edge_label_index[1]]).sum(dim=-1)

    def decode_all(self, z):
        return ((z @ z.t()) > 0).nonzero().t()


model = Net(10, 16, 8)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
criterion = torch.nn.BCEWithLogitsLoss()


def train():
    model.train()
    optimizer.zero_grad()
    z = model.encode(train_data.x, train_data.edge_index)
    negative = negative_sampling(
        edge_index=train_data.edge_index,
        num_nodes=train_data.num_nodes,
        num_neg_samples=train_data.edge_label_index.size(1),
    )
    edge_label_index = torch.cat([train_data.edge_label_index, negative], dim=-1)
    edge_label = torch.cat(
        [train_data.edge_label, train_data.edge_label.new_zeros(negative.size(1))], dim=0
    )
    loss = criterion(model.decode(z, edge_label_index).view(-1), edge_label)
    loss.backward()
    optimizer.step()
    return loss


@torch.no_grad()
def test(data):
    model.eval()
    z = model.encode(data.x, data.edge_index)
    out = model.decode(z, data.edge_label_index).view(-1).sigmoid()
    return ((out > 0.5) == (data.edge_label > 0.5)).double().mean().item()


best_val_acc = final_test_acc = 0.0
for epoch in range(1, 6):
    loss = train()
    val_acc, test_acc = test(val_data), test(test_data)
    if val_acc > best_val_acc:
        best_val_acc, final_test_acc = val_acc, test_acc
    print(f"Epoch: {epoch:03d}, Loss: {loss:.6f}, Val: {val_acc:.4f}, Test: {test_acc:.4f}")
print(f"Final Test: {final_test_acc:.4f}")
z = model.encode(test_data.x, test_data.edge_index)
print("edges found:", model.decode_all(z).size(1))
