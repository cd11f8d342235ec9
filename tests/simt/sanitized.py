"""Runs planted mistakes and CALLS under AddressSanitizer and UndefinedBehaviorSanitizer.

Needs a process with both preloaded, which test_sanitized.py starts with the path of a library and
names of what to run. Planted mistakes end their process, so each has one of its own.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastgraph import ops
from fastgraph.backends import tasks
from fastgraph.hookspecs import hookimpl, plugin_manager
from fastgraph.registry.backend import Backend
from fastgraph.registry.registry import REGISTRY
from tests.graphs import Case, all_cases, cut_case, random_edges
from tests.native.cases import normal
from tests.simt.backend import SimtBackend
from tests.simt.library import Emulator

PLANTED = {
    "shared_overrun": "heap-buffer-overflow",
    "global_overrun": "heap-buffer-overflow",
    "misaligned_load": "misaligned address",
}

New = Callable[..., Tensor]
"""Makes a tensor of the given shape, for which a gradient is computed."""

OPTIONS: dict[str, Any] = {"dropout": 0.3, "seed": torch.tensor(5), "need_weights": True}

CALLS: dict[str, Callable[[New, Case, int], Tensor | tuple[Tensor | None, ...]]] = {
    "spmm": lambda new, c, width: ops.spmm(
        new(c.num_src, width), c.edge_index, new(c.num_edges), num_out=c.num_dst
    ),
    "mean": lambda new, c, width: ops.spmm(
        new(c.num_src, width), c.edge_index, num_out=c.num_dst, reduce="mean"
    ),
    "max": lambda new, c, width: ops.segment_reduce(
        new(c.num_src, width), c.edge_index, num_out=c.num_dst
    ),
    "winner": lambda new, c, width: ops.segment_reduce(
        new(c.num_src, width), c.edge_index, num_out=c.num_dst, reduce="min", ties="winner"
    ),
    # Where no gradient is wanted, no ties are recorded.
    "max_alone": lambda new, c, width: ops.segment_reduce(
        new(c.num_src, width).detach(), c.edge_index, num_out=c.num_dst
    ),
    "head_scores": lambda new, c, width: ops.head_scores(
        new(c.num_src, 2, width), new(3, 2, width)
    ),
    "gatv2": lambda new, c, width: ops.gatv2(
        *(new(c.num_src, 2, width), new(c.num_dst, 2, width)),
        *(new(1, 2, width) / width**0.5, c.edge_index),
        addend=new(1, 2, width),
    ),
    "gatv2_edges": lambda new, c, width: ops.gatv2(
        *(new(c.num_src, 2, width), new(c.num_dst, 2, width)),
        *(new(1, 2, width) / width**0.5, c.edge_index),
        edge=new(c.num_edges, 3),
        weight_edge=new(2, 3, width),
        **OPTIONS,
    ),
    "gat": lambda new, c, width: ops.gat(
        *(new(c.num_src, 2, width), new(c.num_src, 2), new(c.num_dst, 2), c.edge_index)
    ),
    "gat_edges": lambda new, c, width: ops.gat(
        *(new(c.num_src, 2, width), new(c.num_src, 2), new(c.num_dst, 2), c.edge_index),
        score_edge=new(c.num_edges, 2),
        **OPTIONS,
    ),
    "attention": lambda new, c, width: ops.attention(
        *(new(c.num_dst, 2, width), new(c.num_src, 2, width), new(c.num_src, 2, width)),
        c.edge_index,
        addend=new(c.num_dst, 2, width),
    ),
    # So many features of edges are whole packs of every dtype.
    "attention_edges": lambda new, c, width: ops.attention(
        *(new(c.num_dst, 2, width + 8), new(c.num_src, 2, width), new(c.num_src, 2, width)),
        c.edge_index,
        edge=new(c.num_edges, 8),
        **OPTIONS,
    ),
}
# Whole heads, of single values and of packs; the library has these layouts, and those of GIVEN.
LAYOUTS = ((torch.float32, 7), (torch.float32, 64), (torch.float64, 12), (torch.float16, 40))
# Every graph but the hub, which takes long, and those whose indices alone are of another kind.
CASES = [case for case in all_cases() if case.name not in ("int32", "strided", "hub")]
# With --repeats each graph meets both layouts; "cut", with the most kinds of rows, always does.
ONCE = list(zip(CASES, itertools.cycle(LAYOUTS[:2]), strict=False))
GIVEN = [
    *((cut_case(), layout) for layout in LAYOUTS),
    # Heads in two parts, of single values with a long row, and of packs.
    (Case("long", random_edges(9, 1, 260), 9, 1), (torch.bfloat16, 130)),
    (CASES[0], (torch.float32, 520)),
]


def run_planted(emulator: Emulator, name: str, bug: bool, portable: bool) -> tuple[bool, str]:
    """Whether a child survives it, and what it says."""
    with tempfile.TemporaryFile() as log:
        child = os.fork()
        if child == 0:
            os.dup2(log.fileno(), 2)
            emulator.planted(name, bug, portable=portable)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        log.seek(0)
        return status == 0, log.read().decode()


def check_that_planted_mistakes_are_found(emulator: Emulator) -> None:
    for name, portable in itertools.product(PLANTED, (False, True)):
        finding = PLANTED[name]
        survived, report = run_planted(emulator, name, False, portable)
        assert survived and finding not in report, f"{name} without its mistake: {report}"
        survived, report = run_planted(emulator, name, True, portable)
        # Only AddressSanitizer calls back to say which thread it was.
        where = f"kernel {name}, block (0,0,0), thread (" if "overflow" in finding else name
        assert not survived and finding in report and where in report, f"{name}: {report}"


def results(backend: str, call: str, case: Case, dtype: torch.dtype, width: int) -> list[Tensor]:
    """The outputs of an operator and the gradients of its tensors."""
    leaves: list[Tensor] = []

    def new(*shape: int) -> Tensor:
        leaves.append(normal(*shape, dtype=dtype, seed=len(leaves)).requires_grad_())
        return leaves[-1]

    REGISTRY.select(backend)
    out = CALLS[call](new, case, width)
    outputs = [t for t in ((out,) if isinstance(out, Tensor) else out) if t is not None]
    if not outputs[0].requires_grad:
        return outputs
    grads = [normal(*t.shape, dtype=dtype, seed=10) for t in outputs]
    return [*(t.detach() for t in outputs), *torch.autograd.grad(outputs, leaves, grads)]


def check(call: str, every_layout: bool) -> None:
    """Run an operator and its gradients, and compare them with those of the CPU."""
    graphs = itertools.product(CASES, LAYOUTS[:2]) if every_layout else ONCE
    given = [*graphs, *GIVEN]
    for case, (dtype, width) in given:
        expected = results("cpu", call, case, dtype, width)
        found = results("simt", call, case, dtype, width)
        tolerance = 1e-4 + 4 * torch.finfo(dtype).eps
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    print(f"{call}: no error found in {len(given)} calls")


def main() -> None:
    library, *names = sys.argv[1:]
    every_layout = "--repeats" in names
    emulator = Emulator(library)

    class Plugin:
        @hookimpl
        def fastgraph_backends(self) -> list[Backend]:
            return [SimtBackend(lambda: emulator)]

    plugin_manager().register(Plugin())
    tasks.SMALL = 600  # so that "cut" is cut like a large graph, and "long" like a small one
    for name in names:
        if name == "planted":
            check_that_planted_mistakes_are_found(emulator)
            print("planted: all mistakes found")
        elif name != "--repeats":
            check(name, every_layout)


if __name__ == "__main__":
    main()
