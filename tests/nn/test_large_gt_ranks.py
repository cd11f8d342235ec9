"""Ranks with batches of M beside one process with a batch of all their rows, in float64."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forks

TRAINING = """
import sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from fastgraph.nn import LargeGT

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
NODES, ROWS = 41, 5

def make(group, **options):
    torch.manual_seed(0)
    sizes = dict(heads=2, num_centroids=7, position_channels=3)
    plain = dict(dropout=0.0, encoder_dropout=0.0)
    model = LargeGT(4, 8, 3, NODES, **sizes, **plain, **options, process_group=group)
    if options["variant"] == "release":
        # At first its centroids have norms of 1e5, of which differences keep few digits.
        model.global_module.codebook.ema_sizes.fill_(1)
    return model.double()

def gap(one, other):
    one, other = one.detach(), other.detach()
    assert one.shape == other.shape and one.dtype == other.dtype
    if not one.numel():
        return 0.0
    return float((one - other).abs().max() / other.abs().max().clamp(min=1))

def compare(**options):
    alone, ours = make(None, **options), make(dist.group.WORLD, **options)
    together = DistributedDataParallel(ours)
    # Not Adam, which makes steps of what rounding leaves of gradients that are zero.
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, together)]
    draw = torch.Generator().manual_seed(1)
    worst = 0.0
    # Of the third batch the last rank has fewer rows, of the fourth but one none.
    for step, rows in enumerate([ROWS * ranks, ROWS * ranks, ROWS * ranks - 2, 1, ROWS * ranks]):
        tokens = torch.randn(rows, 6, 4, generator=draw, dtype=torch.float64)
        positions = torch.randn(rows, 3, generator=draw, dtype=torch.float64)
        n_id = torch.randint(NODES, (rows,), generator=draw)
        y = torch.randint(3, (rows,), generator=draw)
        mine = slice(rank * ROWS, (rank + 1) * ROWS)
        expected = alone(tokens, positions, n_id)
        loss = F.cross_entropy(expected, y)
        out = together(tokens[mine], positions[mine], n_id[mine])
        share = F.cross_entropy(out, y[mine], reduction="sum") * ranks / rows
        worst = max(worst, gap(out, expected[mine]))
        for optimizer, value in zip(optimizers, (loss, share)):
            optimizer.zero_grad()
            value.backward()
        # Of the whole gradient: some have none but what rounding leaves.
        largest = max(float(p.grad.abs().max()) for p in alone.parameters())
        for one, other in zip(alone.parameters(), ours.parameters()):
            worst = max(worst, gap(other.grad / largest, one.grad / largest))
        for optimizer in optimizers:
            optimizer.step()
        for one, other in zip(alone.buffers(), ours.buffers()):
            worst = max(worst, gap(other, one))
    state = ours.full_state_dict()
    for name, value in alone.state_dict().items():
        if isinstance(value, Tensor):
            worst = max(worst, gap(state[name], value))
        else:
            assert torch.equal(state[name]["assigned"], value["assigned"])
            assert int((value["assigned"] >= 0).sum()) > 20
            share = ours.state_dict()[name]
            first = min(rank * -(-NODES // ranks), NODES)
            assert share["first"] == first
            assert len(share["assigned"]) == min(-(-NODES // ranks), NODES - first)
            make(dist.group.WORLD, **options).load_state_dict(ours.state_dict())
            try:
                make(None, **options).load_state_dict(ours.state_dict())
                raise SystemExit("a share of the assignments was taken for all")
            except ValueError as error:
                assert "full_state_dict" in str(error)
    make(None, **options).load_state_dict(state)
    make(dist.group.WORLD, **options).load_state_dict(state)
    return worst

for case in ("paper full batch", "paper global layer", "release full batch"):
    variant, module, norm = case.split()
    worst = compare(variant=variant, module=module, norm=norm)
    assert worst < 1e-10, (case, worst)
    if rank == 0:
        print("same", case, worst)

forgot = DistributedDataParallel(make(None, module="local", variant="paper"))
try:
    forgot(torch.zeros(2, 6, 4, dtype=torch.float64))
    raise SystemExit("a model without process_group was trained on ranks")
except ValueError as error:
    assert "process_group: expected that of DistributedDataParallel" in str(error)
forgot.eval()(torch.zeros(2, 6, 4, dtype=torch.float64))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_ranks_train_as_one_process(ranks: int, tmp_path: Path) -> None:
    """Predictions, gradients, parameters and codebook, with ranks that have fewer rows or none."""
    printed = forks.launched(ranks, "-c", TRAINING, cwd=tmp_path)
    assert printed.count("same") == 3, printed
