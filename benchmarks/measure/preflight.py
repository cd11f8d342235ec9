"""Checks of what the kernels rely on and only a device can show, made before any measurement.

    python -m measure.preflight --device cuda

Prints a line for each point, and ends with 1 if one of them is not as it has to be. Each is looked
at whatever the others say: there may be no second call on this machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from measure.requirements import EXCHANGE

Check = Callable[[torch.device], tuple[bool, str]]
"""A function that returns true if all is as it has to be, and the finding."""


def exchange(_: torch.device) -> tuple[bool, str]:
    """Stream and allocator of torch reach the kernels by this."""
    there = hasattr(torch.Tensor, EXCHANGE)
    return there, f"torch {torch.__version__} {'has' if there else 'lacks'} {EXCHANGE}"


def library(device: torch.device) -> tuple[bool, str]:
    """The compiled kernels load, for this driver."""
    from fastgraph.machine import native

    why_not = native.why_cuda_unavailable()
    if why_not is not None:
        return False, why_not
    loaded, name = native.cuda_library(), torch.cuda.get_device_name(device)
    return True, (
        f"{name}, capability {torch.cuda.get_device_capability(device)}, kernels of CUDA "
        f"{loaded.runtime_version()}, driver for {loaded.driver_version()}"
    )


def cusparse(device: torch.device) -> tuple[bool, str]:
    """It is torch's, which has to be loaded before the kernels look for it."""
    from fastgraph.machine import native

    torch.zeros(1, device=device)
    maps = Path("/proc/self/maps").read_text().split()
    loaded = sorted({Path(word).name for word in maps if "libcusparse.so" in word})
    version = native.cuda_library().cusparse_version()
    return version > 0, f"version {version}; loaded: {', '.join(loaded) or 'none'}"


def new_values(device: torch.device) -> tuple[bool, str]:
    """A plan of cuSPARSE takes other values than those that it was made for."""
    from fastgraph import Graph
    from fastgraph.backends import reference
    from fastgraph.backends.cusparse import ALGORITHMS, CuSparseSpmm
    from fastgraph.machine import native

    num = 1000
    keys = torch.randperm(num * num, device=device)[:20_000]  # no edge twice
    graph = Graph(torch.stack([keys // num, keys % num]), num, num)
    x, weights = torch.rand(num, 64, device=device), torch.rand(2, keys.numel(), device=device)
    worst = 0.0
    for algorithm in ALGORITHMS:
        kernel = CuSparseSpmm(native.cuda_library, algorithm)
        for weight in weights:
            expected = reference.spmm(graph, x.double(), weight.double(), "sum", False)
            error = kernel(graph, x, weight, "sum", False) - expected
            worst = max(worst, float(error.abs().max() / expected.abs().max()))
    return worst < 1e-4, f"largest error of algorithms {ALGORITHMS} with two weights: {worst:.1e}"


def alignment(device: torch.device) -> tuple[bool, str]:
    """Kernels take whole packs where arrays of results are aligned to 32 bytes, others to 16."""
    sizes = (1, 3, 100, 1000, 123_457)
    made = [torch.empty(size, dtype=torch.bfloat16, device=device).data_ptr() for size in sizes]
    least = min(pointer & -pointer for pointer in made)
    return least >= 32, f"allocations to {least} bytes"


def head_start(device: torch.device) -> tuple[bool, str]:
    """The setting ``measure`` times what a small graph keeps the device busy, and not the host."""
    from fastgraph.tune.fastest import seconds_on_gpu
    from measure.device import Contestant

    call = _product(device, 2708, torch.randint(2708, (2, 10_556), device=device), 64)
    busy = Contestant("product", lambda _: call())
    for _ in range(3):
        busy.turn(device)
    if busy.failed is not None:
        return False, busy.failed
    by_measure, on_device = 1e6 * seconds_on_gpu(call), 1e3 * busy.median
    return by_measure < 2 * on_device + 5, (
        f"a product on a graph of Cora's size takes {by_measure:.0f} us by five calls in a row, "
        f"{on_device:.0f} us by itself"
    )


def tiles(device: torch.device) -> tuple[bool, str]:
    """Tensor cores hold the numbers of a product in the lanes that the kernels think."""
    from fastgraph.backends.tiles import TilesAttention, TilesSpmm
    from fastgraph.machine import native
    from fastgraph.tune.tiles import DTYPES

    errors = {
        f"{kernel.results} of {dtype}": kernel(native.cuda_library).error(device, dtype)
        for kernel in (TilesSpmm, TilesAttention)
        for dtype in DTYPES
    }
    found = ", ".join(f"{name} {error:.2g}" for name, error in errors.items())
    return max(errors.values()) <= 1, f"errors over what is allowed: {found}"


def scratch(device: torch.device) -> tuple[bool, str]:
    """Memory that one long row takes beside the result."""
    num = 1_000_000
    index = torch.stack([torch.arange(num), torch.zeros(num, dtype=torch.int64)]).to(device)
    call = _product(device, num, index, 64)
    out_bytes = call().numel() * 4
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    beside = torch.cuda.max_memory_allocated(device) - before - out_bytes
    return True, f"{beside / 2**20:.0f} MiB for a million edges of one row and 64 columns"


def _product(
    device: torch.device, num_nodes: int, index: Tensor, width: int
) -> Callable[[], Tensor]:
    from fastgraph import Graph
    from fastgraph.backends.cuda import CudaBackend

    graph, x = Graph(index, num_nodes, num_nodes), torch.rand(num_nodes, width, device=device)
    kernel = CudaBackend(generated=None).kernel("spmm", "cuda", torch.float32)
    assert kernel is not None

    def call() -> Tensor:
        out: Tensor = kernel(graph, x, None, "sum", False)
        return out

    call()
    return call


EVERYWHERE: dict[str, Check] = {"tensors": exchange}
ON_GPUS: dict[str, Check] = {
    "kernels": library,
    "cuSPARSE": cusparse,
    "new values": new_values,
    "alignment": alignment,
    "head start": head_start,
    "tiles": tiles,
    "scratch": scratch,
}


def findings(device: torch.device) -> Iterator[tuple[bool, str]]:
    """A line for each point, and whether it is as it has to be."""
    for name, check in {**EVERYWHERE, **(ON_GPUS if device.type == "cuda" else {})}.items():
        try:
            is_right, found = check(device)
        except Exception as error:  # the others are looked at nevertheless
            is_right, found = False, f"{type(error).__name__}: {error}"
        yield is_right, f"{'ok   ' if is_right else 'WRONG'} {name}: {found}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    device = torch.device(parser.parse_args().device)
    wrong = 0
    for is_right, line in findings(device):
        print(line, flush=True)
        wrong += not is_right
    if device.type != "cuda":
        print(f"without a GPU nothing is known of {', '.join(ON_GPUS)}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
