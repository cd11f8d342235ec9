"""Links as in DGL's guide: own messages, a predictor on edges, negative edges, AUC."""

import itertools

import dgl
import dgl.function as fn
import numpy as np
import scipy.sparse as sp
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score

torch.manual_seed(3)
np.random.seed(3)
dgl.seed(3)

n = 50
pairs = np.unique(np.random.randint(0, n, (300, 2)), axis=0)
g = dgl.graph((pairs[:, 0], pairs[:, 1]), num_nodes=n)
g.ndata["feat"] = torch.randn(n, 6)

u, v = g.edges()
eids = np.random.permutation(np.arange(g.num_edges()))
test_size = int(len(eids) * 0.1)
test_pos_u, test_pos_v = u[eids[:test_size]], v[eids[:test_size]]
train_pos_u, train_pos_v = u[eids[test_size:]], v[eids[test_size:]]

adj = sp.coo_matrix((np.ones(len(u)), (u.numpy(), v.numpy())), shape=(n, n))
neg_u, neg_v = np.where(1 - adj.todense() - np.eye(n) > 0)
neg_eids = np.random.choice(len(neg_u), g.num_edges())
test_neg_u, test_neg_v = neg_u[neg_eids[:test_size]], neg_v[neg_eids[:test_size]]
train_neg_u, train_neg_v = neg_u[neg_eids[test_size:]], neg_v[neg_eids[test_size:]]

train_g = dgl.remove_edges(g, eids[:test_size])
train_pos_g = dgl.graph((train_pos_u, train_pos_v), num_nodes=n)
train_neg_g = dgl.graph((train_neg_u, train_neg_v), num_nodes=n)
test_pos_g = dgl.graph((test_pos_u, test_pos_v), num_nodes=n)
test_neg_g = dgl.graph((test_neg_u, test_neg_v), num_nodes=n)


class WeightedSAGEConv(nn.Module):
    def __init__(self, in_feat, out_feat):
        super().__init__()
        self.linear = nn.Linear(in_feat * 2, out_feat)
        self.gate = nn.Linear(in_feat * 2, 1)

    def message(self, edges):
        gate = torch.sigmoid(self.gate(torch.cat([edges.src["h"], edges.dst["h"]], 1)))
        return {"m": edges.src["h"] * gate}

    def forward(self, g, h):
        with g.local_scope():
            g.ndata["h"] = h
            g.update_all(self.message, fn.mean("m", "h_neigh"))
            return self.linear(torch.cat([h, g.ndata["h_neigh"]], dim=1))


class GraphSAGE(nn.Module):
    def __init__(self, in_feats, h_feats):
        super().__init__()
        self.conv1 = WeightedSAGEConv(in_feats, h_feats)
        self.conv2 = WeightedSAGEConv(h_feats, h_feats)

    def forward(self, g, in_feat):
        return self.conv2(g, F.relu(self.conv1(g, in_feat)))


class MLPPredictor(nn.Module):
    def __init__(self, h_feats):
        super().__init__()
        self.W1 = nn.Linear(h_feats * 2, h_feats)
        self.W2 = nn.Linear(h_feats, 1)

    def apply_edges(self, edges):
        h = torch.cat([edges.src["h"], edges.dst["h"]], 1)
        return {"score": self.W2(F.relu(self.W1(h))).squeeze(1)}

    def forward(self, g, h):
        with g.local_scope():
            g.ndata["h"] = h
            g.apply_edges(self.apply_edges)
            return g.edata["score"]


def compute_loss(pos_score, neg_score):
    scores = torch.cat([pos_score, neg_score])
    labels = torch.cat([torch.ones(pos_score.shape[0]), torch.zeros(neg_score.shape[0])])
    return F.binary_cross_entropy_with_logits(scores, labels)


def compute_auc(pos_score, neg_score):
    scores = torch.cat([pos_score, neg_score]).numpy()
    labels = torch.cat([torch.ones(pos_score.shape[0]), torch.zeros(neg_score.shape[0])]).numpy()
    return roc_auc_score(labels, scores)


model, pred = GraphSAGE(train_g.ndata["feat"].shape[1], 8), MLPPredictor(8)
optimizer = torch.optim.Adam(itertools.chain(model.parameters(), pred.parameters()), lr=0.01)
for e in range(8):
    h = model(train_g, train_g.ndata["feat"])
    pos_score, neg_score = pred(train_pos_g, h), pred(train_neg_g, h)
    loss = compute_loss(pos_score, neg_score)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"In epoch {e}, loss: {loss:.8f}")
with torch.no_grad():
    pos_score, neg_score = pred(test_pos_g, h), pred(test_neg_g, h)
    print("AUC", compute_auc(pos_score, neg_score))
