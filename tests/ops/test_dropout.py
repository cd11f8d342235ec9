"""Dropout of attention: random numbers by seed, edge and head, and which weights they drop."""

from __future__ import annotations

import math

import pytest
import torch

from fastgraph.backends.dropout import dropout_factors, philox
from tests.emulated import repeats_but
from tests.graphs import Case, hub_edges, random_edges
from tests.ops.test_heads import OPERATORS, inputs_of, operator, upstream, with_gradients


def test_philox_gives_the_published_words() -> None:
    """Known answers of the authors' Random123 library, for a counter and a key of zeros."""
    found = philox(0, 1, 4, torch.device("cpu")).tolist()
    assert found == [[0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]]


@pytest.mark.parametrize("first_head", range(6))
def test_philox_of_some_heads_is_part_of_that_of_all(first_head: int) -> None:
    every = philox(5, 7, 11, torch.device("cpu"))
    found = philox(5, 7, 3, torch.device("cpu"), first_head=first_head)
    assert torch.equal(found, every[:, first_head : first_head + 3])
    assert len(every.unique()) == every.numel()


def test_of_pairs_beyond_32_bits_the_upper_half_is_a_counter() -> None:
    found = dropout_factors(torch.empty(9, 2), 0.5, 3, 2**32 - 5)
    assert torch.equal(found[:5], dropout_factors(torch.empty(5, 2), 0.5, 3, 2**32 - 5))
    first = dropout_factors(torch.empty(64, 2), 0.5, 3)
    assert not torch.equal(dropout_factors(torch.empty(64, 2), 0.5, 3, 2**32), first)


@pytest.mark.parametrize("dropout", repeats_but([0.5], [0.1, 0.5, 1.0]))
@pytest.mark.parametrize("name", OPERATORS)
def test_dropout_is_a_function_of_seed_edge_and_head(
    name: str, dropout: float, backend: str
) -> None:
    case = Case("hub", hub_edges(30, 9_000), 30, 30)
    inputs = inputs_of(name, case, 3, 4)
    seed = torch.tensor([2**62 + 12345])
    words = philox(int(seed), case.edge_index.shape[1], 3, torch.device("cpu"))
    keep = (words >= dropout * 2**32).double() * (1 / (1 - dropout) if dropout < 1 else 0)
    ours = with_gradients(
        lambda t: operator(name)(*t, case.edge_index, dropout=dropout, seed=seed), inputs
    )
    theirs = with_gradients(lambda t: upstream(name, t, case, keep=keep), inputs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", OPERATORS)
def test_dropout_has_the_right_mean_and_variance(name: str) -> None:
    """Over 1,000 seeds; a row's output is a sum of independent Bernoulli variables."""
    case = Case("random", random_edges(6, 6, 40), 6, 6)
    inputs = inputs_of(name, case, 2, 3)
    dropout, count = 0.3, 1000
    samples = torch.stack(
        [
            operator(name)(*inputs, case.edge_index, dropout=dropout, seed=torch.tensor([s]))
            for s in range(count)
        ]
    )
    mean = upstream(name, inputs, case)
    # Of one message m_e alpha_e: alpha_e^2 m_e^2 p / (1 - p).
    one_edge = (
        upstream(name, inputs, case, keep=one.unsqueeze(-1))
        for one in torch.eye(case.edge_index.shape[1], dtype=torch.float64)
    )
    variance = sum(message.square() for message in one_edge) * dropout / (1 - dropout)
    deviation = (variance / count).sqrt()
    # Five standard deviations of the mean; of the variance, whose own is about sqrt(2 / count).
    assert bool(((samples.mean(0) - mean).abs() <= 5 * deviation + 1e-12).all())
    ratio = samples.var(0)[variance > 0] / variance[variance > 0]
    assert bool(((ratio - 1).abs() < 5 * math.sqrt(2 / count)).all())


@pytest.mark.parametrize("name", OPERATORS)
def test_a_seed_is_drawn_from_torchs_generator(name: str) -> None:
    case = Case("random", random_edges(6, 6, 40), 6, 6)
    inputs = inputs_of(name, case)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(operator(name)(*inputs, case.edge_index, dropout=0.5))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
