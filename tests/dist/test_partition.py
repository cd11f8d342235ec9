"""Which rank gets which node."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

from fastgraph.dist import PartitionError, partition
from fastgraph.dist.graphs.pyg import joint_edges

SIZES = (60, 30, 30)


def communities() -> Tensor:
    """Three communities of :data:`SIZES`, dense within and with one edge between each two.

    Nodes are in random order; edges have one direction, duplicates and self-loops.
    """
    torch.manual_seed(0)
    starts = [0, *torch.tensor(SIZES).cumsum(0).tolist()]
    within = [
        torch.randint(start, stop, (2, 8 * (stop - start))) for start, stop in pairwise(starts)
    ]
    between = torch.tensor([[0, 60, 90], [60, 90, 0]])
    edges = torch.cat([*within, between], dim=1)
    return torch.randperm(sum(SIZES))[edges]


def cut(edges: Tensor, parts: Tensor) -> int:
    return int((parts[edges[0]] != parts[edges[1]]).sum())


def test_metis_cuts_between_communities() -> None:
    pytest.importorskip("pymetis")
    edges = communities()
    parts = partition(edges, sum(SIZES), 3, weights=[2, 1, 1])
    assert sorted(torch.bincount(parts).tolist()) == sorted(SIZES)
    assert cut(edges, parts) == 3
    assert int(torch.bincount(parts).argmax()) == 0  # the first has twice the work of the others


def test_metis_counts_by_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pymetis")
    edges, n = communities(), sum(SIZES)
    work = edges.shape[1] + n
    monkeypatch.setattr("fastgraph.dist.graphs.partition._MOST", work - 1)
    with pytest.raises(PartitionError, match=rf"got .* and {work:,} .*choose the method 'even'"):
        partition(edges, n, 2)
    assert len(partition(edges, n, 2, method="even")) == n


def test_edges_may_be_in_a_sparse_matrix() -> None:
    edges, n = communities(), sum(SIZES)
    matrix = torch.sparse_coo_tensor(edges.flip(0), torch.ones(edges.shape[1]), (n, n)).coalesce()
    expected = torch.unique(edges, dim=1)
    for found in (matrix, matrix.to_sparse_csr()):
        ends = joint_edges(Data(adj_t=found, num_nodes=n), [n])
        assert torch.equal(torch.unique(ends, dim=1), expected)
    data = Data(edge_index=edges, adj_t=matrix, num_nodes=n)
    assert torch.equal(joint_edges(data, [n]), edges)


@pytest.mark.parametrize("method", ["metis", "even"])
def test_parts_follow_shares(method: str) -> None:
    if method == "metis":
        pytest.importorskip("pymetis")
    edges = torch.randint(0, 200, (2, 1000), generator=torch.Generator().manual_seed(1))
    parts = partition(edges, 200, 2, weights=[3, 1], method=method)
    work = torch.bincount(edges[1], minlength=200) + 1
    share = float(work[parts == 0].sum() / work.sum())
    assert abs(share - 0.75) < 0.02


@pytest.mark.parametrize("method", ["metis", "even"])
@pytest.mark.parametrize(("nodes", "edges"), [(0, 0), (2, 1), (5, 0)])
def test_few_nodes(method: str, nodes: int, edges: int) -> None:
    parts = partition(torch.zeros(2, edges, dtype=torch.int64), nodes, 3, method=method)
    assert parts.shape == (nodes,) and bool(((parts >= 0) & (parts < 3)).all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": [1.0]}, "weights must be 2 numbers above 0"),
        ({"weights": [1.0, 0.0]}, "weights must be 2 numbers above 0"),
        ({"weights": [1.0, float("nan")]}, "weights must be 2 numbers above 0"),
        ({"method": "random"}, "method must be one of"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        partition(torch.tensor([[0, 1], [1, 0]]), 2, 2, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "edges", [torch.tensor([[0], [2]]), torch.tensor([[-1], [0]]), torch.zeros(3, 1).long()]
)
def test_bad_edges(edges: Tensor) -> None:
    with pytest.raises(ValueError, match="edge_index must"):
        partition(edges, 2, 2)


@pytest.mark.parametrize("num_parts", [0, -1, None, 1.5])
def test_there_is_a_part(num_parts: Any) -> None:
    with pytest.raises(ValueError, match=f"num_parts: expected an integer .* got {num_parts}"):
        partition(torch.zeros(2, 0, dtype=torch.int64), 5, num_parts)


def test_shares_that_single_precision_does_not_have() -> None:
    edges = torch.randint(0, 60, (2, 300))
    with pytest.raises(ValueError, match=r"weights must be at least .* for METIS, got 1e-300"):
        partition(edges, 60, 2, weights=[1e-300, 1])
    parts = partition(edges, 60, 2, weights=[1e-300, 1], method="even")
    assert parts.bincount(minlength=2).tolist() == [1, 59]
