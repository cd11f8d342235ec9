"""Relations of users and items: a layer for each by ``HeteroGraphConv``, and learned embeddings."""

import dgl
import dgl.nn as dglnn
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(2)
np.random.seed(2)
dgl.seed(2)

n_users, n_items, n_follows, n_clicks, n_dislikes = 40, 25, 120, 150, 30
n_features, n_classes = 6, 4
follow_src, follow_dst = np.random.randint(0, n_users, (2, n_follows))
click_src = np.random.randint(0, n_users, n_clicks)
click_dst = np.random.randint(0, n_items, n_clicks)
dislike_src = np.random.randint(0, n_users, n_dislikes)
dislike_dst = np.random.randint(0, 3, n_dislikes)

graph = dgl.heterograph(
    {
        ("user", "follow", "user"): (follow_src, follow_dst),
        ("user", "followed-by", "user"): (follow_dst, follow_src),
        ("user", "click", "item"): (click_src, click_dst),
        ("item", "clicked-by", "user"): (click_dst, click_src),
        ("user", "dislike", "item"): (dislike_src, dislike_dst),
        ("item", "disliked-by", "user"): (dislike_dst, dislike_src),
    },
    num_nodes_dict={"user": n_users, "item": n_items},
)
graph.nodes["user"].data["feature"] = torch.randn(n_users, n_features)
graph.nodes["user"].data["label"] = torch.randint(0, n_classes, (n_users,))
graph.nodes["user"].data["train_mask"] = torch.zeros(n_users, dtype=torch.bool).bernoulli(0.6)
graph.edges["click"].data["label"] = torch.randint(1, 5, (n_clicks,)).to(
    graph.nodes["user"].data["feature"].dtype
)
print(graph.ntypes, graph.canonical_etypes, graph.num_edges("click"))


class RGCN(nn.Module):
    def __init__(self, in_feats, hid_feats, out_feats, rel_names):
        super().__init__()
        self.conv1 = dglnn.HeteroGraphConv(
            {
                rel: dglnn.GraphConv(in_feats, hid_feats, allow_zero_in_degree=True)
                for rel in rel_names
            },
            aggregate="sum",
        )
        self.conv2 = dglnn.HeteroGraphConv(
            {
                rel: dglnn.SAGEConv(hid_feats, out_feats, "pool" if "by" in rel else "mean")
                for rel in rel_names
            },
            aggregate="mean",
        )
        self.conv3 = dglnn.HeteroGraphConv(
            {
                rel: dglnn.GATConv(out_feats, out_feats, 2, allow_zero_in_degree=True)
                if rel.startswith("follow") or "by" in rel
                else dglnn.GINConv(nn.Linear(out_feats, 2 * out_feats), "max")
                for rel in rel_names
            },
            aggregate="sum",
        )

    def forward(self, graph, inputs):
        h = self.conv1(graph, inputs)
        h = {k: F.dropout(F.relu(v), 0.2, self.training) for k, v in h.items()}
        h = self.conv2(graph, h)
        return h, self.conv3(graph, h)


class ScorePredictor(nn.Module):
    def forward(self, graph, h, etype):
        with graph.local_scope():
            graph.ndata["h"] = h
            graph.apply_edges(dgl.function.u_dot_v("h", "h", "score"), etype=etype)
            return graph.edges[etype].data["score"]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(n_items, n_features)
        self.rgcn = RGCN(n_features, 8, 5, sorted(set(graph.etypes)))
        self.out = nn.Linear(10, n_classes)
        self.predictor = ScorePredictor()

    def forward(self, graph):
        inputs = {"user": graph.nodes["user"].data["feature"], "item": self.items.weight}
        h, last = self.rgcn(graph, inputs)
        return self.out(last["user"].flatten(1)), self.predictor(graph, h, "click").squeeze(-1)


model = Model()
opt = torch.optim.Adam(model.parameters(), lr=0.02)
labels = graph.nodes["user"].data["label"]
train_mask = graph.nodes["user"].data["train_mask"]
for epoch in range(6):
    model.train()
    logits, scores = model(graph)
    loss = F.cross_entropy(logits[train_mask], labels[train_mask])
    loss = loss + 0.1 * F.mse_loss(scores, graph.edges["click"].data["label"])
    opt.zero_grad()
    loss.backward()
    opt.step()
    model.eval()
    with torch.no_grad():
        pred = model(graph)[0].argmax(dim=1)
        acc = (pred[~train_mask] == labels[~train_mask]).sum().item() / int((~train_mask).sum())
    print(f"epoch {epoch} loss {loss.item():.8f} acc {acc:.4f}")
print(f"{model.items.weight.norm().item():.8f}")
