"""Train LargeGT on the tokens of a folder that ``prepare.py`` has made; there is no graph.

One process, or several with one global batch::

    python examples/largegt/train.py data/tolokers
    torchrun --nproc-per-node 2 examples/largegt/train.py data/tolokers --batch-size 512

Both take the same steps, as 2 ranks with batches of 512 are one process with 1,024.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from metrics import accuracy_or_roc_auc
from settings import parsed
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Sampler

from fastgraph.nn import LargeGT
from fastgraph.pyg.token_loader import TokenLoader
from fastgraph.tokens import HopFeatures, TokenStore

TRAIN, VALID, TEST = range(3)

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("folder", type=Path)
parser.add_argument("--module", choices=["local", "global", "full"], default="full")
parser.add_argument("--variant", choices=["paper", "release"], default="paper")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=1024, help="of a rank")
parser.add_argument("--hidden-channels", type=int, default=128)
parser.add_argument("--heads", type=int, default=2)
parser.add_argument("--centroids", type=int, default=4096)
parser.add_argument("--dropout", type=float, default=0.5)
parser.add_argument("--encoder-dropout", type=float, default=0.3)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--cache", help='memory for the rows that are read most, such as "2GiB"')
parser.add_argument("--checkpoint", type=Path, help="a file for the model after the last epoch")
parser.add_argument("--seed", type=int, default=0)
args = parsed(parser)

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if "RANK" in os.environ:
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
group = dist.group.WORLD if dist.is_initialized() else None
rank, ranks = (dist.get_rank(), dist.get_world_size()) if group else (0, 1)


class Batches(Sampler[list[int]]):
    """Positions of input nodes: of each batch of all ranks the part of this one."""

    def __init__(self, count: int, shuffle: bool) -> None:
        self.count, self.shuffle, self.epoch = count, shuffle, 0

    def __iter__(self) -> Iterator[list[int]]:
        draw = torch.Generator().manual_seed(args.seed + self.epoch)
        order = (
            torch.randperm(self.count, generator=draw) if self.shuffle else torch.arange(self.count)
        )
        self.epoch += 1
        for batch in order.split(ranks * args.batch_size):
            mine = batch.tensor_split(ranks)[rank].tolist()
            if mine:  # the last batch may have fewer rows than there are ranks
                yield mine


store, features = TokenStore(args.folder / "tokens"), HopFeatures(args.folder / "context")
positions = torch.from_numpy(np.load(args.folder / "positions.npy", mmap_mode="c"))
y, split = (torch.from_numpy(np.load(args.folder / f"{name}.npy")) for name in ("y", "split"))
num_classes = int(y.max()) + 1
attributes = {"y": y, "positions": positions}
ids = [(split == part).nonzero().flatten() for part in (TRAIN, VALID, TEST)]


def loader(part: int) -> TokenLoader:
    options: dict[str, Any] = {"num_workers": args.workers, "cache": args.cache}
    batches = Batches(len(ids[part]), shuffle=part == TRAIN)
    return TokenLoader(
        *(store, ids[part]),
        features=features,
        attributes=attributes,
        batch_sampler=batches,
        **options,
    )


loaders = [loader(part) for part in (TRAIN, VALID, TEST)]
torch.manual_seed(args.seed)
largegt = LargeGT(
    features.channels,
    args.hidden_channels,
    num_classes,
    store.num_nodes,
    module=args.module,
    variant=args.variant,
    heads=args.heads,
    num_centroids=args.centroids,
    position_channels=positions.shape[1],
    dropout=args.dropout,
    encoder_dropout=args.encoder_dropout,
    process_group=group,
).to(device)
model = DistributedDataParallel(largegt) if group else largegt
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
torch.manual_seed(args.seed + rank)  # each rank drops other channels


def nothing() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The arguments and classes of no node, with which a rank takes part in a step."""
    tokens = torch.empty(0, (features.hops + 1) * store.k, features.channels)
    none = torch.empty(0, dtype=torch.int64)
    return tokens, positions[:0], none, none


def batches_of(part: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Arguments and classes of all batches, as many on each rank."""
    count = -(-len(ids[part]) // (ranks * args.batch_size))
    loaded = iter(loaders[part])
    for _ in range(count):
        batch = next(loaded, None)
        given = nothing() if batch is None else (batch.tokens, batch.positions, batch.n_id, batch.y)
        yield tuple(x.to(device, non_blocking=True) for x in given)


def train() -> float:
    model.train()
    total, left = 0.0, len(ids[TRAIN])
    for tokens, place, n_id, classes in batches_of(TRAIN):
        rows = min(left, ranks * args.batch_size)
        left -= rows
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens, place, n_id), classes, reduction="sum")
        # Gradients are means over ranks, of which each has the sum over its rows.
        (loss * (ranks / rows)).backward()
        optimizer.step()
        total += float(loss.detach())
    return sum(gathered(total)) / len(ids[TRAIN])


@torch.no_grad()
def test(part: int) -> float:
    largegt.eval()
    scores, classes = [], []
    for tokens, place, n_id, labels in batches_of(part):
        scores.append(largegt(tokens, place, n_id).cpu())
        classes.append(labels.cpu())
    found = gathered((torch.cat(scores), torch.cat(classes)))
    logits, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
    return accuracy_or_roc_auc(logits, labels)


def gathered(value: Any) -> list[Any]:
    """The values of all ranks."""
    found = [value] * ranks
    if group:
        dist.all_gather_object(found, value)
    return found


best_valid, test_then = -1.0, -1.0
for epoch in range(1, args.epochs + 1):
    start = time.perf_counter()
    loss = train()
    seconds = time.perf_counter() - start
    valid, final = test(VALID), test(TEST)
    if valid > best_valid:
        best_valid, test_then = valid, final
    if rank == 0:
        print(
            f"Epoch: {epoch:03d}, Loss: {loss:.6f}, Valid: {valid:.4f}, Test: {final:.4f}, "
            f"Time: {seconds:.4f}s",
            flush=True,
        )
state = largegt.full_state_dict()  # of all ranks
if rank == 0:
    if args.checkpoint:
        torch.save(state, args.checkpoint)
    print(f"Test where validation was best: {test_then:.4f}")
if group:
    dist.destroy_process_group()
