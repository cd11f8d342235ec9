"""Errors for what cannot be sampled name the argument."""

from __future__ import annotations

import pytest
import torch

from fastgraph.sampling import (
    cluster,
    hetero_neighbor_sample,
    negative_sample,
    neighbor_sample,
    random_walk,
    subgraph,
    unique_and_compact,
)

COLPTR = torch.tensor([0, 2, 3, 5])
ROW = torch.tensor([1, 2, 0, 0, 1])
SEED = torch.tensor([0, 2])
FAR = 2**40
EDGE = ("a", "to", "a")

WRONG = {
    "colptr that is no tensor": ({"colptr": [0, 2]}, TypeError, "colptr must be a tensor"),
    "colptr of floats": ({"colptr": COLPTR.float()}, TypeError, "colptr must be int32 or int64"),
    "no colptr": ({"colptr": COLPTR[:0]}, ValueError, "colptr must have one value"),
    "colptr from 1": ({"colptr": COLPTR + 1}, ValueError, "colptr must run from 0 to 5"),
    "colptr to 4": ({"colptr": COLPTR.clamp(max=4)}, ValueError, "colptr must run from 0 to 5"),
    "colptr that falls": (
        {"colptr": torch.tensor([0, 4, 3, 5]), "seed": torch.tensor([1])},
        ValueError,
        "colptr must ascend",
    ),
    "colptr far away": (
        {"colptr": torch.tensor([0, FAR, 3, 5])},
        ValueError,
        "colptr must ascend",
    ),
    "colptr below 0": (
        {"colptr": torch.tensor([0, 2, -3, 5]), "seed": torch.tensor([2])},
        ValueError,
        "colptr must ascend",
    ),
    "row of two dimensions": ({"row": ROW[None]}, ValueError, "row must have 1 dimension"),
    "row of another dtype": ({"row": ROW.int()}, TypeError, "row must be int64, got int32"),
    "row with gaps": (
        {"row": ROW.repeat_interleave(2)[::2]},
        ValueError,
        "row must be contiguous",
    ),
    "row beyond": ({"row": torch.tensor([1, 3, 0, 0, 1])}, IndexError, "row holds node 3 at"),
    "row far beyond": ({"row": ROW + FAR}, IndexError, f"row holds node {FAR + 1} at position 0"),
    "row below 0": ({"row": ROW - 1}, IndexError, "row holds node -1 at position 3"),
    "seed beyond": ({"seed": torch.tensor([0, 3])}, IndexError, "seed holds node 3 at position 1"),
    "seed below 0": ({"seed": torch.tensor([-1])}, IndexError, "seed holds node -1 at position 0"),
    "seed of floats": ({"seed": SEED.float()}, TypeError, "seed must be int32 or int64"),
    "seeds in a matrix": ({"seed": SEED[None]}, ValueError, "seed must have 1 dimension"),
    "fanout of -2": ({"num_neighbors": [-2]}, ValueError, r"num_neighbors must be in \[-1, 2"),
    "fanout of 2^31": ({"num_neighbors": [2**31]}, ValueError, "num_neighbors must be in"),
    "fanout of 1.5": ({"num_neighbors": [1.5]}, TypeError, "num_neighbors must hold ints"),
    "times alone": ({"node_time": torch.arange(3)}, ValueError, "disjoint must be true"),
    "few times": (
        {"node_time": torch.arange(2), "disjoint": True},
        ValueError,
        r"node_time must have shape \[3\]",
    ),
    "times as floats": (
        {"node_time": torch.rand(3), "disjoint": True},
        TypeError,
        "node_time must be int64",
    ),
    "edge times without seed times": (
        {"edge_time": torch.arange(5), "disjoint": True},
        ValueError,
        "seed_time must be given",
    ),
    "few seed times": (
        {"edge_time": torch.arange(5), "seed_time": torch.arange(1), "disjoint": True},
        ValueError,
        r"seed_time must have shape \[2\]",
    ),
    "edges that are not sorted": (
        {
            "edge_time": torch.tensor([4, 1, 1, 3, 2]),
            "seed_time": torch.tensor([1, 1]),
            "disjoint": True,
            "num_neighbors": [2],
        },
        ValueError,
        "row must have the edges of a node in order of time",
    ),
    "few weights": (
        {"edge_weight": torch.ones(4)},
        ValueError,
        r"edge_weight must have shape \[5\]",
    ),
    "weights as ints": ({"edge_weight": ROW}, TypeError, "edge_weight must be float32 or float64"),
    "weights of 16 bits": (
        {"edge_weight": torch.ones(5).half()},
        TypeError,
        "edge_weight must be float32 or float64, got float16",
    ),
    "text for a flag": ({"replace": "no"}, TypeError, "replace must be a bool, got 'no'"),
    "nothing for a flag": ({"disjoint": None}, TypeError, "disjoint must be a bool, got None"),
    "one fanout alone": ({"num_neighbors": 2}, TypeError, "num_neighbors must hold a number for"),
    "fanouts of text": ({"num_neighbors": "12"}, TypeError, "num_neighbors must hold ints"),
    "a weight below 0": (
        {"edge_weight": torch.tensor([1.0, -1, 1, 1, 1])},
        ValueError,
        "edge_weight must be finite and at least 0, got -1 at position 1",
    ),
    "a weight that is NaN": (
        {"edge_weight": torch.tensor([1.0, 1, 1, float("nan"), 1])},
        ValueError,
        "edge_weight must be finite",
    ),
    "an infinite weight": (
        {"edge_weight": torch.tensor([1.0, 1, 1, float("inf"), 1])},
        ValueError,
        "edge_weight must be finite",
    ),
    "an infinite sum": (
        {"edge_weight": torch.full((5,), 1e308, dtype=torch.float64)},
        ValueError,
        "edge_weight must have finite sums",
    ),
    "another strategy": (
        {"temporal_strategy": "first"},
        ValueError,
        "temporal_strategy must be 'uniform' or 'last', got 'first'",
    ),
    "a seed of text": ({"random_seed": "1"}, TypeError, "random_seed must be an int"),
    "a seed of 65 bits": ({"random_seed": 2**63}, ValueError, "random_seed must be in"),
}


