"""Runs the kernels under AddressSanitizer and UndefinedBehaviorSanitizer.

Needs a process with both preloaded; test_sanitized.py starts it. Planted mistakes end their
process, so each has one.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections.abc import Callable

import torch
from torch import Tensor

from fastgraph import ops
from fastgraph.backends.base import Backend
from fastgraph.backends.registry import REGISTRY
from fastgraph.hookspecs import hookimpl, plugin_manager
from tests.graphs import Case, all_cases, cut_case
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

CALLS: dict[str, Callable[[New, Case, int], Tensor]] = {
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
    "head_scores": lambda new, c, width: ops.head_scores(
        new(c.num_src, 2, width), new(3, 2, width)
    ),
    "gatv2": lambda new, c, width: ops.gatv2(
        *(new(c.num_src, 2, width), new(c.num_dst, 2, width), new(1, 2, width), c.edge_index),
        edge=new(c.num_edges, 3),
        weight_edge=new(2, 3, width),
    )[0],
    "gat": lambda new, c, width: ops.gat(
        *(new(c.num_src, 2, width), new(c.num_src, 2), new(c.num_dst, 2), c.edge_index),
        score_edge=new(c.num_edges, 2),
    )[0],
    "attention": lambda new, c, width: ops.attention(
        *(new(c.num_dst, 2, width + 3), new(c.num_src, 2, width), new(c.num_src, 2, width)),
        c.edge_index,
        edge=new(c.num_edges, 3),
    )[0],
}
# A layout of single values and one of packs for each size of an element.
LAYOUTS = (
    (torch.float32, 7),
    (torch.float32, 64),
    (torch.float64, 12),
    (torch.bfloat16, 33),
    (torch.float16, 40),
)
# Every graph but the hub, which takes long; long rows in every layout.
GIVEN = [
    *((case, *layout) for case in all_cases() if case.name != "hub" for layout in LAYOUTS[:2]),
    *((cut_case(), *layout) for layout in LAYOUTS),
]


def run_planted(emulator: Emulator, name: str, bug: bool) -> tuple[bool, str]:
    """Whether a child survives it, and what it says."""
    with tempfile.TemporaryFile() as log:
        child = os.fork()
        if child == 0:
            os.dup2(log.fileno(), 2)
            emulator.planted(name, bug)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        log.seek(0)
        return status == 0, log.read().decode()


def check_that_planted_mistakes_are_found(emulator: Emulator) -> None:
    for name, finding in PLANTED.items():
        survived, report = run_planted(emulator, name, bug=False)
        assert survived and finding not in report, f"{name} without its mistake: {report}"
        survived, report = run_planted(emulator, name, bug=True)
        # Only AddressSanitizer calls back to say which thread it was.
        where = f"kernel {name}, block (0,0,0), thread (" if "overflow" in finding else name
        assert not survived and finding in report and where in report, f"{name}: {report}"


def results(backend: str, call: str, case: Case, dtype: torch.dtype, width: int) -> list[Tensor]:
    """The output of an operator and the gradients of its tensors."""
    leaves: list[Tensor] = []

    def new(*shape: int) -> Tensor:
        leaves.append(normal(*shape, dtype=dtype, seed=len(leaves)).requires_grad_())
        return leaves[-1]

    REGISTRY.select(backend)
    out = CALLS[call](new, case, width)
    grad = normal(*out.shape, dtype=dtype, seed=10)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def main() -> None:
    emulator = Emulator(sys.argv[1])
    check_that_planted_mistakes_are_found(emulator)

    class Plugin:
        @hookimpl
        def fastgraph_backends(self) -> list[Backend]:
            return [SimtBackend(lambda: emulator)]

    plugin_manager().register(Plugin())
    for call, (case, dtype, width) in itertools.product(CALLS, GIVEN):
        expected = results("cpu", call, case, dtype, width)
        found = results("simt", call, case, dtype, width)
        tolerance = 1e-4 + 4 * torch.finfo(dtype).eps
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    print(f"no error found in {len(CALLS) * len(GIVEN)} calls")


if __name__ == "__main__":
    main()
