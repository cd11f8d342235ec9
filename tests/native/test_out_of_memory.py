"""Too little memory is an error like torch's own, at any point, and no end of the process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import forks

# Each kernel, forward and backward, at every limit from what the process has to what it needs.
SCRIPT = """
import gc, resource, sys
import torch
from fastgraph import ops
from fastgraph.graphs.memo import MEMO

torch.manual_seed(0)
torch.set_num_threads(2)
nodes, edges, heads, width = 3000, 90_000, 4, 64
index = torch.randint(nodes, (2, edges))
index[1, :30_000] = 7  # a row that is cut into pieces
x = torch.randn(nodes, heads * width, requires_grad=True)
h = x.detach().view(nodes, heads, width).clone().requires_grad_()
att = torch.randn(2, heads, width, requires_grad=True)
weight = torch.rand(edges, requires_grad=True)
edge = torch.randn(edges, 3, requires_grad=True)
project = torch.randn(heads, 3, width, requires_grad=True)
query = torch.randn(nodes, heads, width + 3, requires_grad=True)
calls = {
    "spmm": lambda: ops.spmm(x, index, weight),
    "mean": lambda: ops.spmm(x, index, reduce="mean"),
    "max": lambda: ops.segment_reduce(x, index),
    "winner": lambda: ops.segment_reduce(x, index, ties="winner"),
    "gcn": lambda: ops.gcn(x, index),
    "gatv2": lambda: ops.gatv2(h, h, att[:1], index, edge=edge, weight_edge=project)[0],
    "gat": lambda: ops.gat_with_scores(h, att, index, self_loops=nodes)[0],
    "attention": lambda: ops.attention(query, h, h, index, edge=edge)[0],
}
call = calls[sys.argv[1]]

def step():
    MEMO.clear()  # graphs are built anew, which takes memory, too
    out = call()
    out.square().sum().backward()
    return out.detach().double().sum().item()

expected = step()  # starts the threads and loads everything
for tensor in (x, h, att, weight, edge, project, query):
    tensor.grad = None
gc.collect()
errors, in_use = set(), int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
failures = successes = 0
for room in [*range(0, 32, 2), *range(32, 160, 16)]:  # MiB
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (room << 20), resource.RLIM_INFINITY))
    try:
        found = step()
    except torch.OutOfMemoryError as error:
        assert "working memory" in str(error), error
        failures += 1
    except RuntimeError as error:
        assert "can't allocate memory" in str(error), error
        failures += 1
    else:
        assert found == expected, (room, found, expected)
        successes += 1
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for tensor in (x, h, att, weight, edge, project, query):
        tensor.grad = None
assert step() == expected
assert failures > 0 and successes > 0, (failures, successes)
print("failed", failures, "times, then worked", successes, "times")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is kept on Linux")
@pytest.mark.parametrize(
    "operator", ["spmm", "mean", "max", "winner", "gcn", "gatv2", "gat", "attention"]
)
def test_every_kernel_at_every_limit(tmp_path: Path, operator: str) -> None:
    process = forks.python("-c", SCRIPT, operator, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("failed")
