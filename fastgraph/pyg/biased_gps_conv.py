"""``GPSConv`` whose attention takes a bias of pairs of nodes, or takes turns, for PyG."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import MultiheadAttention
from torch_geometric.nn.conv import GPSConv as OfPyG

from fastgraph.layers.multihead import module_refusal, self_attention
from fastgraph.nn.dual_attention import DualInterleavedAttention
from fastgraph.nn.dual_pattern import DualPattern
from fastgraph.plugins.refusal import Refusal
from fastgraph.pyg.gps_conv import graph_offsets, layer_output


class GPSConv(OfPyG):  # type: ignore[misc]  # PyG has no types
    """PyG's ``GPSConv``, whose attention of all pairs may have a bias, or be one turn of two.

    Constructor, parameters and ``state_dict`` are those of ``torch_geometric.nn.GPSConv``
    (Rampasek et al., "Recipe for a general, powerful, scalable graph transformer", NeurIPS 2022),
    and so is the output of a call without a bias. With one, attention is
    :func:`fastgraph.ops.dense_attention`, on any device, enabled or not: nothing is padded, and
    nothing of the size of all pairs is made beside the bias. Distances within each graph as
    ``pair_type``, with a parameter ``[distances, heads]`` that all layers share, are the spatial
    encoding of Graphormer (Ying et al., NeurIPS 2021).

    ``attn_type="dual"`` is :class:`fastgraph.nn.DualInterleavedAttention`, along the edges in some
    turns and of all pairs in others (TorchGT, SC 2024). ``attn_kwargs`` are its options: without
    ``layers`` and ``layer``, or another schedule, all turns are of all pairs. The ``state_dict`` is
    that of ``"multihead"`` unless ``type_bias`` adds a parameter, so that either can go on from the
    other.
    """

    attn: Any

    def __init__(
        self,
        channels: int,
        conv: Any,
        heads: int = 1,
        dropout: float = 0.0,
        act: str = "relu",
        act_kwargs: dict[str, Any] | None = None,
        norm: str | None = "batch_norm",
        norm_kwargs: dict[str, Any] | None = None,
        attn_type: str = "multihead",
        attn_kwargs: dict[str, Any] | None = None,
    ) -> None:
        is_dual = attn_type == "dual"
        of_pyg = ("multihead", None) if is_dual else (attn_type, attn_kwargs)
        super().__init__(
            channels, conv, heads, dropout, act, act_kwargs, norm, norm_kwargs, *of_pyg
        )
        if is_dual:
            self.attn_type = attn_type
            self.attn = DualInterleavedAttention(channels, heads, **(attn_kwargs or {}))

    def forward(
        self,
        x: Tensor,
        edge_index: Any,
        batch: Tensor | None = None,
        *,
        attn_bias: Tensor | None = None,
        pair_type: Tensor | None = None,
        pattern: DualPattern | None = None,
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
            pattern: of the nodes, for ``attn_type="dual"``, as
                :func:`fastgraph.nn.dual_pattern` makes it without a token; default: made of
                ``edge_index``, a tensor ``[2, E]``, and ``batch``, once. ``batch`` is that of the
                pattern, and may be missing where ``norm`` does not ask for it.
            kwargs: further arguments of ``conv``.

        Raises:
            TypeError: ``edge_index`` is no tensor of edges, attention is ``dual``, and there is no
                pattern.
            ValueError: attention is not ``multihead``, or a ``MultiheadAttention`` that computes
                something else than attention of all pairs; ``batch`` is not ascending, or not
                that of ``pattern``; or the bias has the wrong shape, dtype or device.
            IndexError: ``pair_type`` holds a type that the table lacks.
        """
        if isinstance(self.attn, DualInterleavedAttention):
            if attn_bias is not None or pair_type is not None:
                raise ValueError(
                    "attn_bias: expected None with attn_type 'dual', whose biases are by types of "
                    "pairs, attn_kwargs={'type_bias': True}, got a tensor"
                )
            if pattern is not None:
                _check_batch(pattern, batch, self.norm_with_batch)
            attend = partial(_in_turns, self.attn, x, edge_index, batch, pattern)
            return layer_output(self, x, edge_index, batch, kwargs, attend)
        if pattern is not None:
            raise ValueError(f"pattern: expected None with attn_type {self.attn_type!r}, got one")
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


def _check_batch(pattern: DualPattern, batch: Tensor | None, is_normalised: bool) -> None:
    """Raise ``ValueError`` if a batch has other graphs than a pattern beside it."""
    if batch is None:
        if is_normalised and pattern.num_graphs > 1:
            raise ValueError(
                f"batch: expected the graphs of the pattern, {pattern.num_graphs}, for norm, "
                "which is by graphs, got None"
            )
    elif not torch.compiler.is_compiling() and not torch.equal(batch, pattern.graph_of_nodes):
        raise ValueError("batch: expected the graphs of the pattern, got others")


def _in_turns(
    attention: DualInterleavedAttention,
    x: Tensor,
    edge_index: Any,
    batch: Tensor | None,
    pattern: DualPattern | None,
) -> Tensor:
    """Attention of the nodes, ``[nodes, channels]``."""
    if pattern is not None:
        out = attention(x, pattern)
    elif isinstance(edge_index, Tensor) and edge_index.layout == torch.strided:
        out = attention(x, edge_index, batch)
    else:
        raise TypeError(
            "edge_index: expected a tensor [2, E] with attn_type 'dual', or a pattern besides, got "
            f"{type(edge_index).__name__}"
        )
    assert isinstance(out, Tensor)  # there are no tokens
    return out
