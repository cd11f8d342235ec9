"""Arguments and attributes of any type end as upstream's: in its own error, or in its result."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_geometric import utils
from torch_geometric.nn import (
    EGConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GINEConv,
    MaxAggregation,
    SAGEConv,
    SoftmaxAggregation,
    StdAggregation,
    TransformerConv,
    global_add_pool,
    global_max_pool,
)
from torch_geometric.nn.conv import sg_conv
from torch_geometric.nn.pool import glob

import fastgraph

# What is looked at is the host's.
pytestmark = pytest.mark.repeats

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
INDEX = torch.arange(12) % 5
EDGES = torch.stack([torch.arange(40) * 7 % 12, torch.arange(40) * 5 % 11])

ODD: dict[str, Any] = {
    "a list": ["sum"],
    "an empty list": [],
    "a tuple": ("sum",),
    "None": None,
    "a tensor": torch.tensor([1, 2]),
    "a scalar": torch.tensor(1),
    "an array": np.arange(3),
    "a number of numpy": np.int64(0),
    "a dict": {"a": 1},
    "a set": {1},
    "a float": 1.5,
    "a negative number": -7,
    "another string": "nonsense",
    "an object": object(),
    "True": True,
    "a slice": slice(1),
    "a class": int,
    "bytes": b"sum",
    "floats": X[:, 0],
}

_MATRIX = torch.eye(12).to_sparse_csr()
_GROUPED = {"src": X, "index": INDEX, "dim": 0, "dim_size": 5, "reduce": "sum"}
_AGGREGATED = {"x": X, "index": INDEX, "ptr": None, "dim_size": 5, "dim": 0}
_POOLED = {"x": X, "batch": INDEX, "size": 5}

# Looked up when they are called, as they are replaced.
FUNCTIONS: dict[str, tuple[Callable[[], Callable[..., Any]], dict[str, Any]]] = {
    "scatter": (lambda: utils.scatter, _GROUPED),
    "scatter of pooling": (lambda: glob.scatter, _GROUPED),
    "segment": (
        lambda: utils.segment,
        {"src": X, "ptr": torch.tensor([0, 3, 12]), "reduce": "sum"},
    ),
    "softmax": (
        lambda: utils.softmax,
        {"src": X, "index": INDEX, "ptr": None, "num_nodes": 5, "dim": 0},
    ),
    "spmm": (lambda: utils.spmm, {"src": _MATRIX, "other": X, "reduce": "sum"}),
    "gcn_norm": (
        lambda: sg_conv.gcn_norm,
        {
            "edge_index": EDGES,
            "edge_weight": None,
            "num_nodes": 12,
            "improved": False,
            "add_self_loops": True,
            "flow": "source_to_target",
            "dtype": None,
        },
    ),
    "global_add_pool": (lambda: global_add_pool, _POOLED),
    "global_max_pool": (lambda: global_max_pool, _POOLED),
    "MaxAggregation": (MaxAggregation, _AGGREGATED),
    "SoftmaxAggregation": (SoftmaxAggregation, _AGGREGATED),
    "StdAggregation": (StdAggregation, _AGGREGATED),
}

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "GCNConv": lambda: GCNConv(4, 8),
    "SAGEConv": lambda: SAGEConv(4, 8),
    "GINEConv": lambda: GINEConv(nn.Linear(4, 8), edge_dim=4),
    "EGConv": lambda: EGConv(4, 8),
    "GATConv": lambda: GATConv(4, 8),
    "GATv2Conv": lambda: GATv2Conv(4, 8),
    "TransformerConv": lambda: TransformerConv(4, 8),
}

ATTRIBUTES = ("flow", "node_dim", "dropout", "negative_slope", "training", "add_self_loops")
ATTRIBUTES += ("normalize", "improved", "aggregators")


def _end(call: Callable[[], Any]) -> tuple[str, Any]:
    try:
        found = call()
    except Exception as error:
        return type(error).__name__, re.sub("0x[0-9a-f]+", "", str(error))
    parts = found if isinstance(found, tuple) else (found,)
    return "end", [part for part in parts if isinstance(part, Tensor)]


def _differ(upstream: tuple[str, Any], ours: tuple[str, Any]) -> bool:
    if not upstream[0] == ours[0] == "end":
        return upstream != ours
    return len(upstream[1]) != len(ours[1]) or not all(
        a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, atol=1e-5)
        for a, b in zip(upstream[1], ours[1], strict=True)
    )


def _differences(calls: dict[Any, Callable[[], Any]]) -> dict[Any, str]:
    """The ends of calls by upstream and by ours, where routes are taken and where they are not."""
    upstream = {name: _end(call) for name, call in calls.items()}
    found = {}
    for least in (0, None):
        with fastgraph.enabled(min_edges=least):
            for name, call in calls.items():
                ours = _end(call)
                if _differ(upstream[name], ours):
                    found[name] = f"upstream {upstream[name]}, ours {ours}"
    return found


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_of_functions(name: str) -> None:
    get, usual = FUNCTIONS[name]
    calls = {
        (argument, odd): lambda a=argument, v=value: get()(**{**usual, a: v})
        for argument in usual
        for odd, value in ODD.items()
    }
    assert not _differences(calls)


@pytest.mark.parametrize("name", LAYERS)
def test_attributes_of_layers(name: str) -> None:
    torch.manual_seed(0)
    module = LAYERS[name]()
    state = dict(vars(module))
    features = (torch.ones(40, 4),) if name == "GINEConv" else ()

    def call(attribute: str, value: Any) -> Any:
        torch.manual_seed(1)
        vars(module).update({**state, attribute: value})
        return module(X, EDGES, *features)

    calls = {
        (attribute, odd): lambda a=attribute, v=value: call(a, v)
        for attribute in ATTRIBUTES
        if hasattr(module, attribute)
        for odd, value in ODD.items()
    }
    assert not _differences(calls)
