"""A layer of one's own in a residual network with norms, and attention beside it."""

import numpy as np
import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from torch_geometric.data import Data
from torch_geometric.nn import BatchNorm, GATv2Conv, MessagePassing
from torch_geometric.utils import add_self_loops, degree


class EdgeWeighted(MessagePassing):
    def __init__(self, in_channels, out_channels):
        super().__init__(aggr="add")
        self.lin = torch.nn.Linear(in_channels, out_channels, bias=False)
        self.gate = torch.nn.Linear(2 * out_channels, 1)
        self.bias = torch.nn.Parameter(torch.zeros(out_channels))

    def forward(self, x, edge_index):
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        row, col = edge_index
        deg_inv_sqrt = degree(col, x.size(0), dtype=x.dtype).pow(-0.5)
        deg_inv_sqrt[deg_inv_sqrt == float("inf")] = 0
        norm = deg_inv_sqrt[row] * deg_inv_sqrt[col]
        return self.propagate(edge_index, x=self.lin(x), norm=norm) + self.bias

    def message(self, x_i, x_j, norm):
        gate = torch.sigmoid(self.gate(torch.cat([x_i, x_j], dim=-1)))
        return norm.view(-1, 1) * gate * x_j


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = torch.nn.Linear(9, 12)
        self.convs = torch.nn.ModuleList([EdgeWeighted(12, 12) for _ in range(2)])
        self.norms = torch.nn.ModuleList([BatchNorm(12) for _ in range(2)])
        self.att = GATv2Conv(12, 4, heads=2, concat=False)

    def forward(self, x, edge_index):
        x = self.enter(x)
        for conv, norm in zip(self.convs, self.norms):
            x = x + F.dropout(norm(conv(x, edge_index)).relu(), 0.2, self.training)
        return self.att(x, edge_index)


rng = np.random.RandomState(4)
torch.manual_seed(4)
data = Data(
    x=torch.from_numpy(rng.rand(48, 9)),
    edge_index=torch.from_numpy(rng.randint(0, 48, (2, 190))),
    y=torch.from_numpy(rng.randint(0, 4, 48)),
)
data = T.RandomNodeSplit(num_val=8, num_test=12)(data)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
for epoch in range(5):
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask], label_smoothing=0.1)
    loss.backward()
    optimizer.step()
    scheduler.step()
    model.eval()
    pred = model(data.x, data.edge_index).argmax(dim=1)
    accs = [
        int((pred[mask] == data.y[mask]).sum()) / int(mask.sum())
        for mask in (data.train_mask, data.val_mask, data.test_mask)
    ]
    lr = scheduler.get_last_lr()[0]
    print("Epoch {:d}, lr {:.5f}, loss {:.6f}, {}".format(epoch, lr, loss.item(), accs))  # noqa: UP032
