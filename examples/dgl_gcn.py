"""Node classification with a two-layer GCN of DGL, full batch."""

import torch
import torch.nn.functional as F
from dgl.nn import GraphConv
from torch import Tensor

import dgl_training


class GCN(torch.nn.Module):
    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int):
        super().__init__()
        self.conv1 = GraphConv(in_channels, hidden_channels)
        self.conv2 = GraphConv(hidden_channels, out_channels)

    def forward(self, graph, x: Tensor) -> Tensor:
        x = F.dropout(x, p=0.5, training=self.training)
        x = self.conv1(graph, x).relu()
        x = F.dropout(x, p=0.5, training=self.training)
        return self.conv2(graph, x)


args = dgl_training.arguments(__doc__, epochs=100)
graph, num_classes = dgl_training.load(args)
model = GCN(graph.ndata["x"].shape[1], args.hidden_channels, num_classes)
dgl_training.full_batch(graph, model, lambda: model(graph, graph.ndata["x"]), args)
