"""Training whose optimizer steps are compiled, in several ways: each prints loss and graphs."""

import warnings

import torch
import torch._dynamo
from torch import Tensor
from torch_geometric.nn import GCNConv

warnings.simplefilter("ignore")
X, EDGES = torch.linspace(-1, 1, 80).view(20, 4), torch.arange(160).view(2, 80) % 19
KINDS = ("step", "whole")


def train(kind: str) -> Tensor:
    torch.manual_seed(5)
    conv = GCNConv(4, 2, normalize=False)
    optimizer = torch.optim.SGD(conv.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager") if kind == "step" else optimizer.step

    def once() -> Tensor:
        optimizer.zero_grad()
        loss = conv(X, EDGES).square().mean()
        loss.backward()
        step()
        return loss

    if kind == "whole":
        once = torch.compile(once, backend="eager")
    return [once().detach() for _ in range(3)][-1]


for kind in KINDS:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    loss = train(kind)
    counters = torch._dynamo.utils.counters
    print(kind, float(loss))
    print("graphs", counters["stats"]["unique_graphs"], sorted(counters["graph_break"].items()))
print("steps", 3 * len(KINDS))
