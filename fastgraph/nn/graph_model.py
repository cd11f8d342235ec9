"""A base of graph transformers: results for nodes or graphs, on edges or patterns."""

from __future__ import annotations

from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from fastgraph.graphs.offsets import offsets_of
from fastgraph.layers.arguments import check_choices, check_integers
from fastgraph.nn.dual_pattern import EDGE, DualPattern, refuse_beside_pattern
from fastgraph.nn.transformer_layer import TransformerLayer


class GraphModel(nn.Module):
    """A transformer on graphs, whose subclasses make ``self.layers``.

    Args:
        channels: of layers.
        layers: how many, at least 1.
        level: of results, "node" or "graph".
        max_degree: larger degrees count as this in embeddings, which ``None`` leaves out.

    Raises:
        ValueError: an argument is out of its range.
    """

    has_token: ClassVar[bool]
    layers: nn.ModuleList
    in_degrees: nn.Embedding | None
    out_degrees: nn.Embedding | None

    def __init__(self, channels: int, layers: int, level: str, max_degree: int | None) -> None:
        super().__init__()
        check_choices(level=(level, ("node", "graph")))
        check_integers(channels=channels, layers=layers)
        check_integers(or_none=True, max_degree=max_degree)
        self.level, self.max_degree = level, max_degree
        self.in_degrees = self.out_degrees = None
        if max_degree is not None:
            self.in_degrees = nn.Embedding(max_degree + 1, channels)
            self.out_degrees = nn.Embedding(max_degree + 1, channels)

    def pattern(
        self,
        edge_index: Tensor,
        num_nodes: int,
        batch: Tensor | None = None,
        num_graphs: int | None = None,
        *,
        hops: int = 1,
        types: Tensor | None = None,
    ) -> DualPattern:
        """The pattern of a batch, as layers take it; see :func:`fastgraph.nn.dual_pattern`."""
        first = cast(TransformerLayer, self.layers[0]).self_attn
        return first.pattern(edge_index, num_nodes, batch, num_graphs, self.has_token, hops, types)

    def pattern_of_call(
        self,
        num_nodes: int,
        edges: Tensor | DualPattern,
        batch: Tensor | None,
        num_graphs: int | None,
        types: Tensor | None,
    ) -> DualPattern:
        """The pattern that ``forward`` is given, or that of its edges."""
        if isinstance(edges, DualPattern):
            refuse_beside_pattern(batch=batch, num_graphs=num_graphs, types=types)
            return edges
        return self.pattern(edges, num_nodes, batch, num_graphs, types=types)

    def with_degrees(
        self, h: Tensor, pattern: DualPattern, given: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Rows of nodes, with embeddings of their degrees if the model has these.

        Args:
            h: ``[nodes, channels]``.
            pattern: of the nodes.
            given: the degrees, int64 ``[nodes]`` each; default: those of the pattern.

        Raises:
            ValueError: degrees are no such tensors, below 0, or not expected.
        """
        if self.in_degrees is None or self.out_degrees is None or self.max_degree is None:
            if given is not None:
                raise ValueError("degrees: expected None without max_degree, got some")
            return h
        if given is not None:
            _check_degrees(given, len(h))
        into, out_of = degrees(pattern) if given is None else given
        h = h + self.in_degrees(into.clamp(max=self.max_degree))
        both: Tensor = h + self.out_degrees(out_of.clamp(max=self.max_degree))
        return both


def _check_degrees(given: tuple[Tensor, Tensor], nodes: int) -> None:
    """Raise a ValueError unless these are degrees of so many nodes."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise ValueError(f"degrees: expected two tensors, got {type(given).__name__}")
    for found in given:
        if not isinstance(found, Tensor):
            raise ValueError(f"degrees: expected two tensors, got {found!r}")
        if found.dtype != torch.int64 or list(found.shape) != [nodes]:
            raise ValueError(
                f"degrees: expected int64 [{nodes}] twice, got {found.dtype} {list(found.shape)}"
            )
        # The host does not wait for a device, and compiled code does not depend on values.
        is_known = found.device.type == "cpu" and not torch.compiler.is_compiling()
        if nodes and is_known and int(found.min()) < 0:
            raise ValueError(f"degrees: expected numbers from 0 on, got {int(found.min())}")


def degrees(pattern: DualPattern) -> tuple[Tensor, Tensor]:
    """The numbers of edges into and out of each node, int64 ``[nodes]`` each.

    Edges count once, and no loops, tokens, steps of the path or pairs that are farther apart.
    """
    is_edge = pattern.types == EDGE
    into = offsets_of(is_edge.long())[pattern.ptr].diff()[: pattern.num_nodes]
    out_of = torch.bincount(pattern.sources[is_edge], minlength=pattern.num_nodes)
    return into, out_of
