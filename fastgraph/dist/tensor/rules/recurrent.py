"""Recurrent layers, whose sequences are those of rows: each rank computes its own."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fastgraph.dist.tensor.sharded import ShardedTensor, aligned, enter, is_sharded
from fastgraph.dist.tensor.table import (
    Arguments,
    NoRuleError,
    Options,
    TorchFunction,
    name_of,
    rule,
    unpacked,
)


@rule("gru_cell lstm_cell rnn_tanh_cell rnn_relu_cell")
def cell(func: TorchFunction, args: Arguments, kwargs: Options) -> object:
    """One step for each row, by replicated weights."""
    x, state, *weights = args
    states = state if isinstance(state, (list, tuple)) else [state]
    lead = next((value for value in (x, *states) if is_sharded(value)), None)
    if kwargs or lead is None or lead.axis != 0 or any(map(is_sharded, weights)):
        raise NoRuleError
    if any(value.dim() != 2 or value.shape[0] != lead.rows.n for value in (x, *states)):
        raise NoRuleError
    of_rank = [aligned(value, lead.rows, 0) for value in states]
    local = of_rank if isinstance(state, (list, tuple)) else of_rank[0]
    out = func(aligned(x, lead.rows, 0), local, *map(enter, weights))
    if isinstance(out, Tensor):
        return ShardedTensor(out, lead.rows, 0)
    return tuple(ShardedTensor(value, lead.rows, 0) for value in out)


@rule("gru lstm rnn_tanh rnn_relu")
@unpacked
def layers(
    func: TorchFunction,
    x: Tensor,
    state: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Layers over sequences of one length, of which each row has one."""
    # Packed sequences have a tensor of the sizes of batches in the place of the state.
    if not isinstance(weights, (list, tuple)):
        raise NoRuleError
    if not is_sharded(x) or x.dim() != 3 or x.axis != (0 if batch_first else 1):
        raise NoRuleError
    if dropout and training and num_layers > 1:  # masks would be those of parts of the rows
        raise NoRuleError
    if any(map(is_sharded, weights)):
        raise NoRuleError
    of_rank = [
        aligned(value, x.rows, 1) for value in (state if name_of(func) == "lstm" else [state])
    ]
    local = of_rank if name_of(func) == "lstm" else of_rank[0]
    flags = has_biases, num_layers, dropout, training, bidirectional, batch_first
    out, *last = func(x.local, local, [enter(weight) for weight in weights], *flags)
    return ShardedTensor(out, x.rows, x.axis), *(ShardedTensor(h, x.rows, 1) for h in last)
