"""Comparisons between ranks: all that rows meet in the first steps, and nothing in later ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GATConv

import fastgraph
import fastgraph.dist as fgd
from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.world import WORLD, RanksDivergedError
from fastgraph.dist.tensor.contents import digest_there
from fastgraph.dist.tensor.digests import DIGESTS
from tests import forks, late_collectives, standin
from tests.dist.graphs import NUM_FEATURES, graph

NUM_STEPS = 5


class Trained:
    """A model, which an optimizer trains."""

    def __init__(self, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.model = GATConv(NUM_FEATURES, 4, heads=2).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, data: Any) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(data.x, data.edge_index).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def of_steps(act: Callable[[], object]) -> list[int]:
    """The comparisons of this rank in each of some steps."""
    asked, found = transport.table_of, []

    def counted(row: Tensor) -> Tensor:
        found[-1] += 1
        return asked(row)

    DIGESTS.begin()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "table_of", counted)
        for _ in range(NUM_STEPS):
            found.append(0)
            act()
    return found


def train_on_this_rank() -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    with fastgraph.enabled():
        data, whole = fgd.shard(graph()), graph()
        found: dict[str, Any] = {}
        trained = Trained()
        found["together"] = of_steps(lambda: trained.step(data))
        trained, other = Trained(), Trained()

        def beside_one_process() -> None:
            for _ in range(3 * (WORLD.rank == 0)):  # which one rank trains
                other.step(whole)
            trained.step(data)

        found["beside one process"] = of_steps(beside_one_process)
        trained = Trained()
        found["without steps"] = of_steps(lambda: trained.model(data.x, data.edge_index))
        trained = Trained()
        DIGESTS.begin()
        trained.step(data)
        if WORLD.rank == 1:
            with torch.no_grad():
                trained.model.lin.weight[0, 0] += 1
        found["error"] = None
        try:
            trained.step(data)
        except RanksDivergedError as error:
            found["error"] = str(error)
    return found


@pytest.fixture(scope="module")
def found(world_size: int, once_on_ranks: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = once_on_ranks(train_on_this_rank, world_size)
    return found


@pytest.mark.parametrize("name", ["together", "beside one process"])
def test_steps_after_the_second_compare_nothing(found: list[dict[str, Any]], name: str) -> None:
    """But for one comparison, in which all ranks learn that none has a step left."""
    for of_rank in found:
        first, second, third, *later = of_rank[name]
        assert first >= second > 1
        assert third <= 1
        assert later == [0] * (NUM_STEPS - 3)


def test_programs_without_steps_compare_on(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert min(of_rank["without steps"]) > 1


def test_what_differs_in_the_second_step_is_an_error(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert "not the same on all ranks" in of_rank["error"]


EDITED, LAST = 7, 9
"""In step 8 of a script ranks compare; the step after it they have the outcome."""


def _edited_on_a_device(by: float, is_taken_back: bool = False) -> tuple[int, str, list[str]]:
    """The steps that went well after rank 1 has edited a parameter, the error, and the waits."""
    torch.set_default_dtype(torch.float64)
    late_collectives.install()
    DIGESTS.watch_script()
    data, trained = fgd.shard(graph()).to(standin.DEVICE), Trained(standin.DEVICE)
    DIGESTS.begin()
    for step in range(LAST):
        if WORLD.rank == 1 and (step == EDITED or (is_taken_back and step == EDITED + 1)):
            with torch.no_grad():
                trained.model.lin.weight[0, 0] += by if step == EDITED else -by
        with standin.waits() as waits:
            try:
                trained.step(data)
            except RanksDivergedError as error:
                return step, str(error), waits
    return LAST, "", waits


def test_what_differs_in_a_later_step_on_a_device_is_an_error_a_step_later() -> None:
    for steps, error, waits in forks.on_ranks(_edited_on_a_device, 2, 1.0):
        assert steps == LAST - 1
        assert "of shape [8, 8] and torch.float64 is not the same" in error
        assert not [wait for wait in waits if "event" in wait]


def test_what_differs_in_a_later_step_is_judged_by_what_it_was_then() -> None:
    for steps, error, _ in forks.on_ranks(_edited_on_a_device, 2, 1.0, True):
        assert steps == LAST - 1
        assert "of shape [8, 8] and torch.float64 is not the same" in error


def test_rounding_on_a_device_is_no_error() -> None:
    for found in forks.on_ranks(_edited_on_a_device, 2, 1e-13):
        assert found[:2] == (LAST, "")


def _digests_on_a_device() -> list[bool]:
    standin.install()
    x = torch.randn(50, 3)
    others = [x.flip(0), x.t().contiguous(), -x, x.double(), x.to(torch.bfloat16), x + 1, x[:, :2]]
    others += [x > 0, x.long(), x.long().short(), torch.complex(x, x), x[:0], x[0, 0]]
    digests = {int(digest_there(one.to(standin.DEVICE))) for one in (x, *others)}
    again = int(digest_there(x.t().contiguous().t().to(standin.DEVICE)))
    return [len(digests) == 1 + len(others), again in digests]


def test_digests_on_a_device_tell_tensors_apart() -> None:
    assert forks.on_ranks(_digests_on_a_device, 1) == [[True, True]]


def _mask(*places: int, size: int = 10) -> Tensor:
    return torch.zeros(size, dtype=torch.bool).index_fill(0, torch.tensor(places), True)


PAIRS = (
    (_mask(0, 6), _mask(2, 4)),
    (_mask(1, 7), _mask(3, 5)),
    (_mask(1, 3, 5), _mask(9)),
    (torch.tensor([5, 0, 5, 0, 5]), torch.tensor([6, 0, 3, 0, 6])),
)
"""Which weigh the same where an element counts by a product with its position."""


@pytest.mark.parametrize(("x", "other"), PAIRS)
def test_digests_are_not_those_of_the_same_weight(x: Tensor, other: Tensor) -> None:
    assert digest_there(x) != digest_there(other)


FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128)


@pytest.mark.parametrize("dtype", [*FLOATING, torch.int64])
def test_digests_tell_signs_apart(dtype: torch.dtype) -> None:
    """Of each element alone, of all, and of each two."""
    x = torch.arange(1, 41).to(dtype)
    signs = 1 - 2 * torch.eye(40)
    flipped = [x * row.to(dtype) for row in signs]
    flipped += [x * (a * b).to(dtype) for i, a in enumerate(signs) for b in signs[:i]]
    digests = {int(digest_there(one)) for one in (x, -x, *flipped)}
    assert len(digests) == 2 + len(flipped)


@pytest.mark.parametrize("size", [100, 1000])
def test_digests_of_random_masks_are_as_many(size: int) -> None:
    torch.manual_seed(0)
    masks = [_mask(*torch.randperm(size)[: size // 10].tolist(), size=size) for _ in range(3000)]
    digests = torch.stack([digest_there(mask) for mask in masks])
    assert len(digests.unique()) == len(masks)
    for bit in range(64):  # each is set in half of them, but for chance: here by 5.5 deviations
        assert abs(int((digests >> bit & 1).sum()) - 1500) < 150
