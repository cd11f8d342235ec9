"""``GPSConv`` whose attention takes a bias of pairs of nodes, under PyG's interface."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import MultiheadAttention
from torch_geometric.nn.conv import GPSConv as OfPyG

from fastgraph.layers.multihead import module_refusal, self_attention
from fastgraph.plugins.refusal import Refusal
from fastgraph.pyg.gps_conv import graph_offsets, layer_output


class GPSConv(OfPyG):  # type: ignore[misc]  # PyG has no types
    """PyG's ``GPSConv``, whose attention of all pairs may have a bias.

    Constructor, parameters and ``state_dict`` are those of ``torch_geometric.nn.GPSConv``
    (Rampasek et al., "Recipe for a general, powerful, scalable graph transformer", NeurIPS 2022),
    and so is the output of a call without a bias. With one, attention is
    :func:`fastgraph.ops.dense_attention`, on any device, enabled or not: nothing is padded, and
    nothing of the size of all pairs is made beside the bias. Distances within each graph as
    ``pair_type``, with a parameter ``[distances, heads]`` that all layers share, are the spatial
    encoding of Graphormer (Ying et al., NeurIPS 2021).
    """

    def forward(
        self,
        x: Tensor,
        edge_index: Any,
        batch: Tensor | None = None,
        *,
        attn_bias: Tensor | None = None,
        pair_type: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The layer's output, ``[nodes, channels]``.

        Pairs are all pairs of nodes within each graph, numbered graph by graph, query by query, key
        by key: of graphs of n nodes the sum of their n^2.

        Args:
            x: ``[nodes, channels]``.
            edge_index: as ``conv`` takes it.
            batch: the graph of each node, int64 ``[nodes]``, ascending; default: one graph.
            attn_bias: added to the scores of attention, ``[pairs, heads]``, or with ``pair_type`` a
                table ``[types, heads]``. -infinity leaves a pair out.
            pair_type: which row of the table each pair takes, uint8, int16, int32 or int64
                ``[pairs]``.
            kwargs: further arguments of ``conv``.

        Raises:
            ValueError: attention is not ``multihead``, or a ``MultiheadAttention`` that computes
                something else than attention of all pairs; ``batch`` is not ascending; or the bias
                has the wrong shape, dtype or device.
            IndexError: ``pair_type`` holds a type that the table lacks.
        """
        if attn_bias is None and pair_type is None:
            return super().forward(x, edge_index, batch, **kwargs)  # type: ignore[no-any-return]
        if attn_bias is None:
            raise ValueError("pair_type must be None without attn_bias, got a tensor")
        if not isinstance(self.attn, MultiheadAttention):
            raise ValueError(
                f"attn_bias needs attn_type 'multihead', got {self.attn_type!r}, which has no pairs"
            )
        ptr = graph_offsets(x, batch) if len(x) else x.new_zeros(1, dtype=torch.int64)
        refusal = module_refusal(self.attn)
        if refusal is not None or isinstance(ptr, Refusal):
            raise ValueError(f"GPSConv cannot compute with attn_bias: {refusal or ptr}")
        attend = partial(self_attention, self.attn, x, ptr, attn_bias, pair_type)
        return layer_output(self, x, edge_index, batch, kwargs, attend)
