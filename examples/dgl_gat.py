"""Node classification with a two-layer GAT of DGL, full batch."""

import torch
import torch.nn.functional as F
from dgl.nn import GATConv
from torch import Tensor

import dgl_training


class GAT(torch.nn.Module):
    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int, heads: int):
        super().__init__()
        self.conv1 = GATConv(in_channels, hidden_channels // heads, heads)
        self.conv2 = GATConv(hidden_channels, out_channels, 1)

    def forward(self, graph, x: Tensor) -> Tensor:
        x = F.dropout(x, p=0.5, training=self.training)
        x = F.elu(self.conv1(graph, x).flatten(1))
        x = F.dropout(x, p=0.5, training=self.training)
        return self.conv2(graph, x).squeeze(1)


args = dgl_training.arguments(__doc__, epochs=30)
graph, num_classes = dgl_training.load(args)
model = GAT(graph.ndata["x"].shape[1], args.hidden_channels, num_classes, args.heads)
dgl_training.full_batch(graph, model, lambda: model(graph, graph.ndata["x"]), args)
