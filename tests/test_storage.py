"""Results are tensors like torch's own, however large, whatever is done with their memory."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GATv2Conv, GCNConv, GroupAddRev, SAGEConv

import fastgraph
from fastgraph import ops
from tests.graphs import random_edges

WIDTH = 256
NODES = (1 << 23) // (4 * WIDTH) + 3  # 8 MiB and more: what other memory than torch's would be for
RING = torch.stack([torch.arange(NODES), (torch.arange(NODES) + 1) % NODES])


def _features() -> Tensor:
    return torch.randn(NODES, WIDTH)


def _heads(x: Tensor) -> Tensor:
    return x.view(NODES, 4, WIDTH // 4)


def _gradient(x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(ops.spmm(x, RING).square().sum(), x)[0]


def _layer(conv: torch.nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        with fastgraph.enabled(min_edges=0), torch.no_grad():
            out: Tensor = conv(x, RING)
            return out

    return run


RESULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "spmm": lambda x: ops.spmm(x, RING),
    "segment_reduce": lambda x: ops.segment_reduce(x, RING),
    "gatv2": lambda x: ops.gatv2(_heads(x), _heads(x), torch.ones(1, 4, WIDTH // 4), RING)[0],
    "gat": lambda x: ops.gat_with_scores(_heads(x), torch.ones(2, 4, WIDTH // 4), RING)[0],
    "attention": lambda x: ops.attention(_heads(x), _heads(x), _heads(x), RING)[0],
    "a gradient": _gradient,
    "GCNConv": _layer(GCNConv(WIDTH, WIDTH)),
    "SAGEConv": _layer(SAGEConv(WIDTH, WIDTH)),
    "GATv2Conv": _layer(GATv2Conv(WIDTH, WIDTH // 4, heads=4)),
}


@pytest.fixture(params=RESULTS)
def result(request: pytest.FixtureRequest) -> Tensor:
    out = RESULTS[request.param](_features())
    assert out.nbytes >= 1 << 23
    return out


def test_a_storage_can_be_freed_and_grow(result: Tensor) -> None:
    """As offloading and sharding do, and PyG's reversible layers."""
    expected, storage = result.clone(), result.untyped_storage()
    assert storage.resizable()
    size = storage.nbytes()
    storage.resize_(0)
    assert storage.nbytes() == 0
    storage.resize_(size)
    result.copy_(expected)
    assert torch.equal(result, expected)
    storage.resize_(2 * size)
    assert torch.equal(result, expected) and result.data_ptr() == storage.data_ptr()
    result.resize_(3, 5)


def test_copies_and_other_libraries(result: Tensor) -> None:
    expected = result.clone()
    assert not result.is_shared()
    for same in (
        copy.deepcopy(result),
        pickle.loads(pickle.dumps(result)),
        torch.from_numpy(np.asarray(result)),
        torch.from_dlpack(result),
        torch.frombuffer(bytearray(result.numpy().tobytes()), dtype=result.dtype).view_as(result),
    ):
        assert torch.equal(same, expected)
    array = result.numpy()
    array[0, 0] = 7
    assert (result[0, 0] == 7).all()


def test_sharing(result: Tensor) -> None:
    expected = result.clone()
    assert torch.equal(result.share_memory_(), expected) and result.is_shared()


def test_views_outlive_the_result() -> None:
    x = _features()
    out = ops.spmm(x, RING)
    view, array = out[:5].t(), out.numpy()[5:9]
    del out
    gc.collect()
    assert torch.equal(ops.spmm(x * 2, RING)[9], 2 * x[8])
    assert torch.equal(view, x.roll(1, 0)[:5].t())
    assert (array == x.roll(1, 0)[5:9].numpy()).all()


def test_freed_in_another_thread() -> None:
    gone: list[str] = []
    held = [ops.spmm(_features(), RING)]
    weakref.finalize(held[0], gone.append, threading.current_thread().name)
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert gone


def test_gradients_are_added_up_in_place() -> None:
    """Autograd does so where nothing else owns the storage of a gradient."""
    x = _features().requires_grad_()
    hidden = x * 1
    (grad,) = torch.autograd.grad((ops.spmm(hidden, RING) + ops.spmm(hidden, RING)).sum(), hidden)
    assert torch.equal(grad, torch.full_like(grad, 2))
    out = ops.spmm(x, RING)
    out.mul_(2).relu_()
    out.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, 2.0 * (x > 0))


def test_reversible_layers_free_their_inputs() -> None:
    edges = random_edges(NODES, NODES, 4 * NODES)
    conv = GroupAddRev(SAGEConv(WIDTH, WIDTH), num_groups=2)
    x = torch.randn(NODES, 2 * WIDTH)

    def run() -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        out = conv(leaf * 1, edges)
        value = out.detach().clone()  # the backward pass frees the output, too
        out.square().mean().backward()
        assert leaf.grad is not None
        return [value, leaf.grad]

    expected = run()
    with fastgraph.enabled(min_edges=0):
        for a, b in zip(run(), expected, strict=True):
            torch.testing.assert_close(a, b)
    assert fastgraph.status().row("SAGEConv").routed > 0
