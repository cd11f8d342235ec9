"""Gradients of gradients, saliency of features, and a Hessian times a vector."""

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, GraphConv

torch.manual_seed(4)
n = 40
data = Data(
    x=torch.randn(n, 6), y=torch.randint(0, 3, (n,)), edge_index=torch.randint(0, n, (2, 200))
)


class Critic(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(6, 8), GraphConv(8, 3)

    def forward(self, x, edge_index):
        return self.conv2(torch.tanh(self.conv1(x, edge_index)), edge_index)


model = Critic()
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
for epoch in range(4):
    x = data.x.clone().requires_grad_()
    out = model(x, data.edge_index)
    (grad,) = torch.autograd.grad(
        out, x, grad_outputs=torch.ones(out.size()), create_graph=True, retain_graph=True
    )
    penalty = ((grad.norm(2, dim=1) - 1) ** 2).mean()
    loss = F.cross_entropy(out, data.y) + 10 * penalty
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.6f} penalty {penalty.item():.6f}")

x = data.x.clone().detach().requires_grad_(True)
logits = model(x, data.edge_index)
node = 7
logits[node, logits[node].argmax()].backward()
saliency = x.grad.abs().sum(dim=1)
print("most salient:", saliency.topk(3).indices.tolist(), f"{saliency.max().item():.6f}")

params = list(model.parameters())
loss = F.cross_entropy(model(data.x, data.edge_index), data.y)
grads = torch.autograd.grad(loss, params, create_graph=True)
product = sum((g * torch.ones_like(p)).sum() for g, p in zip(grads, params))
hvp = torch.autograd.grad(product, params)
print("hvp:", [f"{h.norm().item():.6f}" for h in hvp])
