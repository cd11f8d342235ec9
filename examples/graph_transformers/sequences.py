"""Classification of nodes of a graph that is too large for one sequence.

::

    python examples/graph_transformers/sequences.py
    python examples/graph_transformers/sequences.py --dataset Planetoid:PubMed --root data

Each step takes the union of some clusters, by PyG's ``ClusterData``, as one sequence of tokens, as
TorchGT does. Edges that leave it are lost: how many is printed. Degrees are those of the whole
graph. The graph is generated if no dataset is named.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
import training
from torch_geometric.data import Data
from torch_geometric.loader import ClusterData, ClusterLoader

import fastgraph
from fastgraph.transforms import AttentionPattern, Degrees

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_loading

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
data_loading.add_arguments(parser)
parser.set_defaults(dataset=None)
parser.add_argument("--nodes", type=int, default=4000, help="of a generated graph")
parser.add_argument("--clusters", type=int, default=32, help="of the graph")
parser.add_argument("--together", type=int, default=8, help="clusters of a sequence")
training.add_arguments(parser, epochs=30, warm_up=2)
args = parser.parse_args()

fastgraph.enable()  # which has METIS for `ClusterData`
torch.manual_seed(args.seed)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
given = args.dataset and data_loading.load(args.dataset, args.root)
data, num_classes = given or training.generated(args.nodes)
if args.clusters > data.num_nodes:
    parser.error(f"--clusters: expected at most {data.num_nodes}, as nodes, got {args.clusters}")
clusters = ClusterData(Degrees()(training.with_all_parts(data)), args.clusters)
ready = AttentionPattern(args.hops)
model = training.node_classifier(data, num_classes, args).to(device)
steps = -(-args.clusters // args.together)
optimizer, scheduler = training.optimizer_of(model, args, steps_of_epoch=steps)


def sequences(*, shuffle: bool) -> Iterator[Data]:
    """Unions of clusters, each with the pattern of attention of its own edges."""
    for sequence in ClusterLoader(clusters, batch_size=args.together, shuffle=shuffle):
        yield ready(sequence).to(device)


def train() -> tuple[float, int]:
    """The mean loss of the nodes to train on, and the edges that no sequence had."""
    model.train()
    total, nodes, edges = 0.0, 0, 0
    for sequence in sequences(shuffle=True):
        edges += sequence.num_edges
        mask = sequence.train_mask
        if not bool(mask.any()):
            continue
        optimizer.zero_grad()
        out = training.of_nodes(model, sequence, amp=args.amp)[mask].float()
        loss = F.cross_entropy(out, sequence.y[mask])
        loss.backward()
        optimizer.step()
        scheduler.step()
        total += float(loss.detach()) * int(mask.sum())
        nodes += int(mask.sum())
    return total / nodes, data.num_edges - edges


@torch.no_grad()
def test() -> list[float]:
    """The accuracy of each split, on sequences of consecutive clusters."""
    model.eval()
    correct, count = torch.zeros(3), torch.zeros(3)
    for sequence in sequences(shuffle=False):
        is_correct = training.of_nodes(model, sequence, amp=args.amp).argmax(dim=-1) == sequence.y
        for number, part in enumerate(("train", "val", "test")):
            mask = sequence[f"{part}_mask"]
            correct[number] += int(is_correct[mask].sum())
            count[number] += int(mask.sum())
    return (correct / count).tolist()


checkpoints = training.Checkpoints(args.keep, model, optimizer, scheduler)
before = checkpoints.load()
best = before.get("best", (0.0, 0.0))
for epoch in range(before.get("epoch", 0) + 1, args.epochs + 1):
    start = time.perf_counter()
    loss, lost = train()
    train_acc, val_acc, test_acc = test()
    best = max(best, (val_acc, test_acc), key=lambda found: found[0])
    print(
        f"Epoch: {epoch:03d}, Loss: {loss:.6f}, Train: {train_acc:.4f}, Val: {val_acc:.4f}, "
        f"Test: {test_acc:.4f}, Lost edges: {lost / max(data.num_edges, 1):.1%}, "
        f"Time: {time.perf_counter() - start:.4f}s",
        flush=True,
    )
    checkpoints.save(epoch=epoch, best=best)
print(f"Test accuracy at the best validation: {best[1]:.4f}")
