"""A training that is written for ranks: shards, a checkpoint after each epoch, measured balance.

A graph is cut once, and trained as often as it takes; started like this, ranks that die are
started again, and go on from the last checkpoint::

    python -m fastgraph partition graph.pt -k 2 --out shards --plot parts.svg
    python -m fastgraph.dist --nproc-per-node 2 --max-restarts 3 examples/dist/train.py shards

The graph has ``x``, ``y`` with a class for each node, and ``edge_index``; nodes outside of
``train_mask``, if there is one, are not trained on.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch_geometric.nn import GraphSAGE

import fastgraph
import fastgraph.dist as fgd

WARM_UP, MEASURED = 2, 3
"""Epochs that make plans and choose kernels, and those that are measured after them."""

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("shards", type=Path)
parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
parser.add_argument("--epochs", type=int, default=100)
parser.add_argument("--hidden-channels", type=int, default=64)
parser.add_argument("--plot", help="a file for what ranks take")
args = parser.parse_args()

fastgraph.enable()
world = fgd.init()
torch.manual_seed(0)
data = fgd.load_shards(args.shards)  # of which each rank maps its part into memory
mask = data.train_mask if "train_mask" in data else torch.ones_like(data.y, dtype=torch.bool)
model = GraphSAGE(data.num_features, args.hidden_channels, 2, int(data.y.max()) + 1, dropout=0.5)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = fgd.load(args.checkpoints, model, optimizer, missing_ok=True) or []


def train() -> None:
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[mask], data.y[mask])
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    fgd.save(args.checkpoints, model, optimizer, extra=losses)
    if world.rank == 0:
        print(f"Epoch: {len(losses):03d}, Loss: {losses[-1]:.6f}", flush=True)


left = range(len(losses), args.epochs)
for _ in left[:WARM_UP]:
    train()
if len(left) >= WARM_UP + MEASURED:
    with fgd.measured(data, epochs=MEASURED) as balance:
        for _ in range(MEASURED):
            train()
    if args.plot:
        balance.plot(args.plot)
    moved = fgd.rebalance(data, balance)  # if one takes much longer than the others
    if world.rank == 0:
        print(balance)
        print(f"Moved the rows of {moved.moved} tensors")
for _ in left[WARM_UP + MEASURED :]:
    train()
