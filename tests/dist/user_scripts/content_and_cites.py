"""A loader of text files, whose labels are a set of strings, and a sparse adjacency matrix."""

import numpy as np
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv


def encode_onehot(labels):
    classes = set(labels)
    classes_dict = {c: np.identity(len(classes))[i, :] for i, c in enumerate(classes)}
    return np.array(list(map(classes_dict.get, labels)), dtype=np.int32)


np.random.seed(3)
torch.manual_seed(3)
names = ["Neural_Networks", "Theory", "Genetic_Algorithms", "Rule_Learning", "Case_Based"]
with open("graph.content", "w") as file:
    for paper in range(40):
        words = " ".join(str(int(w)) for w in np.random.rand(6) > 0.5)
        file.write(f"p{paper} {words} {names[paper % 5]}\n")
with open("graph.cites", "w") as file:
    for a, b in np.random.randint(0, 40, (150, 2)):
        file.write(f"p{a} p{b}\n")

content = np.genfromtxt("graph.content", dtype=np.dtype(str))
features = sp.csr_matrix(content[:, 1:-1], dtype=np.float64)
labels = torch.LongTensor(np.where(encode_onehot(content[:, -1]))[1])
numbers = {paper: i for i, paper in enumerate(content[:, 0])}
cites = np.genfromtxt("graph.cites", dtype=np.dtype(str))
edges = np.array(list(map(numbers.get, cites.flatten()))).reshape(cites.shape)
adj = sp.coo_matrix((np.ones(len(edges)), (edges[:, 0], edges[:, 1])), shape=(40, 40))
adj = adj + adj.T.multiply(adj < adj.T) - adj.multiply(adj < adj.T)
adj = adj.tocoo()
rows = np.array(features.sum(1)).flatten()
features = sp.diags(1.0 / np.maximum(rows, 1)).dot(features)
data = Data(
    x=torch.from_numpy(np.array(features.todense())),
    y=labels,
    edge_index=torch.from_numpy(np.vstack((adj.row, adj.col)).astype(np.int64)),
)
idx_train, idx_val = torch.arange(20), torch.arange(20, 40)
conv1, conv2 = SAGEConv(6, 16), SAGEConv(16, int(labels.max()) + 1)
optimizer = torch.optim.SGD([*conv1.parameters(), *conv2.parameters()], lr=0.3, momentum=0.9)
for epoch in range(6):
    optimizer.zero_grad()
    out = conv2(F.relu(conv1(data.x, data.edge_index)), data.edge_index)
    loss = F.cross_entropy(out[idx_train], data.y[idx_train])
    acc = (out[idx_val].max(1)[1].type_as(data.y) == data.y[idx_val]).double().sum() / len(idx_val)
    loss.backward()
    nn.utils.clip_grad_norm_(conv1.parameters(), 0.5)
    optimizer.step()
    print(f"Epoch: {epoch + 1:04d}", f"loss: {loss.item():.6f}", f"acc: {acc.item():.4f}")
