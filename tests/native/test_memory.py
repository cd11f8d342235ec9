"""Tensors that have no memory of their own, of which DLPack gives a null pointer."""

from __future__ import annotations

import pytest
import torch

from fastgraph import ops

pyg = pytest.importorskip("torch_geometric")


def test_subclasses_that_wrap_a_tensor_are_refused() -> None:
    x, index = torch.rand(4, 8), pyg.EdgeIndex([[0, 1, 2], [1, 2, 3]], sparse_size=(4, 4))
    for call in (
        lambda: ops.spmm(x, index),
        lambda: ops.segment_reduce(x, index, reduce="max"),
        lambda: ops.sddmm(x, x, index),
        lambda: ops.edge_softmax(torch.rand(3), index, num_out=4),
    ):
        with pytest.raises(TypeError, match="row must have memory of its own, got a tensor"):
            call()
    assert ops.spmm(x, index.as_tensor()).shape == (4, 8)
