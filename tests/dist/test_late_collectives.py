"""Wrong uses of collectives on the stand-in are errors, also where results happen to be right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch_geometric.nn as gnn
from torch import Tensor

import fastgraph
import fastgraph.dist as fgd
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.world import WORLD
from fastgraph.registry import registry
from tests import forks, late_collectives, standin
from tests.dist import on_device
from tests.dist.test_fused import HALVES, by_halves
from tests.dist.test_overlap import D, N, ring

ROWS = 4
COUNTS = [ROWS // 2] * 2


def device() -> Any:
    return torch.get_device_module(standin.DEVICE)


def rows() -> Tensor:
    return torch.arange(ROWS, device=standin.DEVICE) + 1.0


def begun(into: Tensor | None = None) -> transport.Exchange:
    return transport.begin_all_to_all(rows(), COUNTS, COUNTS, into)


def changed() -> None:
    x = rows()
    exchange = transport.begin_all_to_all(x, COUNTS, COUNTS)
    x.zero_()
    exchange.wait()


def freed() -> None:
    exchange = begun()
    exchange._given = torch.empty(0)
    exchange.wait()


def freed_result() -> None:
    exchange = begun()
    exchange._received = torch.empty(0)
    exchange.wait()


def on_another_stream() -> None:
    exchange = begun()
    with device().stream(device().Stream()):
        exchange.wait()


def interleaved() -> None:
    everyone = transport.Group(range(WORLD.size), WORLD.rank, dist.new_group(range(WORLD.size)))
    exchange = begun()
    try:
        transport.all_to_all(rows(), COUNTS, COUNTS, group=everyone)
    finally:
        exchange.wait()


def waited_for_twice() -> None:
    exchange = begun()
    work = exchange._work
    assert work is not None
    exchange.wait()
    work.wait()


REFUSED: dict[str, tuple[Callable[[], None], str]] = {
    "changed": (changed, "changed while it was sent"),
    "freed": (freed, "freed while it was sent or received"),
    "freed result": (freed_result, "freed while it was sent or received"),
    "another stream": (on_another_stream, "begun on another stream"),
    "interleaved": (interleaved, "another communicator is going on"),
    "twice": (waited_for_twice, "waited for before"),
}


def errors() -> dict[str, str]:
    late_collectives.install()
    found = {}
    for name, (act, _) in REFUSED.items():
        try:
            act()
            found[name] = ""
        except AssertionError as error:
            found[name] = str(error)
        transport.barrier()
        for late in list(late_collectives.GOING_ON):
            late.arrive()
        late_collectives.GOING_ON.clear()
    return found


def test_what_gpus_do_wrong_without_a_word_is_an_error() -> None:
    for of_rank in forks.on_ranks(errors, 2):
        for name, (_, expected) in REFUSED.items():
            assert expected in of_rank[name], name


def steps() -> list[str]:
    """The error of a step of an optimizer before which each exchange was waited for, or one not."""
    late_collectives.install()
    on_device.watch()
    weight = torch.nn.Parameter(rows())
    weight.grad = rows()
    optimizer, found = torch.optim.SGD([weight], lr=0.1), []
    for waited in (2, 1):
        exchanges = [begun() for _ in range(2)]
        for exchange in exchanges[:waited]:
            exchange.wait()
        try:
            optimizer.step()
            found.append("")
        except AssertionError as error:
            found.append(str(error))
    transport.barrier()
    late_collectives.GOING_ON.clear()
    return found


def test_a_collective_that_nobody_waits_for_is_an_error_at_a_step() -> None:
    for of_rank in forks.on_ranks(steps, 2):
        assert of_rank == ["", "nobody has waited for a collective"]


def arrivals() -> tuple[bool, list[list[bool]]]:
    """True if results are right, and which of two had arrived after each of some operations."""
    late_collectives.install()
    late_collectives.OFTEN = 0.1
    found, is_right = [], True
    for _ in range(20):
        memory = [torch.empty(ROWS, device=standin.DEVICE) for _ in range(2)]
        exchanges = [begun(into) for into in memory]
        for _ in range(3):
            memory[0].new_zeros(1).add_(1)
            found.append([not bool(standin.on_host(x).isnan().any()) for x in memory])
        mine = rows()[torch.arange(2, device=standin.DEVICE) + 2 * WORLD.rank]
        for exchange in exchanges:
            is_right &= torch.equal(exchange.wait().cpu(), mine.repeat(2).cpu())
    return is_right, found


def test_results_arrive_at_any_time_in_any_order() -> None:
    for is_right, found in forks.on_ranks(arrivals, 2):
        assert is_right
        assert all(state in found for state in ([False, False], [True, False], [False, True]))


def gradients(branches: Sequence[Any], device: str) -> list[Tensor]:
    """Of two stacks of layers on two graphs, one layer of each in turn."""
    torch.manual_seed(0)
    stacks = [[gnn.SAGEConv(D, D).to(device) for _ in range(3)] for _ in branches]
    hidden = [data.x for data in branches]
    for i in range(3):
        for branch, data in enumerate(branches):
            hidden[branch] = stacks[branch][i](hidden[branch], data.edge_index)
    (hidden[0].square().sum() + hidden[1].square().sum()).backward()
    found = [p.grad for stack in stacks for layer in stack for p in layer.parameters()]
    return [grad.cpu() for grad in found if grad is not None]


def by_halo_and_on_a_grid() -> tuple[list[float], dict[str, int], set[int]]:
    """Errors of gradients, the ways in which halos travelled, and the sizes of groups of ranks.

    Autograd goes from a layer of one stack to one of the other, which have communicators of their
    own, also while a halo travels.
    """
    standin.install()
    torch.set_default_dtype(torch.float64)
    expected = gradients([ring(), ring()], "cpu")
    late_collectives.install()
    registry.DEVICE_TYPES = (*registry.DEVICE_TYPES, standin.DEVICE)  # type: ignore[assignment]
    by_halves(HALVES["one is empty"])
    parts = torch.arange(N) * WORLD.size // N
    options: list[dict[str, Any]] = [{"mode": "halo"}, {"mode": "grid", "mesh": (2, 2)}]
    branches = [fgd.shard(ring(), parts=parts, **how).to(standin.DEVICE) for how in options]
    with fastgraph.enabled(backend="reference"):
        found = gradients(branches, standin.DEVICE)
    off = [float((a - b).abs().max() / a.norm()) for a, b in zip(expected, found, strict=True)]
    sizes = {one.ranks for one in late_collectives.ISSUED if one.device == standin.DEVICE}
    return off, dict(fgd.COUNTS.halo), sizes


def test_layers_by_halo_and_on_a_grid_take_turns_on_their_communicators() -> None:
    for off, halo, sizes in forks.on_ranks(by_halo_and_on_a_grid, 4):
        assert len(off) == 2 * 3 * 3
        assert max(off) < 1e-12
        assert any(kind.endswith("without the halo") for kind in halo)
        assert sizes == {2, 4}
