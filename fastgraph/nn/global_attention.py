"""Attention in its global formulation: one equation for all nodes, on a sparse matrix.

After "High-Performance and Programmable Attentional Graph Neural Networks with Global Tensor
Formulations" (SC 2023). No matrix of nodes times nodes is made: scores exist where ``A`` has
entries. An activation follows as a layer of its own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import fastgraph.sparse as fgs
from fastgraph.layers.arguments import check_integers, check_numbers
from fastgraph.ops.library import is_defined_by, reduces_on_ranks
from fastgraph.sparse import SparseMatrix


class _Global(nn.Module):
    """The parameters and the last product of all layers here."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        check_integers(in_channels=in_channels, out_channels=out_channels)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.weight = nn.Parameter(torch.empty(in_channels, out_channels))
        nn.init.xavier_uniform_(self.weight)

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        nn.init.xavier_uniform_(self.weight)

    def _aggregated(self, scores: SparseMatrix, h: Tensor) -> Tensor:
        """``scores @ h @ weight``, with the narrower features aggregated.

        On ranks with less of them sent: those that the scores need are sent once for both. By halo
        only these are, on a grid also what is aggregated.
        """
        width = self.out_channels
        if is_defined_by(h):
            width = 2 * width if reduces_on_ranks(h) else self.in_channels
        if width < self.in_channels:
            return fgs.spmm(scores, h @ self.weight)
        return fgs.spmm(scores, h) @ self.weight

    def extra_repr(self) -> str:
        """The sizes, as they are printed."""
        return f"{self.in_channels}, {self.out_channels}"


class GlobalVA(_Global):
    r"""Vanilla attention, :math:`(A \odot H H^T) H W`: scores are dot products.

    Args:
        in_channels: of the features.
        out_channels: of the result.
    """

    def forward(self, a: SparseMatrix, h: Tensor) -> Tensor:
        """The layer's result.

        Args:
            a: ``[n, n]``, values ``[nnz]``; row ``i`` has the entries of the neighbours of node
                ``i``, which weigh their scores.
            h: ``[n, in_channels]``.

        Returns:
            ``[n, out_channels]``.

        Raises:
            AssertionError, RuntimeError: as for :func:`fastgraph.sparse.sddmm`.
        """
        return self._aggregated(fgs.sddmm(a, h, h.T), h)


class GlobalAGNN(_Global):
    r"""AGNN without softmax, :math:`(A \odot H H^T \oslash n n^T) H W`: scores are cosines.

    :math:`n` holds the norms of the rows of :math:`H`. A row of zeros has cosine 0 with all.

    Args:
        in_channels: of the features.
        out_channels: of the result.
    """

    def forward(self, a: SparseMatrix, h: Tensor) -> Tensor:
        """The layer's result; arguments as for :meth:`GlobalVA.forward`."""
        norm = torch.linalg.vector_norm(h, dim=1, keepdim=True)
        is_zero = norm == 0
        if is_defined_by(h):  # what ranks send of the rows is that of the features then
            inverse = torch.where(is_zero, 0.0, 1 / torch.where(is_zero, 1.0, norm)).squeeze(1)
            scores = fgs.sddmm(a, h, h.T) * (fgs.rows(inverse) * fgs.cols(inverse))
        else:
            unit = torch.where(is_zero, 0.0, h / torch.where(is_zero, 1.0, norm))
            scores = fgs.sddmm(a, unit, unit.T)
        return self._aggregated(scores, h)


class GlobalGAT(_Global):
    r"""Graph attention, :math:`\mathrm{sm}(A \odot \sigma(U a 1^T + 1 (U a')^T)) U`.

    :math:`U` is :math:`H W`, :math:`\sigma` LeakyReLU, and the softmax that of each row's entries.

    Args:
        in_channels: of the features.
        out_channels: of the result.
        negative_slope: of LeakyReLU.
    """

    def __init__(self, in_channels: int, out_channels: int, negative_slope: float = 0.2) -> None:
        super().__init__(in_channels, out_channels)
        check_numbers("a number", math.isfinite, negative_slope=negative_slope)
        self.negative_slope = negative_slope
        self.att_row = nn.Parameter(torch.empty(out_channels))
        self.att_col = nn.Parameter(torch.empty(out_channels))
        self._reset_attention()

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        super().reset_parameters()
        self._reset_attention()

    def _reset_attention(self) -> None:
        # As Glorot's, of a matrix from the channels of both ends to one score.
        bound = (6 / (1 + 2 * self.out_channels)) ** 0.5
        nn.init.uniform_(self.att_row, -bound, bound)
        nn.init.uniform_(self.att_col, -bound, bound)

    def forward(self, a: SparseMatrix, h: Tensor) -> Tensor:
        """The layer's result; arguments as for :meth:`GlobalVA.forward`."""
        u = h @ self.weight
        both = fgs.rows(u @ self.att_row) + fgs.cols(u @ self.att_col)
        scores = a * nn.functional.leaky_relu(both, self.negative_slope)
        return fgs.spmm(scores.softmax(), u)
