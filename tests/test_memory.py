"""Memory of large results is used again when nobody can read it any more, and not before."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgraph
from fastgraph import ops, settings
from fastgraph.comparison.memory import release_freed
from fastgraph.machine.memory import LARGE, POOL, ResultPool, new_rows

WIDTH = 256
NODES = LARGE // (4 * WIDTH) + 3
BYTES = 4 * WIDTH * NODES
LIKE = torch.empty(0)
RING = torch.stack([torch.arange(NODES), (torch.arange(NODES) + 1) % NODES])


@pytest.fixture(autouse=True)
def _empty_pool() -> Iterator[None]:
    gc.collect()
    POOL.clear()
    yield
    POOL.clear()


def _rows() -> Tensor:
    return new_rows(LIKE, (NODES, WIDTH))


def _held_bytes(pool: ResultPool = POOL) -> int:
    return sum(block.num_bytes for block in pool._blocks)


def test_a_freed_result_makes_room_for_the_next() -> None:
    x = torch.randn(NODES, WIDTH)
    out = ops.spmm(x, RING)
    address = out.data_ptr()
    del out
    again = ops.spmm(2 * x, RING)
    assert again.data_ptr() == address and torch.equal(again, 2 * x.roll(1, 0))
    assert again.untyped_storage().nbytes() == BYTES and again.is_contiguous()
    del again
    assert new_rows(LIKE, (WIDTH, NODES), torch.int32).data_ptr() == address
    assert new_rows(LIKE, (NODES + 1, WIDTH)).data_ptr() != address


KEPT: dict[str, Callable[[Tensor], Any]] = {
    "a view": lambda out: out[3:5].t(),
    "a detached tensor": lambda out: out.detach(),
    "a storage": lambda out: out.untyped_storage(),
    "a typed storage": lambda out: out.storage(),
    "an array": lambda out: out.numpy(),
    "an exported tensor": lambda out: torch.from_dlpack(out),
    "a capsule": lambda out: out.__dlpack__(),
    "a saved tensor": lambda out: (out * torch.ones(1, requires_grad=True)).grad_fn,
    "a lazy copy": lambda out: torch._lazy_clone(out),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
def test_what_somebody_can_read_is_left_alone(keep: Callable[[Tensor], Any]) -> None:
    out = _rows().fill_(7)
    address = out.data_ptr()
    kept = keep(out)
    del out
    gc.collect()
    other = _rows()
    assert other.data_ptr() != address
    other.fill_(8)
    assert ctypes.c_float.from_address(address).value == 7
    del kept


def test_what_its_owner_has_changed_is_left_to_it() -> None:
    grown, shared = _rows(), _rows()
    grown.untyped_storage().resize_(2 * BYTES)
    shared.share_memory_()
    assert _rows().shape == (NODES, WIDTH)
    assert _held_bytes() == BYTES


def test_in_another_thread() -> None:
    held = [_rows()]
    address = held[0].data_ptr()
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert _rows().data_ptr() == address


def test_threads_do_not_get_the_same_memory() -> None:
    wrong: list[int] = []

    def compute(number: int) -> None:
        for _ in range(40):
            out = _rows().fill_(number)
            if not torch.equal(out, torch.full_like(out, number)):
                wrong.append(number)

    threads = [threading.Thread(target=compute, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_bound_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = 5 * BYTES // 2
    monkeypatch.setattr(settings, "_current", settings.current().replace(reuse_bytes=bound))
    results = [_rows() for _ in range(3)]
    assert _held_bytes() == 2 * BYTES
    del results[0]
    larger = new_rows(LIKE, (NODES + 1, WIDTH))  # for which the idle one has to go
    assert _held_bytes() == 2 * BYTES + 4 * WIDTH
    del results, larger
    monkeypatch.setattr(settings, "_current", settings.current().replace(reuse_bytes=0))
    POOL.trim()
    assert _held_bytes() == 0
    _rows()
    assert _held_bytes() == 0


def test_a_pool_that_was_stopped_keeps_nothing() -> None:
    pool = ResultPool()
    assert pool.take(BYTES) is not None and _held_bytes(pool) == BYTES
    pool.stop()
    assert pool.take(BYTES) is None and _held_bytes(pool) == 0


@pytest.mark.parametrize("release", [fastgraph.clear_cache, fastgraph.disable, release_freed])
def test_idle_memory_is_given_back(release: Callable[[], None]) -> None:
    _rows()
    assert _held_bytes() == BYTES
    release()
    assert _held_bytes() == 0


def test_only_large_tensors_of_the_cpu() -> None:
    assert new_rows(LIKE, (3, 4), torch.int32).dtype == torch.int32
    assert new_rows(torch.empty(0, device="meta"), (NODES, WIDTH)).device.type == "meta"
    assert _held_bytes() == 0


def test_inference_mode() -> None:
    with torch.inference_mode():
        assert _rows().is_inference()
    assert not _rows().is_inference()
