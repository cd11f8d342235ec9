"""A script that trains three layers on a device that it names, as authors with a GPU have it."""

from __future__ import annotations

from pathlib import Path

from tests import forks
from tests.dist.test_scripts import LAUNCHED

NAMES = ("GCN", "GATv2", "Transformer")

TEXT = """
import contextlib, os, sys
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch_geometric.data import Data

@contextlib.contextmanager
def nobody_waits():
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")

device = torch.device(sys.argv[1])
# For what upstream's layers ask for, and for gloo, the host waits.
is_one_rank = device.type == "cuda" and os.environ.get("WORLD_SIZE") == "1"
torch.manual_seed(0)
n = 60
x, y, edges = torch.randn(n, 8), torch.randint(0, 4, (n,)), torch.randint(0, n, (2, 300))
data = Data(x=x, y=y, edge_index=edges).to(device)
layers = {
    "GCN": lambda i, o: gnn.GCNConv(i, o),
    "GATv2": lambda i, o: gnn.GATv2Conv(i, o, heads=2, concat=False),
    "Transformer": lambda i, o: gnn.TransformerConv(i, o, heads=2, concat=False),
}
for name, layer in layers.items():
    torch.manual_seed(1)
    first, second = (layer(i, o).to(device) for i, o in ((8, 16), (16, 4)))
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    losses = []
    for step in range(12):
        is_quiet = is_one_rank and step >= 9  # in step 8 ranks compare once more
        with nobody_waits() if is_quiet else contextlib.nullcontext():
            optimizer.zero_grad()
            x = F.dropout(first(data.x, data.edge_index).relu(), 0.3)
            loss = F.cross_entropy(second(x, data.edge_index), data.y)
            loss.backward()
            optimizer.step()
        losses.append(loss.detach())
    for loss in losses:
        print(name, f"{loss.item():.9f}")
"""


def losses(folder: Path, device: str, ranks: int, preamble: str = "") -> list[float]:
    """The losses that the script prints: of no rank, of one, or of several.

    Args:
        folder: in which it works, which is made.
        device: that it names.
        ranks: how many; 0: on one process, without fastgraph.
        preamble: goes before it.
    """
    folder.mkdir()
    (folder / "script.py").write_text(preamble + TEXT)
    if ranks:
        found = forks.launched(ranks, *LAUNCHED, "script.py", device, cwd=folder)
    else:
        done = forks.python("script.py", device, cwd=folder)
        assert done.returncode == 0, done.stderr
        found = done.stdout
    lines = [line.split() for line in found.splitlines() if line.startswith(NAMES)]
    return [float(loss) for _, loss in lines]
