"""A dataset of one's own, split when it is processed, and trained with an averaged model."""

import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.nn import GCNConv


class Communities(InMemoryDataset):
    @property
    def processed_file_names(self):
        return "data.pt"

    def process(self):
        y = torch.randint(0, 3, (60,))
        edge_index = torch.randint(0, 60, (2, 400))
        edge_index = edge_index[
            :, (y[edge_index[0]] == y[edge_index[1]]) | (edge_index[0] % 3 == 0)
        ]
        data = Data(x=F.one_hot(y, 3) + torch.randn(60, 3), y=y, edge_index=edge_index)
        data = data if self.pre_transform is None else self.pre_transform(data)
        if self.root.endswith("saved"):
            self.save([data], self.processed_paths[0])
        else:
            torch.save(self.collate([data]), self.processed_paths[0])

    def __init__(self, root, pre_transform=None):
        super().__init__(root, pre_transform=pre_transform)
        if root.endswith("saved"):
            self.load(self.processed_paths[0])
        else:
            self.data, self.slices = torch.load(self.processed_paths[0], weights_only=False)


class EMA:
    def __init__(self, model, decay):
        self.model, self.decay = model, decay
        self.shadow = {k: p.data.clone() for k, p in model.named_parameters()}

    def update(self):
        for name, param in self.model.named_parameters():
            self.shadow[name] = self.decay * self.shadow[name] + (1 - self.decay) * param.data

    def apply_shadow(self):
        self.backup = {k: p.data for k, p in self.model.named_parameters()}
        for name, param in self.model.named_parameters():
            param.data = self.shadow[name]

    def restore(self):
        for name, param in self.model.named_parameters():
            param.data = self.backup[name]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = GCNConv(3, 8)
        self.conv2 = GCNConv(8, 3)

    def forward(self, data):
        x = F.dropout(self.conv1(data.x, data.edge_index).relu(), training=self.training)
        return self.conv2(x, data.edge_index).log_softmax(dim=-1)


for folder in ("saved", "collated"):
    torch.manual_seed(1)
    split = T.RandomNodeSplit(num_val=10, num_test=10)
    data = Communities(folder, pre_transform=split)[0]
    model = Net()
    ema = EMA(model, 0.9)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=5e-4)
    for epoch in range(1, 6):
        model.train()
        optimizer.zero_grad()
        loss = F.nll_loss(model(data)[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        ema.update()
        ema.apply_shadow()
        model.eval()
        pred = model(data).argmax(dim=-1)
        accs = [
            int((pred[mask] == data.y[mask]).sum()) / int(mask.sum())
            for _, mask in data("train_mask", "val_mask", "test_mask")
        ]
        ema.restore()
        print(f"Epoch: {epoch:03d}, Loss: {loss:.6f}, " + ", ".join(f"{a:.4f}" for a in accs))
