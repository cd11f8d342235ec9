"""The factors of attention dropout in plain torch, as all kernels draw them."""

from __future__ import annotations

import torch
from torch import Tensor


def dropout_factors(
    score: Tensor, dropout: float, seed: int, first: int | Tensor = 0, first_head: int = 0
) -> Tensor:
    """0 for dropped edges, ``1 / (1 - dropout)`` for the others, like ``score`` ``[E, heads]``.

    Edges are numbered from ``first`` on, or by it, int64 ``[E]``, and heads from ``first_head`` on.
    """
    if dropout == 0:
        return torch.ones_like(score)
    threshold = min(int(dropout * 2**32), 2**32 - 1)
    words = philox(seed, len(score), score.shape[1], score.device, first, first_head)
    kept = words >= threshold
    return kept.to(score.dtype) * (1 / (1 - dropout) if dropout < 1 else 0.0)


def philox(
    seed: int,
    num_edges: int,
    heads: int,
    device: torch.device,
    first: int | Tensor = 0,
    first_head: int = 0,
) -> Tensor:
    """Word ``head % 4`` of Philox4x32-10 for the counter ``(edge, head // 4, 0, 0)``, int64.

    Four heads share one block. Edges are numbered from ``first`` on, or by it; of numbers beyond
    32 bits the third counter is the rest. Salmon et al., "Parallel random numbers: as easy as
    1, 2, 3", SC 2011.
    """
    low = 2**32 - 1
    keys = [seed & low, (seed >> 32) & low]
    first_four = first_head // 4
    fours = first_four + torch.arange(-(-(first_head + heads) // 4) - first_four, device=device)
    zeros = torch.zeros(num_edges, len(fours), dtype=torch.int64, device=device)
    number = first if isinstance(first, Tensor) else first + torch.arange(num_edges, device=device)
    edges = zeros + number.unsqueeze(-1)
    counters = [edges & low, zeros + fours, edges >> 32, zeros]
    for _ in range(10):
        # Products may wrap around to negative numbers, whose bits are still those wanted.
        product0, product1 = counters[0] * 0xD2511F53, counters[2] * 0xCD9E8D57
        counters = [
            ((product1 >> 32) & low) ^ counters[1] ^ keys[0],
            product1 & low,
            ((product0 >> 32) & low) ^ counters[3] ^ keys[1],
            product0 & low,
        ]
        keys = [(keys[0] + 0x9E3779B9) & low, (keys[1] + 0xBB67AE85) & low]
    words = torch.stack(counters, dim=-1).flatten(1)
    return words[:, first_head % 4 :][:, :heads]
