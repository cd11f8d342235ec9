"""Node classification with a graph transformer out of DGL's built-in functions, full batch."""

import dgl.function as fn
import torch.nn.functional as F
from dgl.nn.functional import edge_softmax
from torch import Tensor, nn

import dgl_training


class Attention(nn.Module):
    """Dot-product attention over neighbours, written as in DGL's own examples."""

    def __init__(self, in_channels: int, channels: int, heads: int):
        super().__init__()
        self.query = nn.Linear(in_channels, heads * channels)
        self.key = nn.Linear(in_channels, heads * channels)
        self.value = nn.Linear(in_channels, heads * channels)
        self.shape = (-1, heads, channels)

    def forward(self, graph, x: Tensor) -> Tensor:
        with graph.local_scope():
            graph.ndata["q"] = self.query(x).view(self.shape)
            graph.ndata["k"] = self.key(x).view(self.shape)
            graph.ndata["v"] = self.value(x).view(self.shape)
            graph.apply_edges(fn.u_dot_v("k", "q", "score"))
            scores = graph.edata["score"] / self.shape[-1] ** 0.5
            graph.edata["a"] = edge_softmax(graph, scores)
            graph.update_all(fn.u_mul_e("v", "a", "m"), fn.sum("m", "out"))
            return graph.ndata["out"].flatten(1)


class GraphTransformer(nn.Module):
    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int, heads: int):
        super().__init__()
        self.attention1 = Attention(in_channels, hidden_channels // heads, heads)
        self.skip = nn.Linear(in_channels, hidden_channels)
        self.attention2 = Attention(hidden_channels, out_channels, 1)

    def forward(self, graph, x: Tensor) -> Tensor:
        x = F.dropout(x, p=0.5, training=self.training)
        x = F.elu(self.attention1(graph, x) + self.skip(x))
        x = F.dropout(x, p=0.5, training=self.training)
        return self.attention2(graph, x)


args = dgl_training.arguments(__doc__, epochs=30)
graph, num_classes = dgl_training.load(args)
model = GraphTransformer(graph.ndata["x"].shape[1], args.hidden_channels, num_classes, args.heads)
dgl_training.full_batch(graph, model, lambda: model(graph, graph.ndata["x"]), args)
