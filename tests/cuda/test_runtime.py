"""Streams, captured graphs, synchronisation and memory on a real GPU."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from fastgraph import ops, settings
from fastgraph.backends import sparse
from fastgraph.backends.cusparse import ALGORITHMS, CuSparseSpmm
from fastgraph.graphs.edges import graph_of
from fastgraph.graphs.graph import beside
from fastgraph.graphs.memo import MEMO
from fastgraph.machine import native
from tests.graphs import hub_edges

NODES, HEADS, CHANNELS = 400, 4, 64


def inputs(gpu: torch.device, num_edges: int = 20_000) -> tuple[list[Tensor], Tensor]:
    """x_src, x_dst and att of gatv2, and a graph with a hub."""
    sizes = (NODES, NODES, 1)
    leaves = [torch.randn(n, HEADS, CHANNELS, device=gpu, requires_grad=True) for n in sizes]
    return leaves, hub_edges(NODES, num_edges).to(gpu)


def step(leaves: list[Tensor], index: Tensor) -> list[Tensor]:
    out, *_ = ops.gatv2(*leaves, index)
    # An output with its graph would keep autograd nodes of the leaves, each of the stream that made
    # it: a later capture on another stream would have to wait for that one, and fail.
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def test_work_waits_for_the_callers_stream(gpu: torch.device) -> None:
    leaves, index = inputs(gpu)
    expected = step(leaves, index)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = [torch.zeros_like(leaf) for leaf in leaves]
        torch.cuda._sleep(200_000_000)
        for copy, leaf in zip(late, leaves, strict=True):
            copy.copy_(leaf.detach())
        found = step([leaf.requires_grad_() for leaf in late], index)
    torch.cuda.current_stream().wait_stream(stream)
    assert all(map(torch.equal, found, expected))


def test_nothing_waits_for_the_gpu(gpu: torch.device) -> None:
    """Once the graph is known."""
    leaves, index = inputs(gpu)
    step(leaves, index)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(leaves, index)
        ops.segment_reduce(leaves[0].detach().flatten(1), index)
        ops.spmm(leaves[0].detach().flatten(1), index)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_faster_product_is_found_once(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(native.cuda_library(), "plan_product"):
        pytest.skip("the library was built without cuSPARSE's header")
    leaves, index = inputs(gpu)
    index = index.unique(dim=1)  # cuSPARSE takes no edge twice
    x = leaves[0].detach().flatten(1)
    weight = torch.rand(index.shape[1], device=gpu)
    expected = ops.spmm(x, index, weight)
    graph = graph_of(index, None, NODES, NODES)
    arguments = (graph, x, weight, "sum", False)
    torch.testing.assert_close(sparse.spmm(*arguments), expected)
    rivals = [CuSparseSpmm(native.cuda_library, algorithm) for algorithm in ALGORITHMS]
    fitting = [rival for rival in rivals if rival.fits(*arguments)]
    assert fitting
    for rival in fitting:
        torch.testing.assert_close(rival(*arguments), expected)
    monkeypatch.setattr(settings, "_current", settings.current().replace(measure=True))
    torch.testing.assert_close(ops.spmm(x, index, weight), expected)
    assert len(beside(graph, "fastest", pytest.fail)) == 1
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.spmm(x, index, weight)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_capture_in_a_cuda_graph(gpu: torch.device) -> None:
    leaves, index = inputs(gpu)
    with torch.no_grad():
        given = [leaf.detach().clone() for leaf in leaves]
        ops.gatv2(*given, index)
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            out, *_ = ops.gatv2(*given, index)
        given[0].copy_(torch.randn_like(given[0]))
        recorded.replay()
        expected, *_ = ops.gatv2(*given, index)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_a_captured_step_outlives_its_edges(gpu: torch.device) -> None:
    leaves, index = inputs(gpu)
    expected = step(leaves, index)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        found = step(leaves, index)
    known = weakref.ref(graph_of(index, None, NODES, NODES))
    num_edges = index.shape[1]
    del index
    MEMO.trim()
    assert known() is not None
    # These take the memory of what was freed; zeros are indices, too.
    sizes = ((num_edges, torch.int32), (NODES + 1, torch.int64))
    overwritten = [
        torch.zeros(size, dtype=dtype, device=gpu) for size, dtype in sizes for _ in range(64)
    ]
    recorded.replay()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    del overwritten


def test_memory_does_not_grow_with_edges_times_channels(gpu: torch.device) -> None:
    leaves, index = inputs(gpu, num_edges=400_000)
    step(leaves, index)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(leaves, index)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < index.shape[1] * HEADS * CHANNELS * 4 / 10


def test_too_little_memory_is_torchs_own_error(gpu: torch.device) -> None:
    """Of the result in the first case, of what the kernel passes on to another in the second."""
    total = torch.cuda.get_device_properties(gpu).total_memory
    index = hub_edges(8, 20_000).to(gpu)
    narrow, wide = (torch.ones(8, width, device=gpu) for width in (4, 2**18))  # 8 MiB
    expected = ops.spmm(narrow, index)
    result, scratch = 2**20, 64 * 2**20  # the latter needs 160 MiB
    for room in (result, scratch):
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
        try:
            with pytest.raises(torch.OutOfMemoryError):
                ops.spmm(wide, index)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(ops.spmm(narrow, index), expected)


def test_tensors_on_different_devices(gpu: torch.device) -> None:
    leaves, index = inputs(gpu)
    with pytest.raises(ValueError, match="device"):
        ops.gatv2(*leaves, index.cpu())


def test_another_gpu_than_the_current_one(gpu: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    leaves, index = inputs(gpu)
    expected = step(leaves, index)
    other = torch.device("cuda", 1 - gpu.index)
    found = step([leaf.detach().to(other).requires_grad_() for leaf in leaves], index.to(other))
    assert torch.cuda.current_device() == gpu.index
    for a, b in zip(found, expected, strict=True):
        assert a.device == other
        torch.testing.assert_close(a.cpu(), b.cpu())