@pytest.mark.parametrize("directed", [True, False])
@pytest.mark.parametrize("wrong", WRONG)
def test_neighbor_sample_refuses(wrong, directed):
    given, error, text = WRONG[wrong]
    arguments = {"colptr": COLPTR, "row": ROW, "seed": SEED, "num_neighbors": [1]} | given
    if "row b" in wrong or "row far" in wrong:
        arguments["num_neighbors"] = [-1]
    with pytest.raises(error, match=text):
        neighbor_sample(**arguments, directed=directed)


def test_an_induced_subgraph_has_no_edges_of_the_future():
    """Bisection of times that are not sorted ends beyond the later one of these loops."""
    with pytest.raises(ValueError, match="row must have the edges of a node in order of time"):
        neighbor_sample(
            torch.tensor([0, 2]),
            torch.tensor([0, 0]),
            torch.tensor([0]),
            [],
            edge_time=torch.tensor([4, 1]),
            seed_time=torch.tensor([1]),
            disjoint=True,
            directed=False,
        )


class Wrapped(torch.Tensor):
    """Has a shape and no memory."""

    @staticmethod
    def __new__(cls, of):
        return torch.Tensor._make_wrapper_subclass(cls, of.shape, dtype=of.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)


@pytest.mark.parametrize("hide", [Wrapped, lambda x: x.to("meta"), torch.Tensor.to_sparse])
def test_tensors_without_memory_are_refused(hide):
    hidden = hide(ROW)
    for call in (
        lambda: neighbor_sample(COLPTR, hidden, SEED, [1]),
        lambda: neighbor_sample(COLPTR, ROW, hidden, [1]),
        lambda: hetero_neighbor_sample({EDGE: COLPTR}, {EDGE: hidden}, {"a": SEED}, [1]),
        lambda: subgraph(COLPTR, ROW, hidden),
        lambda: random_walk(COLPTR, ROW, hidden, 2),
        lambda: negative_sample(COLPTR, hidden, 2),
        lambda: unique_and_compact([hidden]),
        lambda: cluster(COLPTR, hidden, 2),
    ):
        with pytest.raises(TypeError, match="must be a dense tensor in memory"):
            call()
    weight = torch._neg_view(-torch.ones(5))
    with pytest.raises(TypeError, match="edge_weight must be a dense tensor in memory"):
        neighbor_sample(COLPTR, ROW, SEED, [1], edge_weight=weight)


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_the_first_fault_is_told_on_any_number_of_threads(threads):
    row = torch.zeros(200_000, dtype=torch.int64)
    row[150_000:] = 7000
    colptr = torch.arange(0, 200_001, 50)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with pytest.raises(IndexError, match="row holds node 7000 at position 150000"):
            neighbor_sample(colptr, row, torch.arange(4000), [-1])
    finally:
        torch.set_num_threads(before)


OTHER = ("x", "y", "z")
WRONG_BY_TYPE = {
    "nodes below 0": (
        {"num_nodes": {"a": -1}},
        ValueError,
        r"num_nodes\['a'\] must be in \[0, 2\^63",
    ),
    "too many nodes": ({"num_nodes": {"a": 2**70}}, ValueError, r"num_nodes\['a'\] must be in"),
    "half a node": ({"num_nodes": {"a": 2.5}}, TypeError, r"num_nodes\['a'\] must be an int, got"),
    "a count that is true": ({"num_nodes": {"a": True}}, TypeError, "num_nodes.* must be an int"),
    "counts in a list": ({"num_nodes": [3]}, TypeError, "num_nodes must be a mapping by type, got"),
    "one seed": ({"seed": SEED}, TypeError, "seed must be a mapping by type, got Tensor"),
    "another type of nodes": ({"num_nodes": {"b": 3}}, ValueError, r"num_nodes must have types"),
    "times of others": ({"node_time": {"b": SEED}}, ValueError, r"node_time must .* got \['b'\]"),
    "seed times of others": ({"seed_time": {"b": SEED}}, ValueError, "seed_time must have types"),
    "rows of others": ({"row": {EDGE: ROW, OTHER: ROW}}, ValueError, "row must have types of edg"),
    "fanouts of others": (
        {"num_neighbors": {EDGE: [1], OTHER: [1]}},
        ValueError,
        "num_neighbors must have types of edges of the graph alone, got",
    ),
    "weights of others": ({"edge_weight": {OTHER: ROW}}, ValueError, "edge_weight must have types"),
    "edge times of others": ({"edge_time": {OTHER: ROW}}, ValueError, "edge_time must have types"),
    "weights of 16 bits": (
        {"edge_weight": {EDGE: torch.ones(5).half()}},
        TypeError,
        r"edge_weight\[\('a', 'to', 'a'\)\] must be float32 or float64, got float16",
    ),
    "text for a flag": ({"replace": "no"}, TypeError, "replace must be a bool, got 'no'"),
    "one fanout alone": ({"num_neighbors": {EDGE: 2}}, TypeError, "num_neighbors must hold a num"),
}


