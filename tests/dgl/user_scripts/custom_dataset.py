"""A dataset of one's own from CSV files, split at random when it is processed, kept as a file."""

import os

import dgl
import numpy as np
import pandas as pd
import torch
import torch.nn as nn
import torch.nn.functional as F
from dgl.data import DGLDataset
from dgl.data.utils import load_graphs, load_info, save_graphs, save_info
from dgl.nn import GraphConv

torch.manual_seed(0)
np.random.seed(0)
dgl.seed(0)

n = 60
if not os.path.exists("members.csv"):
    rng = np.random.RandomState(3)
    clubs = rng.choice(["Mr. Hi", "Officer", "Nobody"], n)
    pd.DataFrame({"Id": np.arange(n), "Club": clubs, "Age": rng.randint(15, 70, n)}).to_csv(
        "members.csv", index=False
    )
    pd.DataFrame(
        {"Src": rng.randint(0, n, 300), "Dst": rng.randint(0, n, 300), "Weight": rng.rand(300)}
    ).to_csv("interactions.csv", index=False)


class ClubDataset(DGLDataset):
    def __init__(self, **kwargs):
        super().__init__(name="club", raw_dir=".", save_dir="saved", **kwargs)

    def process(self):
        nodes, edges = pd.read_csv("members.csv"), pd.read_csv("interactions.csv")
        ages = torch.from_numpy(nodes["Age"].to_numpy()).to(torch.get_default_dtype())
        labels = torch.from_numpy(nodes["Club"].astype("category").cat.codes.to_numpy()).long()
        src = torch.from_numpy(edges["Src"].to_numpy())
        dst = torch.from_numpy(edges["Dst"].to_numpy())
        self.graph = dgl.graph((src, dst), num_nodes=nodes.shape[0])
        self.graph.ndata["feat"] = torch.cat([ages[:, None] / 100, torch.randn(n, 4)], 1)
        self.graph.ndata["label"] = labels
        self.graph.edata["weight"] = torch.from_numpy(edges["Weight"].to_numpy()).to(ages)
        n_train, n_val = int(n * 0.6), int(n * 0.2)
        order = np.random.permutation(n)
        for name, part in (
            ("train_mask", order[:n_train]),
            ("val_mask", order[n_train : n_train + n_val]),
            ("test_mask", order[n_train + n_val :]),
        ):
            mask = torch.zeros(n, dtype=torch.bool)
            mask[part] = True
            self.graph.ndata[name] = mask
        self.num_classes = int(labels.max()) + 1

    def save(self):
        os.makedirs(self.save_path, exist_ok=True)
        save_graphs(os.path.join(self.save_path, "graph.bin"), [self.graph])
        save_info(os.path.join(self.save_path, "info.pkl"), {"num_classes": self.num_classes})

    def load(self):
        graphs, _ = load_graphs(os.path.join(self.save_path, "graph.bin"))
        self.graph = graphs[0]
        self.num_classes = load_info(os.path.join(self.save_path, "info.pkl"))["num_classes"]

    def has_cache(self):
        return os.path.exists(os.path.join(self.save_path, "graph.bin"))

    def __getitem__(self, i):
        return self.graph

    def __len__(self):
        return 1


class GCN(nn.Module):
    def __init__(self, in_feats, h_feats, num_classes):
        super().__init__()
        self.conv1 = GraphConv(in_feats, h_feats, allow_zero_in_degree=True)
        self.conv2 = GraphConv(h_feats, num_classes, allow_zero_in_degree=True)
        self.dropout = nn.Dropout(0.5)

    def forward(self, g, in_feat):
        h = F.relu(self.conv1(g, in_feat, edge_weight=g.edata["weight"]))
        return self.conv2(g, self.dropout(h))


def train(g, model):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    best_val_acc = best_test_acc = 0
    features, labels = g.ndata["feat"], g.ndata["label"]
    train_mask, val_mask = g.ndata["train_mask"], g.ndata["val_mask"]
    test_mask = g.ndata["test_mask"]
    for e in range(8):
        logits = model(g, features)
        pred = logits.argmax(1)
        loss = F.cross_entropy(logits[train_mask], labels[train_mask])
        train_acc = (pred[train_mask] == labels[train_mask]).float().mean()
        val_acc = (pred[val_mask] == labels[val_mask]).float().mean()
        test_acc = (pred[test_mask] == labels[test_mask]).float().mean()
        if best_val_acc < val_acc:
            best_val_acc, best_test_acc = val_acc, test_acc
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(
            f"In epoch {e}, loss: {loss:.8f}, train acc: {train_acc:.3f}, val acc: {val_acc:.3f} "
            f"(best {best_val_acc:.3f}), test acc: {test_acc:.3f} (best {best_test_acc:.3f})"
        )


for attempt in ("processed", "loaded", "processed again"):
    dataset = ClubDataset(force_reload=attempt.endswith("again"))
    g = dataset[0]
    print(attempt, g.num_nodes(), g.num_edges(), dataset.num_classes)
    train(g, GCN(g.ndata["feat"].shape[1], 16, dataset.num_classes))
