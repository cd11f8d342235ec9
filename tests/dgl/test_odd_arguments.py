"""Arguments of any type end as DGL's: in its own error, or in its result."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fastgraph
from tests.dgl.graphs import dgl

import dgl.function as fn  # isort: skip
import dgl.ops  # isort: skip

ODD: dict[str, Any] = {
    "a list": ["sum"],
    "an empty list": [],
    "None": None,
    "a tensor": torch.tensor([1, 2]),
    "an array": np.arange(3),
    "a dict": {"a": 1},
    "a set": {1},
    "a float": 1.5,
    "another string": "nonsense",
    "an object": object(),
    "a slice": slice(1),
    "a class": int,
}

INDEX = torch.arange(40)
GRAPH = dgl.add_self_loop(dgl.graph((INDEX * 7 % 12, INDEX * 5 % 12), num_nodes=12))
X, WEIGHTS = torch.randn(12, 8), torch.rand(GRAPH.num_edges(), 1)
ROWS = torch.randn(GRAPH.num_edges(), 8)


def _updated(**functions: Any) -> Tensor:
    graph = GRAPH.local_var()
    graph.srcdata["h"] = X
    graph.update_all(**functions)
    out: Tensor = graph.dstdata["o"]
    return out


FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "gspmm": (
        dgl.ops.gspmm,
        {"g": GRAPH, "op": "mul", "reduce_op": "sum", "lhs_data": X, "rhs_data": WEIGHTS},
    ),
    "gsddmm": (
        dgl.ops.gsddmm,
        {
            "g": GRAPH,
            "op": "dot",
            "lhs_data": X,
            "rhs_data": X,
            "lhs_target": "u",
            "rhs_target": "v",
        },
    ),
    "copy_u_sum": (dgl.ops.copy_u_sum, {"g": GRAPH, "x": X}),
    "copy_e_max": (dgl.ops.copy_e_max, {"g": GRAPH, "x": ROWS}),
    "update_all": (
        _updated,
        {"message_func": fn.copy_u("h", "m"), "reduce_func": fn.sum("m", "o")},
    ),
}


def _end(call: Callable[[], Any]) -> tuple[str, Any]:
    try:
        return "end", call()
    except Exception as error:
        text = re.sub(r"0x[0-9a-f]+|\[\d+:\d+:\d+\]|Stack trace:.*", "", str(error), flags=re.S)
        return type(error).__name__, text


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_of_functions(name: str) -> None:
    function, usual = FUNCTIONS[name]
    calls = {
        (argument, odd): lambda a=argument, v=value: function(**{**usual, a: v})
        for argument in usual
        for odd, value in ODD.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        upstream = {call: _end(run) for call, run in calls.items()}
        with fastgraph.enabled(min_edges=0):
            ours = {call: _end(run) for call, run in calls.items()}
    for call, expected in upstream.items():
        if expected[0] == ours[call][0] == "end":
            torch.testing.assert_close(ours[call][1], expected[1])
        else:
            assert ours[call] == expected, call
