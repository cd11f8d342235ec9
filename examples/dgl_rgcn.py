"""Node classification with a two-layer R-GCN of DGL, full batch: a matrix for each kind of edge."""

import torch
import torch.nn.functional as F
from dgl.nn import RelGraphConv
from torch import Tensor

import dgl_training


class RGCN(torch.nn.Module):
    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int, kinds: int):
        super().__init__()
        self.conv1 = RelGraphConv(in_channels, hidden_channels, kinds, "basis", 2)
        self.conv2 = RelGraphConv(hidden_channels, out_channels, kinds, "basis", 2)

    def forward(self, graph, x: Tensor, kinds: Tensor, norm: Tensor) -> Tensor:
        x = F.dropout(x, p=0.5, training=self.training)
        x = self.conv1(graph, x, kinds, norm).relu()
        x = F.dropout(x, p=0.5, training=self.training)
        return self.conv2(graph, x, kinds, norm)


args = dgl_training.arguments(__doc__, epochs=20)
graph, num_classes = dgl_training.load(args)
x, kinds = graph.ndata["x"], graph.edata["kind"]
norm = 1 / graph.in_degrees(graph.edges()[1]).unsqueeze(1)
model = RGCN(x.shape[1], args.hidden_channels, num_classes, int(kinds.max()) + 1)
dgl_training.full_batch(graph, model, lambda: model(graph, x, kinds, norm), args)
