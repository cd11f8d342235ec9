"""Runs the kernels under AddressSanitizer and UndefinedBehaviorSanitizer.

Needs a process with both preloaded; test_sanitized.py starts it. Planted mistakes end their
process, so each has one.
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch

from tests.native.cases import normal
from tests.simt.cases import gatv2_reference, graphs, head_inputs
from tests.simt.library import Emulator

PLANTED = {
    "shared_overrun": "heap-buffer-overflow",
    "global_overrun": "heap-buffer-overflow",
    "misaligned_load": "misaligned address",
}


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


def main() -> None:
    emulator = Emulator(sys.argv[1])
    for name, finding in PLANTED.items():
        survived, report = run_planted(emulator, name, bug=False)
        assert survived and finding not in report, f"{name} without its mistake: {report}"
        survived, report = run_planted(emulator, name, bug=True)
        # Only AddressSanitizer calls back to say which thread it was.
        where = f"kernel {name}, block (0,0,0), thread (" if "overflow" in finding else name
        assert not survived and finding in report and where in report, f"{name}: {report}"
    for name, (rows, edges) in graphs().items():
        if name == "hub":  # slow, and "cut" has long rows too
            continue
        for dtype in (torch.float32, torch.bfloat16):
            weight = normal(edges.shape[1], dtype=dtype)
            for heads, width in ((1, 7), (2, 16), (1, 64)):
                inputs = head_inputs(rows, heads, width, dtype, edge_dim=heads - 1)
                out, _, _ = emulator.gatv2(rows, inputs, 0.2, weights=True)
                expected, _, _ = gatv2_reference(edges, inputs, 0.2)
                torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
                emulator.spmm(rows, normal(rows.num_cols, width, dtype=dtype), weight)
    print("no error found")


if __name__ == "__main__":
    main()
