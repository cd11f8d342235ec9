"""Attention, early stopping on a copy of the best model and on its file, and logs."""

import copy
import logging

import dgl
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from dgl.nn import GATConv

logging.basicConfig(filename="train.log", level=logging.INFO, format="%(message)s", force=True)
torch.manual_seed(1)
np.random.seed(1)
dgl.seed(1)


class EarlyStopping:
    def __init__(self, patience=10):
        self.patience = patience
        self.counter = 0
        self.best_score = None
        self.best_model = None
        self.early_stop = False

    def step(self, loss, model):
        if self.best_score is None or loss < self.best_score:
            self.best_score = loss
            self.save_checkpoint(model)
            self.counter = 0
        else:
            self.counter += 1
            logging.info("EarlyStopping counter: %d out of %d", self.counter, self.patience)
            if self.counter >= self.patience:
                self.early_stop = True
        return self.early_stop

    def save_checkpoint(self, model):
        self.best_model = copy.deepcopy(model)
        torch.save(model.state_dict(), "es_checkpoint.pt")


class GAT(nn.Module):
    def __init__(self, in_size, hid_size, out_size, heads):
        super().__init__()
        self.gat_layers = nn.ModuleList()
        self.gat_layers.append(
            GATConv(in_size, hid_size, heads[0], feat_drop=0.2, attn_drop=0.2, activation=F.elu)
        )
        self.gat_layers.append(
            GATConv(hid_size * heads[0], out_size, heads[1], attn_drop=0.2, residual=True)
        )

    def forward(self, g, inputs):
        h = inputs
        for i, layer in enumerate(self.gat_layers):
            h = layer(g, h)
            h = h.mean(1) if i == 1 else h.flatten(1)
        return h


def evaluate(g, features, labels, mask, model):
    model.eval()
    with torch.no_grad():
        logits = model(g, features)
        loss = F.cross_entropy(logits[mask], labels[mask]).item()
        _, indices = torch.max(logits[mask], dim=1)
        correct = torch.sum(indices == labels[mask])
        return loss, correct.item() * 1.0 / len(labels[mask])


n = 50
g = dgl.graph((np.random.randint(0, n, 250), np.random.randint(0, n, 250)), num_nodes=n)
g = dgl.add_self_loop(dgl.remove_self_loop(g))
features = torch.randn(n, 6)
labels = features[:, :3].argmax(1)
index = torch.randperm(n)
train_mask, val_mask = index[:25], index[25:38]
test_mask = torch.zeros(n, dtype=torch.bool)
test_mask[index[38:]] = True
g.ndata["feat"], g.ndata["label"], g.ndata["test_mask"] = features, labels, test_mask

model = GAT(features.shape[1], 4, 3, heads=[2, 1])
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2, weight_decay=5e-4)
stopper = EarlyStopping(patience=4)
log = open("losses.csv", "w")
print("epoch,loss,val_loss,val_acc", file=log)
for epoch in range(30):
    model.train()
    logits = model(g, g.ndata["feat"])
    loss = F.cross_entropy(logits[train_mask], g.ndata["label"][train_mask])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    val_loss, acc = evaluate(g, g.ndata["feat"], g.ndata["label"], val_mask, model)
    print(f"{epoch},{loss.item():.8f},{val_loss:.8f},{acc:.4f}", file=log)
    if stopper.step(val_loss, model):
        print("stopped in epoch", epoch)
        break
log.close()

restored = GAT(features.shape[1], 4, 3, heads=[2, 1])
restored.load_state_dict(torch.load("es_checkpoint.pt", weights_only=True))
for best in (restored, stopper.best_model):
    loss, acc = evaluate(g, g.ndata["feat"], g.ndata["label"], g.ndata["test_mask"], best)
    print(f"Test loss {loss:.8f}, accuracy {acc:.4f}, best validation {stopper.best_score:.8f}")
logging.shutdown()
for name in ("losses.csv", "train.log"):
    with open(name) as file:
        print(file.read())
