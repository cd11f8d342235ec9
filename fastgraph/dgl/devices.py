"""Graphs on the CPU for features on a GPU."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastgraph.dgl.structure import Structure


def beside_features(structure: Structure, features: Tensor) -> Structure:
    """The structure on the device of the features: copied there once, and freed with the graph.

    Only from the CPU, for which alone DGL has wheels: between GPUs that is the caller's to decide.
    """
    device = features.device
    if structure.device == device or structure.device.type != "cpu":
        return structure
    return copied(structure, device)


@functools.singledispatch
def copied(structure: Structure, device: torch.device) -> Structure:
    """The structure on a device, remembered for as long as the graph lives unchanged."""
    given = structure.num_src, structure.num_dst, device
    return structure.remembered("on another device", _Copy, *given, numbered=True).structure


class _Copy:
    def __init__(
        self,
        index: Tensor,
        ptr: Tensor,
        edge_ids: Tensor | None,
        num_src: int,
        num_dst: int,
        device: torch.device,
    ) -> None:
        tensors = [index, ptr] if edge_ids is None else [index, ptr, edge_ids]
        # `copy`, because a view would keep DGL's memory alive.
        index, ptr, *ids = (tensor.to(device, copy=True) for tensor in tensors)
        self.structure = Structure(index, ptr, ids[0] if ids else None, num_src, num_dst)
        self.nbytes = sum(tensor.nbytes for tensor in (index, ptr, *ids))
