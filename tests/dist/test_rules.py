"""Operators have rules for sharded tensors, and say what ranks must know of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from fastgraph import ops
from fastgraph.dist.operators import registration  # noqa: F401  # all rules
from fastgraph.dist.tensor import table
from fastgraph.dist.tensor.table import KNOWN, dispatch_of, find, rule
from fastgraph.registry.operators import ATTENTIONS, Attention

EDGES = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])
SIZES = {
    **{"sources": 3, "destinations": 3, "edges": 4, "heads": 2, "channels": 5},
    **{"edge_dim": 0, "channels + edge_dim": 5},
}

BIAS = torch.tensor([[0.0, 1.0], [2.0, -1.0], [0.0, 3.0], [-2.0, 0.0]])


def differentiated() -> list[str]:
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    ours = {name for name in names if name.startswith("fastgraph::")}
    # Those without are backward passes and forms for compiled code, which ranks have none of.
    has_gradient = torch._C._dispatch_has_kernel_for_dispatch_key
    return sorted(
        name for name in ours if has_gradient(name, "Autograd") and not name.endswith("_backward")
    )


@pytest.mark.parametrize("name", differentiated())
def test_an_operator_has_a_rule(name: str) -> None:
    assert find(name), f"{name} gathers whole tensors: see docs/extending/rule.md"


def test_a_second_rule_for_a_name_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"cumsum has a rule: .*rules\.shapes\.along"):
        rule("cdist cumsum")(lambda func, args, kwargs: None)
    assert find("cdist") is None


def test_a_rule_is_one_for_functions_that_were_called_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table, "_rules", dict(table._rules))
    assert dispatch_of(torch.cdist).rule is None
    assert torch.cdist in KNOWN
    done = rule("cdist")(lambda func, args, kwargs: None)
    assert torch.cdist not in KNOWN
    assert dispatch_of(torch.cdist).rule is done
    KNOWN.clear()


@pytest.mark.parametrize("operator", ATTENTIONS, ids=lambda operator: operator.name)
def test_weights_multiply_the_rows_that_are_said_to_be_summed(operator: Attention) -> None:
    torch.manual_seed(0)
    inputs = [
        torch.rand([SIZES.get(str(size), size) for size in operand.shape])  # type: ignore[misc]
        for operand in operator.operands
        if not operand.optional
    ]
    is_biased = operator.name == "biased_attention"  # which callers know as attention
    function: Any = ops.attention if is_biased else getattr(ops, operator.name)
    function = partial(function, bias=BIAS) if is_biased else function
    before = function(*inputs, EDGES)[0]
    assert before.abs().min() > 0
    if operator.name != "gatv2":  # which scores the rows, too
        inputs[operator.summed] = 3 * inputs[operator.summed]
        torch.testing.assert_close(function(*inputs, EDGES)[0], 3 * before)
    inputs[operator.summed] = torch.zeros_like(inputs[operator.summed])
    assert not function(*inputs, EDGES)[0].any()
