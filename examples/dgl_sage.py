"""Node classification with a two-layer GraphSAGE of DGL on sampled neighbours, in mini-batches.

With more than one thread DGL draws other neighbours in every run, and losses differ by that.
"""

import torch
import torch.nn.functional as F
from dgl.dataloading import DataLoader, NeighborSampler
from dgl.nn import SAGEConv
from torch import Tensor

import dgl_training


class GraphSAGE(torch.nn.Module):
    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int):
        super().__init__()
        self.conv1 = SAGEConv(in_channels, hidden_channels, "mean")
        self.conv2 = SAGEConv(hidden_channels, out_channels, "mean")

    def forward(self, graphs, x: Tensor) -> Tensor:
        x = F.dropout(x, p=0.5, training=self.training)
        x = self.conv1(graphs[0], x).relu()
        x = F.dropout(x, p=0.5, training=self.training)
        return self.conv2(graphs[1], x)


args = dgl_training.arguments(__doc__, epochs=10)
graph, num_classes = dgl_training.load(args)
model = GraphSAGE(graph.ndata["x"].shape[1], args.hidden_channels, num_classes)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
nodes = graph.ndata["train_mask"].nonzero().squeeze(1)
batches = DataLoader(graph, nodes, NeighborSampler([10, 10]), batch_size=1024, shuffle=True)


def epoch() -> float:
    model.train()
    total = 0.0
    for _, seeds, blocks in batches:
        optimizer.zero_grad()
        out = model(blocks, blocks[0].srcdata["x"])
        loss = F.cross_entropy(out, blocks[-1].dstdata["y"])
        loss.backward()
        optimizer.step()
        total += float(loss.detach()) * len(seeds)
    return total / len(nodes)


dgl_training.run(graph, model, epoch, lambda: model([graph, graph], graph.ndata["x"]), args.epochs)
