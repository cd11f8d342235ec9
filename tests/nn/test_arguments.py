"""Arguments of layers, models and transforms that are none: the error names them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torch_geometric")

from fastgraph import nn, transforms

EDGES = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
PATTERN = nn.dual_pattern(EDGES, 4)
OPTIMIZER = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
MODEL = {"in_channels": 8, "out_channels": 4, "channels": 16, "layers": 1, "heads": 4}

CALLS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (nn.AutoTuner, {}),
    (nn.DualInterleavedAttention, {"channels": 16, "heads": 4}),
    (nn.GlobalAGNN, {"in_channels": 8, "out_channels": 4}),
    (nn.GlobalGAT, {"in_channels": 8, "out_channels": 4}),
    (nn.GlobalVA, {"in_channels": 8, "out_channels": 4}),
    (nn.GraphTransformer, MODEL),
    (nn.Graphormer, MODEL),
    (
        nn.LargeGT,
        {"in_channels": 8, "hidden_channels": 8, "out_channels": 4, "num_nodes": 4},
    ),
    (nn.LocalModule, {"channels": 8}),
    (nn.GlobalModule, {"channels": 8, "position_channels": 4, "num_nodes": 4}),
    (nn.Reformation, {}),
    (nn.Schedule, {"by": "step", "period": 4, "evaluation": "dense"}),
    (nn.TransformerLayer, {
        "channels": 8, "heads": 2, "feed_forward": 8, "norm_first": True, "activation": "relu",
        "dropout": 0.0, "attention_dropout": 0.0,
    }),
    (nn.clusters_of_cache, {"nodes": 100, "row_bytes": 64}),
    (nn.conditions, {"index": EDGES, "num_nodes": 4, "layers": 2}),
    (nn.dual_pattern, {"edge_index": EDGES, "num_nodes": 4}),
    (nn.fastest_block, {"pattern": PATTERN, "channels": 8, "heads": 2}),
    (nn.period_of_share, {"share": 0.1, "dense": 2.0, "sparse": 1.0}),
    (nn.polynomial_decay, {"optimizer": OPTIMIZER, "warm_up": 1, "steps": 10}),
    (nn.with_random_signs, {"positions": torch.zeros(3, 2)}),
    (transforms.AttentionPattern, {}),
    (transforms.ClusterOrder, {}),
    (transforms.Degrees, {}),
    (transforms.LaplacianPositions, {"k": 3}),
    (transforms.ShortestPaths, {}),
]  # fmt: skip
NONE_OF_THEM = object()
"""Of no type that an argument may have."""

WRONG = {
    "int": ["a", 1.5, float("nan"), True, [1], -1, NONE_OF_THEM],
    "float": ["a", float("nan"), True, [0.5], NONE_OF_THEM],
    "bool": ["a", 1, None, NONE_OF_THEM],
    "str": [1, None, ["a"], NONE_OF_THEM],
    "Tensor": ["a", 1, None, [1], NONE_OF_THEM],
}
"""Values that are none, by the annotation of an argument."""


def wrong_arguments() -> Iterator[Any]:
    for call, right in CALLS:
        for name, parameter in inspect.signature(call).parameters.items():
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                continue
            kind, _, others = str(parameter.annotation).partition(" | ")
            values = [v for v in WRONG.get(kind, [NONE_OF_THEM]) if v is not None or not others]
            yield pytest.param(call, right, name, values, id=f"{call.__name__} {name}")


@pytest.mark.parametrize(("call", "right", "name", "values"), [*wrong_arguments()])
def test_errors_name_the_argument(
    call: Callable[..., Any], right: dict[str, Any], name: str, values: list[Any]
) -> None:
    for value in values:
        with pytest.raises((TypeError, ValueError), match=f"^{name}: expected"):
            call(**{**right, name: value})


def test_integers_of_other_libraries() -> None:
    pattern = nn.dual_pattern(EDGES, EDGES.max() + 1)  # type: ignore[arg-type]
    assert pattern.num_nodes == 4
    assert transforms.Degrees(np.int64(3)).max_degree == 3  # type: ignore[arg-type]


@pytest.mark.parametrize(("call", "right"), CALLS, ids=[call.__name__ for call, _ in CALLS])
def test_right_arguments_pass(call: Callable[..., Any], right: dict[str, Any]) -> None:
    call(**right)
