"""The device of a rank, and what it sends by: which is chosen, and what ranks must have alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

import fastgraph.dist as fgd
from fastgraph.dist.operators import links
from fastgraph.dist.operators.cost import Cluster
from fastgraph.dist.ranks.own_device import OwnDevice, chosen
from fastgraph.dist.ranks.world import WORLD, RanksDivergedError, share_random_states
from tests import forks, late_collectives, standin
from tests.dist.graphs import graph


def test_each_rank_takes_the_gpu_of_its_place_and_nccl() -> None:
    found = chosen("cuda", 4, 2, 4, has_library=True)
    assert found == OwnDevice(torch.device("cuda", 2), "nccl")
    assert found.backend == "cpu:gloo,cuda:nccl"


def test_without_gpus_all_is_gloo_on_the_host() -> None:
    assert chosen("cuda", 0, 2, 4, has_library=True).backend == "gloo"


@pytest.mark.parametrize(
    ("count", "has_library", "expected"),
    [(2, True, "3 ranks on this machine share 2"), (3, False, "no NCCL")],
)
def test_without_a_gpu_each_or_nccl_rows_go_through_the_host_and_people_are_told(
    count: int, has_library: bool, expected: str
) -> None:
    found = chosen("cuda", count, 2, 3, has_library=has_library)
    assert found.backend == "cpu:gloo,cuda:gloo"
    assert found.device == torch.device("cuda", 2 % count)
    assert expected in found.notice and "copied to the host" in found.notice


SCRIPT = """
import torch
import torch.distributed as dist
from tests import standin
standin.install()
from fastgraph.dist.ranks import own_device
import fastgraph.dist as fgd

def gloo(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

dist.Backend.register_backend("late", gloo, devices=["standin"])
own_device._LIBRARIES["standin"] = "late"
world = fgd.init()
print(dist.get_backend_config(), world.device, world.through)
"""


def test_ranks_join_by_two_libraries(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    said = forks.launched(2, "script.py", cwd=tmp_path)
    assert "cpu:gloo,standin:late standin:0 late" in said


def _with_another_library_on_one_rank() -> str:
    WORLD.through = "nccl" if WORLD.rank == 1 else "gloo"
    try:
        share_random_states()
    except RanksDivergedError as error:
        return str(error)
    return ""


def test_ranks_with_other_devices_or_libraries_are_told() -> None:
    first, second = forks.on_ranks(_with_another_library_on_one_rank, 2)
    assert not first
    assert "rank 1 would compute on cpu by nccl, and rank 0 on cpu by gloo" in second


def _memory_to_plan_with() -> float:
    late_collectives.install()
    if WORLD.rank == 1:
        torch.get_device_module(standin.DEVICE).mem_get_info = lambda _: (2**29, 2**32)
    figures = Cluster(1e-4, 1e9, 1e-9, 1e-9, 0.0, (1.0,) * WORLD.size)
    with mock.patch.object(links, "_read", return_value=figures):
        return links.of_ranks().memory


def test_modes_are_chosen_by_the_memory_of_the_device_that_has_least() -> None:
    assert forks.on_ranks(_memory_to_plan_with, 2) == [2**29 + 2**20] * 2


def _refused() -> list[str]:
    fgd.init()
    data = fgd.shard(graph())
    found = []
    moves: list[Callable[[], object]] = [
        lambda: data.x.to("cuda"),
        lambda: data.x.to("meta"),
        lambda: data.x.to(torch.device("cuda", 1)),
        lambda: data.to("cuda"),
        data.x.cuda,
        lambda: data.x.cuda("cuda:1"),
        lambda: torch.zeros_like(data.x, device="cuda"),
    ]
    for move in moves:
        with pytest.raises(ValueError, match="must be on the CPU") as error:
            move()
        found.append(str(error.value))
    standin.install()
    late_collectives.install()
    with pytest.raises(ValueError, match="each rank takes its own") as error:
        data.to("standin:1")
    found.append(str(error.value))
    return found


def test_rows_go_to_no_other_device_than_their_ranks() -> None:
    (found,) = forks.on_ranks(_refused, 1)
    assert found[0].endswith("got cuda") and "standin:0" in found[-1]


def _joined_by_nothing_on_hosts() -> str:
    config = mock.patch("torch.distributed.get_backend_config", return_value="cuda:nccl")
    with config, pytest.raises(ValueError, match="must have gloo, got cuda:nccl") as error:
        fgd.init()
    return str(error.value)


def test_a_group_that_sends_nothing_on_hosts_is_refused() -> None:
    for of_rank in forks.on_ranks(_joined_by_nothing_on_hosts, 2):
        assert "make it by 'gloo'" in of_rank


def _sharded_on_a_device() -> list[bool]:
    standin.install()
    late_collectives.install()
    data = fgd.shard(graph().to(standin.DEVICE), method="even")
    plain = graph()
    there = [
        data.x.device.type == standin.DEVICE,
        torch.equal(fgd.whole(data.x).cpu(), plain.x),
    ]
    data = data.cpu()
    back = [
        data.x.device.type == "cpu" and fgd.is_sharded(data.x),
        torch.equal(fgd.whole(data.edge_index), plain.edge_index),
    ]
    return there + back


def test_a_graph_on_a_device_is_sharded_there(world_size: int) -> None:
    for of_rank in forks.on_ranks(_sharded_on_a_device, world_size):
        assert all(of_rank), of_rank


def _made_by_default() -> list[str]:
    fgd.shard(graph(), method="even")
    with torch.device("meta"):
        made = torch.tensor([1.0]), torch.asarray([1.0]), torch.zeros(1)
    return [x.device.type for x in made]


def test_a_default_device_is_that_of_all_factories() -> None:
    assert forks.on_ranks(_made_by_default, 1) == [["meta"] * 3]
