"""The place of each edge among those of its node, by which one of several equal extrema wins."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastgraph.dgl.conditions import lets_last_win
from fastgraph.dgl.structure import Structure


def ranks(structure: Structure, is_mailbox: bool, dtype: torch.dtype) -> Tensor:
    """The place of each edge among those of its node, by DGL's numbers of edges.

    Args:
        structure: the edges.
        is_mailbox: true if a function of users reduces the messages, of which the first wins; else
            one of DGL's does, in the order in which edges are stored.
        dtype: of the result.
    """
    order = "CSC"
    if is_mailbox:
        order = "mailbox"
    elif lets_last_win(dtype, structure.device):
        order = "backwards"
    compute = functools.partial(_ranked, order=order, dtype=dtype)
    name = f"ranks, {order}, {dtype}"
    return structure.remembered(name, compute, numbered=True)


def _ranked(
    index: Tensor, ptr: Tensor, edge_ids: Tensor | None, *, order: str, dtype: torch.dtype
) -> Tensor:
    ptr = ptr.long()
    place = torch.arange(len(index), device=index.device)
    first = torch.repeat_interleave(ptr[:-1], ptr.diff(), output_size=len(index))
    if edge_ids is None:
        ranks = place - first
    elif order == "mailbox":
        row = torch.repeat_interleave(
            torch.arange(len(ptr) - 1, device=index.device), ptr.diff(), output_size=len(index)
        )
        by_number = torch.empty_like(place)
        by_number[edge_ids.long()] = row
        sorted_by = torch.argsort(by_number, stable=True)
        ranks = torch.empty_like(place)
        ranks[sorted_by] = place - first
    else:
        ranks = torch.empty_like(place)
        ranks[edge_ids.long()] = place - first
    return (-ranks if order == "backwards" else ranks).to(dtype)
