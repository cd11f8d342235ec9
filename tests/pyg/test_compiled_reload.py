"""Compiled code that torch reloads from its files in another process finds graphs of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fastgraph

PROGRAM = """
import torch
from torch._dynamo.utils import counters
from torch_geometric.nn import GATConv

import fastgraph

torch.manual_seed(0)
conv = GATConv(16, 8, heads=2, bias=False)
x, edges = torch.randn(30, 16, requires_grad=True), torch.randint(30, (2, 120))

def gradient(out):
    return torch.autograd.grad(out.square().sum(), x)[0]

expected = gradient(conv(x, edges))
with fastgraph.enabled(min_edges=0):
    compiled = torch.compile(conv)
    torch.testing.assert_close(gradient(compiled(x, edges)), expected)
    out = compiled(x, edges)
    fastgraph.clear_cache()
    edges.numpy()[:] = edges.flip(0).numpy()
    torch.testing.assert_close(gradient(out), expected)
print("reloaded" if counters["aot_autograd"]["autograd_cache_hit"] else "compiled")
"""


def test_a_second_process(tmp_path: Path) -> None:
    root = Path(fastgraph.__file__).parents[1]
    # Settings of the tests, such as a backend of theirs, mean nothing in another process.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FASTGRAPH_")}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root)}
    said = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=environment,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout.split()[-1]
        for _ in range(2)
    ]
    assert said == ["compiled", "reloaded"]
