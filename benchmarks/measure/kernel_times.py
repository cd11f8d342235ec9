"""The kernels that a pass of ours starts on a GPU, and how long each takes there.

    PYTHONPATH=benchmarks python -m measure.kernel_times --graphs cora,tolokers --width 64

A line for each kernel: how often a call starts it, and its microseconds by torch's profiler. Above
them stand the microseconds that a call takes on the device and on the host; where the host takes
longer than the kernels, it is what a small graph waits for.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from measure.device import Contestant
from measure.graphs import load
from measure.layers import LAYERS
from measure.rivals import message_passing
from measure.routing import ours_enabled

_CALLS = 20
_SHOWN = 100  # characters of a kernel's name, whose template arguments can be hundreds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", default="cora,tolokers")
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--upstream", action="store_true", help="of upstream instead")
    options = parser.parse_args()
    device, dtype = torch.device("cuda"), getattr(torch, options.dtype)
    for name in options.graphs.split(","):
        graph = load(name)
        index = graph.edge_index.to(device)
        for layer in options.layers.split(","):
            module = message_passing(layer, options.width).to(device, dtype)
            shape = graph.num_nodes, options.width
            x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
            with nullcontext() if options.upstream else ours_enabled():
                show_passes(f"{name} {layer} {options.width} {options.dtype}", module, x, index)


def show_passes(title: str, module: nn.Module, x: Tensor, index: Tensor) -> None:
    """Both passes of a layer, each by itself."""
    out = module(x, index)
    grad = torch.randn_like(out)

    def backward(_: int) -> object:
        return torch.autograd.grad(out, x, grad, retain_graph=True)

    show(f"{title} forward", lambda _: module(x, index), x.device)
    show(f"{title} backward", backward, x.device)


def show(title: str, step: Callable[[int], object], device: torch.device) -> None:
    """Time a step, then print the kernels that it starts."""
    for _ in range(5):
        step(0)
    timed = Contestant(title, step)
    for _ in range(3):
        timed.turn(device)
    torch.cuda.synchronize(device)
    host = []
    for _ in range(_CALLS):
        start = time.perf_counter()
        step(0)
        host.append(time.perf_counter() - start)
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        for _ in range(_CALLS):
            step(0)
        torch.cuda.synchronize(device)
    if timed.failed is not None:
        print(f"{title}: {timed.failed}", flush=True)
        return
    print(
        f"{title}: {1e3 * timed.median:.1f} us on the device, "
        f"{1e6 * statistics.median(host):.0f} us on the host",
        flush=True,
    )
    for row in sorted(found.key_averages(), key=lambda row: -row.self_device_time_total):
        if row.device_type == DeviceType.CUDA and row.self_device_time_total:
            each = row.self_device_time_total / row.count
            print(f"    {row.count / _CALLS:5.2f} x {each:8.1f}  {row.key[:_SHOWN]}", flush=True)


if __name__ == "__main__":
    main()
