"""``fastgraph.dist`` on a GPU: tests/dist/test_device_scripts.py runs the same on a stand-in.

One rank has it through NCCL, and waits for nothing of ours in warm steps; two share it, and send
what is on it by gloo.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.dist import naming_device


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_on_a_gpu_have_the_losses_of_the_plain_script(
    gpu: torch.device, tmp_path: Path, ranks: int
) -> None:
    exact = "import torch; torch.backends.cuda.matmul.allow_tf32 = False\n"
    expected = naming_device.losses(tmp_path / "plain", "cuda", 0, exact)
    found = naming_device.losses(tmp_path / "ranks", "cuda", ranks, exact)
    assert len(expected) == 3 * 12
    assert found == pytest.approx(expected, rel=1e-4)
