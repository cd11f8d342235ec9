"""Labels spread without training, and the predictions of a perceptron corrected and smoothed."""

import torch
import torch_geometric.transforms as T
from torch_geometric.data import Data
from torch_geometric.nn import MLP, CorrectAndSmooth, LabelPropagation

torch.manual_seed(6)
n = 40
data = Data(
    x=torch.randn(n, 5), y=torch.randint(0, 3, (n,)), edge_index=torch.randint(0, n, (2, 200))
)
data = T.RandomNodeSplit(num_val=8, num_test=8)(data)
out = LabelPropagation(num_layers=3, alpha=0.9)(data.y, data.edge_index, mask=data.train_mask)
print("label propagation:", (out.argmax(-1) == data.y)[data.test_mask].double().mean().item())

model = MLP([5, 16, 3], dropout=0.2, norm=None)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
for epoch in range(5):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(
        model(data.x)[data.train_mask], data.y[data.train_mask]
    )
    loss.backward()
    optimizer.step()
    scheduler.step()
    print(f"{epoch} {loss.item():.6f} {scheduler.get_last_lr()[0]:.6f}")

model.eval()
post = CorrectAndSmooth(3, 0.8, 3, 0.7, autoscale=False, scale=1.0)
soft = model(data.x).softmax(dim=-1).detach()
soft = post.correct(soft, data.y[data.train_mask], data.train_mask, data.edge_index)
soft = post.smooth(soft, data.y[data.train_mask], data.train_mask, data.edge_index)
for split in ("train", "val", "test"):
    mask = data[f"{split}_mask"]
    acc = int((soft.argmax(-1)[mask] == data.y[mask]).sum()) / int(mask.sum())
    print(f"{split}: {acc:.4f}", f"{soft[mask].sum().item():.6f}")
