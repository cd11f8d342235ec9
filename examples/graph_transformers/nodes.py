"""Classification of nodes by Graphormer with attention that takes turns.

::

    python examples/graph_transformers/nodes.py
    python examples/graph_transformers/nodes.py --dataset Planetoid:Cora --root data --hops 4

The graph is generated if no dataset is named. Rates, decay and dropout are those of TorchGT.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import training
from torch_geometric.transforms import Compose

from fastgraph.transforms import AttentionPattern, ClusterOrder, Degrees

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_loading

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
data_loading.add_arguments(parser)
parser.set_defaults(dataset=None)
parser.add_argument("--nodes", type=int, default=1200, help="of a generated graph")
training.add_arguments(parser, epochs=100, warm_up=5)
args = parser.parse_args()

torch.manual_seed(args.seed)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
given = args.dataset and data_loading.load(args.dataset, args.root)
data, num_classes = given or training.generated(args.nodes)
ready = Compose([ClusterOrder(), AttentionPattern(args.hops), Degrees()])
data = ready(training.with_all_parts(data)).to(device)
model = training.node_classifier(data, num_classes, args).to(device)
optimizer, scheduler = training.optimizer_of(model, args, steps_of_epoch=1)


def train() -> float:
    model.train()
    optimizer.zero_grad()
    out = training.of_nodes(model, data, amp=args.amp)[data.train_mask].float()
    loss = F.cross_entropy(out, data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    scheduler.step()
    return float(loss.detach())


@torch.no_grad()
def test() -> list[float]:
    model.eval()
    correct = training.of_nodes(model, data, amp=args.amp).argmax(dim=-1) == data.y
    return [
        float(correct[data[f"{part}_mask"]].float().mean()) for part in ("train", "val", "test")
    ]


checkpoints = training.Checkpoints(args.keep, model, optimizer, scheduler)
before = checkpoints.load()
best = before.get("best", (0.0, 0.0))
for epoch in range(before.get("epoch", 0) + 1, args.epochs + 1):
    start = time.perf_counter()
    loss = train()
    train_acc, val_acc, test_acc = test()
    best = max(best, (val_acc, test_acc), key=lambda found: found[0])
    print(
        f"Epoch: {epoch:03d}, Loss: {loss:.6f}, Train: {train_acc:.4f}, Val: {val_acc:.4f}, "
        f"Test: {test_acc:.4f}, Time: {time.perf_counter() - start:.4f}s",
        flush=True,
    )
    checkpoints.save(epoch=epoch, best=best)
print(f"Test accuracy at the best validation: {best[1]:.4f}")
