"""Regression of graphs by Graphormer with attention that takes turns.

::

    python examples/graph_transformers/graphs.py

Graphs are generated, of the size of molecules: trees with some rings. What is to be found is the
average distance of their nodes, which no node can see from its neighbours.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
import training
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.utils import to_undirected

from fastgraph.nn import Graphormer
from fastgraph.transforms import ShortestPaths

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
training.add_arguments(parser, epochs=20, warm_up=2)
parser.set_defaults(hops=8)
parser.add_argument("--graphs", type=int, default=640)
parser.add_argument("--batch-size", type=int, default=64)
args = parser.parse_args()
if args.graphs < 2:
    parser.error(
        f"--graphs: expected at least 2, one to train on and one to test, got {args.graphs}"
    )


def generated(draw: torch.Generator) -> Data:
    """A tree of 10 to 36 nodes of four kinds, with up to three edges more."""
    size = int(torch.randint(10, 37, (), generator=draw))
    children = torch.arange(1, size)
    chance = torch.rand(size - 1, generator=draw)
    parents = children - 1 - (chance * children.clamp(max=4)).long()
    more = torch.randint(size, (2, int(torch.randint(4, (), generator=draw))), generator=draw)
    index = to_undirected(torch.cat([torch.stack([parents, children]), more], dim=1))
    kinds = torch.randint(4, (size,), generator=draw)
    data = Data(x=F.one_hot(kinds, 4).float(), edge_index=index, num_nodes=size)
    data.y = ShortestPaths(longest=254)(data).distance.float().mean().view(1)
    return data


torch.manual_seed(args.seed)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
draw = torch.Generator().manual_seed(args.seed)
graphs = [generated(draw) for _ in range(args.graphs)]
tested = max(args.graphs // 5, 1)
train_graphs, test_graphs = graphs[tested:], graphs[:tested]
loader = DataLoader(train_graphs, args.batch_size, shuffle=True)
test_loader = DataLoader(test_graphs, args.batch_size)
model = Graphormer.slim(
    4,
    1,
    level="graph",
    hops=args.hops,
    schedule=training.schedule_of(args.period),
    attention_dropout=args.attention_dropout,
).to(device)
if args.checkpoint:
    training.keep_no_activations(model)
optimizer, scheduler = training.optimizer_of(model, args, steps_of_epoch=len(loader))


def error(data: Data) -> Tensor:
    """The mean absolute error."""
    data = data.to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
        out = model(data.x, data.edge_index, data.batch, data.num_graphs)
    return F.l1_loss(out.view(-1).float(), data.y)


def train() -> float:
    model.train()
    total = 0.0
    for data in loader:
        optimizer.zero_grad()
        loss = error(data)
        loss.backward()
        optimizer.step()
        scheduler.step()
        total += float(loss.detach()) * data.num_graphs
    return total / len(train_graphs)


@torch.no_grad()
def test() -> float:
    model.eval()
    return sum(float(error(data)) * data.num_graphs for data in test_loader) / len(test_graphs)


checkpoints = training.Checkpoints(args.keep, model, optimizer, scheduler)
for epoch in range(checkpoints.load().get("epoch", 0) + 1, args.epochs + 1):
    start = time.perf_counter()
    loss = train()
    print(
        f"Epoch: {epoch:03d}, Loss: {loss:.6f}, Test: {test():.4f}, "
        f"Time: {time.perf_counter() - start:.4f}s",
        flush=True,
    )
    checkpoints.save(epoch=epoch)
