"""The check of kernels on the device, with the emulator in the place of one."""

from __future__ import annotations

import pytest
import torch

from fastgraph.verification.checking import check, operators
from tests.emulated import repeats_but
from tests.simt.backend import SimtBackend

ON_CPUS_ALONE = {"dense_attention", "edge_attention"}


@pytest.mark.parametrize("dtype", repeats_but([torch.float32], [torch.float32, torch.bfloat16]))
def test_kernels_for_gpus_pass(dtype: torch.dtype) -> None:
    found = list(check(SimtBackend(), torch.device("cpu"), [dtype]))
    assert [finding.operator for finding in found if finding.failure is not None] == []
    assert {finding.operator for finding in found} == set(operators()) - ON_CPUS_ALONE
