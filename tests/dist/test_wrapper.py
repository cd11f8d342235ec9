"""A sharded tensor answers for its shape at once, without rules, originals and edits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor
from torch_geometric.data import Data

import fastgraph
import fastgraph.dist as fgd
from fastgraph.dist.tensor import sharded
from fastgraph.dist.tensor.table import OF_WRAPPER, Dispatch

NODES, EDGES = 12, 40

ATTRIBUTES = ("shape", "dtype", "device", "layout", "ndim", "is_cpu", "is_cuda", "is_sparse")
METHODS = ("size", "dim", "numel", "__len__", "is_floating_point", "is_complex", "element_size")


@pytest.fixture(scope="module")
def data() -> Data:
    fgd.init()
    torch.manual_seed(0)
    edges = torch.randint(NODES, (2, EDGES))
    return fgd.shard(Data(x=torch.randn(NODES, 8), edge_index=edges), method="even")


@pytest.mark.parametrize("name", ["x", "edge_index"])
def test_shapes_and_dtypes_are_those_of_the_whole(data: Data, name: str) -> None:
    x = data[name]
    whole = fgd.whole(x)
    assert type(x) is sharded.ShardedTensor and type(whole) is Tensor
    for attribute in ATTRIBUTES:
        assert getattr(Tensor, attribute).__get__ in OF_WRAPPER
        assert getattr(x, attribute) == getattr(whole, attribute), attribute
    for method in METHODS:
        assert getattr(Tensor, method) in OF_WRAPPER
        assert getattr(x, method)() == getattr(whole, method)(), method
    assert x.size(dim=-1) == whole.size(-1) and torch.numel(x) == whole.numel()


def test_what_depends_on_edits_is_not_among_them() -> None:
    for name in ("requires_grad", "grad", "grad_fn", "is_leaf", "_version", "data", "T"):
        assert getattr(Tensor, name).__get__ not in OF_WRAPPER
    assert not {Tensor.data_ptr, Tensor.stride, Tensor.item} & OF_WRAPPER


def test_a_layer_asks_for_few_rules(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    conv, asked = gnn.GCNConv(8, 8), Counter[str]()
    by_rule = sharded._by_rule

    def counted(func: Any, dispatch: Dispatch, *given: Any) -> Any:
        asked[dispatch.name] += 1
        return by_rule(func, dispatch, *given)

    with fastgraph.enabled(min_edges=0):
        conv(data.x, data.edge_index)
        monkeypatch.setattr(sharded, "_by_rule", counted)
        conv(data.x, data.edge_index)
    # Its projection, its operator and its bias; attributes are those that autograd has.
    assert asked.pop("__get__", 0) <= 5
    assert asked == {"linear": 1, "to": 1, "fastgraph::gcn": 1, "add_": 1}
