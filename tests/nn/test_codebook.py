"""The codebook of LargeGT beside Algorithm 3, line 8, a row at a time in Python's numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from fastgraph.nn.codebook import SMOOTHING, Codebook

NODES, CENTROIDS, CHANNELS, DECAY = 30, 4, 3, 0.9
VARIANTS = ("paper", "release")


def make(variant: str, centroids: int = CENTROIDS, nodes: int = NODES) -> Codebook:
    torch.manual_seed(0)
    return Codebook(nodes, centroids, CHANNELS, variant=variant, decay=DECAY).double()


def batch(seed: int, rows: int = 10) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, CHANNELS, generator=generator, dtype=torch.float64) * 3 + 1
    return x, torch.randint(NODES, (rows,), generator=generator)


def assigned(codebook: Codebook) -> list[int]:
    found: list[int] = codebook.get_extra_state()["assigned"].tolist()
    return found


def nearest(row: list[float], centroids: list[list[float]], allowed: list[int]) -> int:
    def distance(centroid: int) -> float:
        return sum((a - b) ** 2 for a, b in zip(row, centroids[centroid], strict=True))

    return min(allowed, key=distance)


class Slow:
    """One step of k-means by moving averages, from the state of a codebook."""

    def __init__(self, codebook: Codebook) -> None:
        self.variant = "paper" if codebook.revives else "release"
        self.centroids, self.sums = codebook.centroids.tolist(), codebook.ema_sums.tolist()
        self.sizes, self.assigned = codebook.ema_sizes.tolist(), assigned(codebook)
        norm = codebook.norm
        self.mean, self.variance = norm.running_mean.clone(), norm.running_var.clone()

    def step(self, x: Tensor, n_id: list[int], revived: dict[int, int]) -> None:
        mean, variance = x.mean(0), x.var(0, correction=0)
        rows = ((x - mean) / (variance + 1e-5).sqrt()).tolist()
        self.mean = 0.9 * self.mean + 0.1 * mean
        self.variance = 0.9 * self.variance + 0.1 * x.var(0)
        dead = [c for c in range(len(self.sizes)) if c not in self.assigned]
        allowed = list(range(len(self.sizes)))
        if self.variant == "paper":
            for centroid in dead:
                self.sizes[centroid], self.sums[centroid] = 0.0, [0.0] * CHANNELS
            for centroid, row in revived.items():
                self.centroids[centroid] = rows[row]
            allowed = [c for c in allowed if c not in dead or c in revived]
        places = [nearest(row, self.centroids, allowed) for row in rows]
        sizes = []
        for centroid in range(len(self.sizes)):
            mine = [row for row, place in zip(rows, places, strict=True) if place == centroid]
            sizes.append(DECAY * self.sizes[centroid] + (1 - DECAY) * len(mine))
            self.sums[centroid] = [
                DECAY * old + (1 - DECAY) * sum(row[channel] for row in mine)
                for channel, old in enumerate(self.sums[centroid])
            ]
        total = sum(sizes)
        smooth = [(s + SMOOTHING) / (total + len(sizes) * SMOOTHING) * total for s in sizes]
        self.sizes = sizes if self.variant == "paper" else smooth
        self.centroids = [
            [value / size for value in row] for row, size in zip(self.sums, smooth, strict=True)
        ]
        for node, place in zip(n_id, places, strict=True):
            self.assigned[node] = place


def agree(codebook: Codebook, slow: Slow) -> None:
    centroids = torch.tensor(slow.centroids, dtype=torch.float64)
    torch.testing.assert_close(codebook.centroids, centroids)
    torch.testing.assert_close(codebook.ema_sizes.tolist(), slow.sizes)
    torch.testing.assert_close(codebook.ema_sums.tolist(), slow.sums)
    torch.testing.assert_close(codebook.norm.running_mean, slow.mean)
    torch.testing.assert_close(codebook.norm.running_var, slow.variance)
    torch.testing.assert_close(codebook.rows, centroids * (slow.variance + 1e-5).sqrt() + slow.mean)
    assert assigned(codebook) == slow.assigned
    counts = [slow.assigned.count(centroid) for centroid in range(len(slow.sizes))]
    assert codebook.counts.tolist() == counts
    expected = torch.tensor(counts, dtype=torch.float64).log()
    assert torch.equal(codebook.bias(), expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_steps(variant: str) -> None:
    """Nodes come several times, in one batch, too; rows that become centroids are found by them."""
    codebook = make(variant)
    for step in range(8):
        slow, (x, n_id) = Slow(codebook), batch(step)
        before = codebook.centroids, codebook.counts == 0
        codebook.update(x, n_id)
        dead = before[1].nonzero().flatten().tolist() if variant == "paper" else []
        assert step > 0 or variant == "release" or dead == list(range(CENTROIDS))
        revived = chosen_rows(before[0], before[1], x, n_id, step) if dead else {}
        slow.step(x, n_id.tolist(), revived)
        agree(codebook, slow)


def chosen_rows(
    centroids: Tensor, dead: Tensor, x: Tensor, n_id: Tensor, step: int
) -> dict[int, int]:
    """The rows that become centroids in a step, by a codebook that is asked for them alone."""
    other = make("paper")
    other.counts, other.centroids, other.steps = (~dead).long(), centroids, torch.tensor(step)
    other._revive(x, n_id, 0)
    places = dead.nonzero().flatten().tolist()
    found = [(x == other.centroids[place]).all(1).nonzero().flatten().tolist() for place in places]
    assert all(len(rows) == 1 for rows in found)
    assert len({rows[0] for rows in found}) == len(places)
    return {place: rows[0] for place, rows in zip(places, found, strict=True)}


def test_centroids_begin_as_rows() -> None:
    codebook = make("paper", centroids=25)
    x, _ = batch(0, rows=10)
    codebook.update(x, torch.arange(10))
    assert sorted(codebook.counts.tolist()) == [0] * 15 + [1] * 10
    where = codebook.get_extra_state()["assigned"][:10].long()
    # Smoothing, which is 1e-5 of a node, moves them by as much of their size.
    normalised = (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(codebook.centroids[where], normalised, rtol=1e-3, atol=1e-3)
    assert assigned(codebook)[10:] == [-1] * 20
    bias = codebook.bias()
    assert torch.equal(bias[where], torch.zeros(10, dtype=torch.float64))
    assert int((bias == -torch.inf).sum()) == 15
    codebook.update(*batch(1))
    assert int((codebook.counts > 0).sum()) > 10


def test_rows_that_become_centroids_do_not_depend_on_their_order() -> None:
    first, second = make("paper"), make("paper")
    x, _ = batch(0)
    n_id, order = torch.arange(10) * 3, torch.randperm(10)
    first.update(x, n_id)
    second.update(x[order], n_id[order])
    torch.testing.assert_close(first.centroids, second.centroids)
    assert assigned(first) == assigned(second)


def test_dead_centroids_come_back_and_those_of_the_release_do_not() -> None:
    """A centroid may lose its nodes in the last step; it would come back in the next."""
    used = {}
    for variant in VARIANTS:
        codebook = make(variant, centroids=16)
        codebook.counts.zero_()
        codebook._assigned.fill_(-1)
        draw = torch.Generator().manual_seed(0)
        for _ in range(30):
            x = torch.randn(30, CHANNELS, generator=draw, dtype=torch.float64)
            codebook.update(x, torch.arange(30))
        used[variant] = int((codebook.counts > 0).sum())
        norms = codebook.centroids.norm(dim=1)
        if variant == "paper":
            assert float(norms.max()) < 10
        else:  # a size of 1e-5 divides sums that began at random
            assert float(norms.max()) > 100
    assert used["paper"] >= 14 and used["release"] <= 7, used


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_rows_change_nothing(variant: str) -> None:
    codebook = make(variant)
    codebook.update(*batch(0))
    before = copy.deepcopy(codebook.state_dict())
    codebook.update(*batch(1, rows=0))
    for name, value in codebook.state_dict().items():
        if isinstance(value, Tensor):
            assert torch.equal(value, before[name]), name
    assert torch.equal(before["_extra_state"]["assigned"], torch.tensor(assigned(codebook)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_leaves_what_backward_needs(variant: str) -> None:
    """Two forward passes, then the backward pass of the first."""
    codebook, weight = make(variant), torch.randn(CHANNELS, 2, dtype=torch.float64)
    codebook.update(*batch(0))
    weight.requires_grad_()
    rows, bias = codebook.rows, codebook.bias()
    copies = rows.clone(), bias.clone()
    loss = ((rows @ weight).square().sum(1) + bias.clamp(min=-9)).exp().sum()
    (expected,) = torch.autograd.grad(loss, weight, retain_graph=True)
    for step in range(1, 4):
        codebook.update(*batch(step))
    assert torch.equal(torch.autograd.grad(loss, weight)[0], expected)
    assert torch.equal(rows, copies[0]) and torch.equal(bias, copies[1])
    assert not torch.equal(codebook.rows, rows)


def test_autocast_does_not_reach_the_averages() -> None:
    first, second = make("paper"), make("paper")
    x, n_id = batch(0)
    first.update(x.bfloat16().double(), n_id)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        second.update(x.bfloat16(), n_id)
    assert torch.equal(first.rows, second.rows)


@pytest.mark.parametrize("centroids", [32767, 32768])
def test_assignments_to_as_many_centroids_as_their_dtype_holds(centroids: int) -> None:
    codebook = Codebook(NODES, centroids, CHANNELS, variant="release")
    dtype = torch.int16 if centroids == 32767 else torch.int32
    assert codebook.get_extra_state()["assigned"].dtype == dtype
    assert int(codebook.counts.sum()) == NODES


def test_assignments_of_other_nodes() -> None:
    state = make("paper").state_dict()
    with pytest.raises(ValueError, match="expected assignments of 31 nodes, got 30"):
        make("paper", nodes=31).load_state_dict(state)
    state["_extra_state"] = {"num_nodes": NODES, "first": 15, "assigned": torch.zeros(15)}
    with pytest.raises(ValueError, match=r"nodes 0 to 29, got 15 from node 15; full_state_dict"):
        make("paper").load_state_dict(state)


def test_a_state_is_that_of_one_moment() -> None:
    codebook = make("paper")
    codebook.update(*batch(0))
    state = codebook.state_dict()
    for step in range(1, 9):
        codebook.update(*batch(step))
    codebook.load_state_dict(state)
    known = codebook.get_extra_state()["assigned"]
    assert torch.equal(codebook.counts, codebook.counted(known))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("variant", ["paper", "release"])
def test_averages_are_kept_in_float32(variant: str, dtype: torch.dtype) -> None:
    """Of the release's they would be beyond float16; 0.99 of a value may be itself in bfloat16."""
    single = make(variant).float()
    half = copy.deepcopy(single).to(dtype)
    for step in range(4):
        x, n_id = batch(step)
        single.update(x.to(dtype).float(), n_id)
        half.update(x.to(dtype), n_id)
    assert {name for name, value in half.named_buffers() if value.dtype == dtype} == set()
    for name, value in single.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(half.state_dict()[name], value), name
    assert bool(half.rows.isfinite().all())


def test_counts_beyond_float16() -> None:
    codebook = make("paper").float().half()
    codebook.counts = torch.zeros(CENTROIDS, dtype=torch.int64)
    codebook.counts[:2] = torch.tensor([1, 10**8])
    expected = torch.full((CENTROIDS,), -torch.inf)
    expected[:2] = torch.tensor([1.0, 1e8]).log()
    torch.testing.assert_close(codebook.bias(), expected)
