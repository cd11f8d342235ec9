from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import fastgraph
from fastgraph import ops, settings
from fastgraph.backends.memory import _SMALLEST, POOL, empty
from fastgraph.comparison.memory import release_freed

WIDTH = 256
NODES = _SMALLEST // (4 * WIDTH) + 3
RING = torch.stack([torch.arange(NODES), (torch.arange(NODES) + 1) % NODES])


@pytest.fixture(autouse=True)
def _empty_pool() -> Iterator[None]:
    gc.collect()
    POOL.clear()
    yield
    POOL.clear()


def _result(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features and a result as large as the pool takes."""
    x = torch.randn(NODES, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x, ops.spmm(x, RING)


def test_a_freed_result_makes_room_for_the_next() -> None:
    _, out = _result()
    address, size = out.data_ptr(), out.nbytes
    assert POOL.idle_bytes == 0
    del out
    assert size <= POOL.idle_bytes <= 1.125 * size
    x, again = _result(1)
    assert again.data_ptr() == address and POOL.idle_bytes == 0
    assert torch.equal(again, x.roll(1, 0))


def test_results_in_use_are_left_alone() -> None:
    (x, first), (y, second) = _result(0), _result(1)
    view = first[:5].t()
    del first
    z, third = _result(2)
    assert torch.equal(view, x.roll(1, 0)[:5].t())
    assert torch.equal(second, y.roll(1, 0)) and torch.equal(third, z.roll(1, 0))


def test_gradients_and_changes_in_place() -> None:
    x = torch.randn(NODES, WIDTH).requires_grad_()
    out = ops.spmm(x, RING)
    out.mul_(2).relu_()
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2.0 * (x > 0))


def test_gradients_are_added_up_in_place() -> None:
    x = torch.randn(NODES, WIDTH).requires_grad_()
    hidden = x * 1
    (grad,) = torch.autograd.grad((ops.spmm(hidden, RING) + ops.spmm(hidden, RING)).sum(), hidden)
    assert torch.equal(grad, torch.full_like(grad, 2))
    # The sum stands in the memory of one of the two gradients, which came from the pool.
    idle, size = POOL.idle_bytes, grad.nbytes
    del grad
    assert POOL.idle_bytes >= idle + size


def test_threads_share_the_pool() -> None:
    _, out = _result()
    held = [out]
    del out
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert POOL.idle_bytes > 0


def test_the_bound_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    results = [_result(seed)[1] for seed in range(3)]
    bound = int(2.5 * results[0].nbytes)
    monkeypatch.setattr(settings, "_current", settings.current().replace(reuse_bytes=bound))
    while results:
        results.pop()
        assert POOL.idle_bytes <= bound
    assert POOL.idle_bytes > bound // 2
    monkeypatch.setattr(settings, "_current", settings.current().replace(reuse_bytes=0))
    _result()
    assert POOL.idle_bytes == 0


def test_clear_cache_returns_the_memory() -> None:
    _result()
    assert POOL.idle_bytes > 0
    fastgraph.clear_cache()
    assert POOL.idle_bytes == 0


def test_a_measurement_of_memory_begins_without_idle_blocks() -> None:
    """What a warm-up has left would hide as much of what is measured."""
    _result()
    assert POOL.idle_bytes > 0
    release_freed()
    assert POOL.idle_bytes == 0


def test_blocks_of_about_the_same_size_are_shared() -> None:
    like = torch.empty(0)
    first = empty(like, (NODES, WIDTH))
    address = first.data_ptr()
    del first
    assert empty(like, (NODES + 5, WIDTH)).data_ptr() == address
    assert empty(like, (2 * NODES, WIDTH)).data_ptr() != address


def test_only_large_results_of_the_cpu_come_from_the_pool() -> None:
    assert empty(torch.empty(0), (3, 4), torch.int32).untyped_storage().resizable()
    large = empty(torch.empty(0, dtype=torch.bfloat16), (2 * NODES, WIDTH))
    assert not large.untyped_storage().resizable()
    assert (large.dtype, large.shape) == (torch.bfloat16, (2 * NODES, WIDTH))
    assert empty(torch.empty(0, device="meta"), (NODES, WIDTH)).device.type == "meta"


def test_results_are_copied_pickled_and_shared_like_others() -> None:
    x, out = _result()
    expected = x.roll(1, 0)
    assert torch.equal(copy.deepcopy(out), expected)
    assert torch.equal(pickle.loads(pickle.dumps(out)), expected)
    assert torch.equal(out.share_memory_(), expected) and out.is_shared()


def test_inference_mode() -> None:
    with torch.inference_mode():
        x, out = _result()
    assert out.is_inference() and torch.equal(out, x.roll(1, 0))