@pytest.mark.parametrize("wrong", WRONG_BY_TYPE)
def test_hetero_neighbor_sample_refuses(wrong):
    given, error, text = WRONG_BY_TYPE[wrong]
    arguments = {
        "colptr": {EDGE: COLPTR},
        "row": {EDGE: ROW},
        "seed": {"a": SEED},
        "num_neighbors": [1],
    }
    with pytest.raises(error, match=text):
        hetero_neighbor_sample(**arguments | given)


@pytest.mark.parametrize("relation", ["abc", ("a", "b"), 3, (1, 2, 3)], ids=str)
def test_types_of_edges_are_triples(relation):
    with pytest.raises(TypeError, match="colptr must have triples of a source, a relation and"):
        hetero_neighbor_sample({relation: COLPTR}, {relation: torch.tensor([0])}, {"a": SEED}, [1])


def test_walks_refuse():
    def walk(rowptr=COLPTR, col=ROW, seed=SEED, length=3, **options):
        return random_walk(rowptr, col, seed, length, **options)

    with pytest.raises(ValueError, match="walk_length must be at least 0"):
        walk(length=-1)
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="p and q must be more than 0"):
            walk(p=bad)
        with pytest.raises(ValueError, match="p and q must be more than 0"):
            walk(q=bad)
    with pytest.raises(IndexError, match="seed holds node 3 at position 0"):
        walk(seed=torch.tensor([3]))
    with pytest.raises(IndexError, match="col holds node 9 at position 2"):
        walk(col=torch.tensor([1, 1, 9, 0, 1]))
    with pytest.raises(ValueError, match="rowptr must ascend"):
        walk(rowptr=torch.tensor([0, 9, 3, 5]))
    with pytest.raises(ValueError, match="rowptr must run from 0 to 5"):
        walk(rowptr=COLPTR[:-1].clone())
    with pytest.raises(TypeError, match="col must be a tensor"):
        walk(col=[1])
    with pytest.raises(TypeError, match="seed must be int64"):
        walk(seed=SEED.int())


def test_biased_walks_look_for_edges_of_nodes_that_are_there_alone():
    """The step before may be from a node whose rows were not looked at otherwise."""
    with pytest.raises((IndexError, ValueError), match=r"col|rowptr"):
        random_walk(
            torch.tensor([0, 2, 3, 5]),
            torch.tensor([1, 1, 2**40, 2**40, 1]),
            torch.tensor([0]),
            5,
            p=0.5,
            random_seed=0,
        )


def test_others_refuse():
    with pytest.raises(IndexError, match="nodes holds node 3 at position 0"):
        subgraph(COLPTR, ROW, torch.tensor([3]))
    with pytest.raises(ValueError, match="rowptr must ascend to the number of edges, got 9"):
        subgraph(torch.tensor([0, 9, 3, 5]), ROW, SEED)
    with pytest.raises(IndexError, match="col holds node -1"):
        subgraph(COLPTR, ROW - 1, SEED)
    with pytest.raises(ValueError, match="num_samples must be at least 0"):
        negative_sample(COLPTR, ROW, -1)
    with pytest.raises(ValueError, match="num_src must be"):
        negative_sample(COLPTR, ROW, 1, num_src=-1)
    with pytest.raises(ValueError, match="num_src must be"):
        negative_sample(torch.tensor([0]), ROW[:0], 1)
    with pytest.raises(ValueError, match="colptr must ascend"):
        negative_sample(torch.tensor([0, 9, 3, 5]), ROW, 100)
    with pytest.raises(ValueError, match="ids must hold a tensor"):
        unique_and_compact([])
    with pytest.raises(IndexError, match=r"ids\[1\] holds -4 at position 1"):
        unique_and_compact([ROW, torch.tensor([3, -4])])
    with pytest.raises(TypeError, match=r"ids\[1\] must be int64, got int32"):
        unique_and_compact([ROW, ROW.int()])
    with pytest.raises(ValueError, match="num_parts must be at least 1"):
        cluster(COLPTR, ROW, 0)
    with pytest.raises(IndexError, match="col holds node 5"):
        cluster(COLPTR, ROW + 4, 2)
