"""Weights that are swapped for their mean to evaluate, steps of several batches, and LBFGS."""

import copy
import pickle

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GAT

torch.use_deterministic_algorithms(True)
torch.manual_seed(5)
n = 60
data = Data(
    x=torch.randn(n, 6), y=torch.randint(0, 4, (n,)), edge_index=torch.randint(0, n, (2, 300))
)
data.train_mask = torch.rand(n) < 0.6
model = GAT(6, 8, 2, 4, heads=2, dropout=0.3)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
mean = {name: p.clone() for name, p in model.state_dict().items()}
original = data.x.clone()
for epoch in range(4):
    data.x.copy_(original).add_(torch.randn_like(data.x), alpha=0.1)  # noise, in place
    for part in torch.randperm(n).chunk(3):
        loss = F.cross_entropy(model(data.x, data.edge_index)[part], data.y[part]) / 3
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for name, p in model.state_dict().items():
            mean[name].mul_(0.9).add_(p, alpha=0.1)
    kept = copy.deepcopy(model.state_dict())
    model.load_state_dict(mean)
    model.eval()
    with torch.no_grad():
        right = model(data.x, data.edge_index).argmax(-1) == data.y
    print(f"{epoch} {loss.item():.6f} {right[~data.train_mask].double().mean().item():.6f}")
    model.load_state_dict(kept)
    model.train()

model.eval()
finish = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")


def closure():
    finish.zero_grad()
    loss = F.cross_entropy(model(data.x, data.edge_index)[data.train_mask], data.y[data.train_mask])
    loss.backward()
    return loss


for _ in range(2):
    print(f"{finish.step(closure).item():.6f}")
result = pickle.dumps({"weights": [p.detach().numpy() for p in model.parameters()]})
print(f"{sum(float(w.sum()) for w in pickle.loads(result)['weights']):.6f}")
