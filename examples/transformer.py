"""Node classification with a two-layer graph transformer, full batch."""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import TransformerConv

import data_loading


class GraphTransformer(torch.nn.Module):
    def __init__(
        self, in_channels: int, hidden_channels: int, out_channels: int, heads: int, dropout: float
    ):
        super().__init__()
        self.conv1 = TransformerConv(in_channels, hidden_channels, heads=heads)
        self.conv2 = TransformerConv(heads * hidden_channels, out_channels, heads=1)
        self.dropout = dropout

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.dropout(x, p=self.dropout, training=self.training)
        x = F.elu(self.conv1(x, edge_index))
        x = F.dropout(x, p=self.dropout, training=self.training)
        return self.conv2(x, edge_index)


parser = argparse.ArgumentParser(description=__doc__)
data_loading.add_arguments(parser)
parser.add_argument("--epochs", type=int, default=50)
parser.add_argument("--hidden-channels", type=int, default=64, help="channels of each head")
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--lr", type=float, default=0.003)
parser.add_argument("--dropout", type=float, default=0.5)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
if args.epochs < 1:
    parser.error(f"--epochs: expected at least 1, got {args.epochs}")

torch.manual_seed(args.seed)
data, num_classes = data_loading.load(args.dataset, args.root)
model = GraphTransformer(
    data.num_features, args.hidden_channels, num_classes, args.heads, args.dropout
)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)


def train() -> float:
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@torch.no_grad()
def test() -> list[float]:
    model.eval()
    correct = model(data.x, data.edge_index).argmax(dim=-1) == data.y
    masks = (data.train_mask, data.val_mask, data.test_mask)
    return [float(correct[mask].float().mean()) for mask in masks]


times = []
for epoch in range(1, args.epochs + 1):
    start = time.perf_counter()
    loss = train()
    train_acc, val_acc, test_acc = test()
    times.append(time.perf_counter() - start)
    print(
        f"Epoch: {epoch:03d}, Loss: {loss:.6f}, Train: {train_acc:.4f}, Val: {val_acc:.4f}, "
        f"Test: {test_acc:.4f}, Time: {times[-1]:.4f}s",
        flush=True,
    )
print(
    f"Median epoch time: {statistics.median(times):.4f}s, Final loss: {loss:.6f}, "
    f"Test accuracy: {test_acc:.4f}"
)
