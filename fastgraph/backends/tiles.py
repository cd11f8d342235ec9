"""Sums and attention by tensor cores, on tiles (:mod:`fastgraph.graphs.tiles`): rivals of rows.

Tiles are made on the CPU, once for each grouping of a graph, and only where a sample of the graph
and a model of the GPU say that they may be faster (:mod:`fastgraph.tune.tiles`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgraph.backends import reference
from fastgraph.backends.kernels import scales
from fastgraph.graphs.graph import Csr, Graph, beside
from fastgraph.graphs.memo import MEMO
from fastgraph.graphs.tiles import tiles_of
from fastgraph.tune.gpus import Sheet, sheet_of
from fastgraph.tune.tiles import (
    Fill,
    Product,
    predict_fill,
    why_not_attention,
    why_not_tiles,
    width_of_attention,
)

_CHUNK = 32
"""A window with more blocks is cut, so that no warp keeps all others waiting."""

_PACK_BYTES = 16


class _Prepared(NamedTuple):
    """Tiles on a device, and the list of its tasks; arguments of the native function."""

    col: Tensor
    bits: Tensor
    first: Tensor
    edge_id: Tensor
    num_windows: int
    num_cut: int
    tasks: Tensor


class _Known:
    """Of a graph, by transposition."""

    def __init__(self) -> None:
        self.fill: dict[bool, Fill] = {}
        self.tiles: dict[bool, _Prepared] = {}

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for t in self.tiles.values() for x in t if isinstance(x, Tensor))


def sheet_of_device(x: Tensor) -> Sheet | None:
    """The sheet of the GPU that a tensor is on."""
    return sheet_of(torch.cuda.get_device_name(x.device)) if x.is_cuda else None


class _OnTiles:
    """The base of the backends whose kernels work on tiles.

    Args:
        library: gives the native library; asked at each call.
        sheet: of the GPU that a tensor is on, if a model knows it.
    """

    results = ""
    """The name of the results in the error that says they are wrong."""

    def __init__(
        self,
        library: Callable[[], Any],
        sheet: Callable[[Tensor], Sheet | None] = sheet_of_device,
    ) -> None:
        self._library, self._sheet = library, sheet
        self._errors: dict[tuple[torch.device, torch.dtype], float] = {}

    def forget(self, graph: Graph, x: Tensor, transpose: bool) -> None:
        """Free the tiles of a grouping; they are made again where they are still used."""
        beside(graph, "tiles", _Known).tiles.pop(transpose, None)

    def error(self, device: torch.device, dtype: torch.dtype) -> float:
        """The largest error of a result, over what roundings of its factors allow."""
        raise NotImplementedError

    def _why_not(
        self, graph: Graph, x: Tensor, width: int, has_weights: bool, transpose: bool
    ) -> str | None:
        """Why tiles are not for so many channels that each edge gathers of nodes like ``x``."""
        sheet = self._sheet(x)
        if sheet is None:
            return "the model does not know this GPU"
        num_rows = graph.num_src if transpose else graph.num_dst
        product = Product(num_rows, len(x), graph.num_edges, width, x.dtype, has_weights)
        why_not = why_not_tiles(product, self._fill(graph, transpose), sheet)
        return why_not if why_not is not None else self._why_wrong(x)

    def _why_wrong(self, x: Tensor) -> str | None:
        """Why results on this device are not what they must be, found at the first question."""
        key = x.device, x.dtype
        if key not in self._errors:
            self._errors[key] = self.error(*key)
        error = self._errors[key]
        if error <= 1:
            return None
        return f"{self.results} on tiles are off by {error:.3g} times what is allowed"

    def _fill(self, graph: Graph, transpose: bool) -> Fill:
        known = beside(graph, "tiles", _Known)
        if transpose not in known.fill:
            known.fill[transpose] = predict_fill(_on_cpu(graph.grouped(transpose=transpose)))
        return known.fill[transpose]

    def _prepared(self, graph: Graph, transpose: bool) -> _Prepared:
        known = beside(graph, "tiles", _Known)
        prepared = known.tiles.get(transpose)
        if prepared is None:
            prepared = known.tiles[transpose] = self._prepare(graph, transpose)
            MEMO.recount()
        return prepared

    def _prepare(self, graph: Graph, transpose: bool) -> _Prepared:
        rows = graph.grouped(transpose=transpose)
        num_cols = graph.num_dst if transpose else graph.num_src
        tiles = tiles_of(_on_cpu(rows), num_cols)
        pieces = (tiles.ptr.diff() + (_CHUNK - 1)) // _CHUNK
        is_cut = pieces > 1
        num_windows, num_cut = pieces.numel(), int(is_cut.sum())
        device = rows.ptr.device
        with torch.inference_mode(False):  # what is made here must still serve training
            tasks = rows.col.new_empty((num_windows + int(pieces[is_cut].sum()), 4))
            self._library().make_tasks(tiles.ptr.to(device), _CHUNK, num_cut, tasks)
            return _Prepared(
                tiles.col.to(device),
                tiles.bits.to(device),
                tiles.first.to(device),
                tiles.edge_id.to(device),
                num_windows,
                num_cut,
                tasks,
            )


class TilesSpmm(_OnTiles):
    """The kernel of ``spmm`` (see :mod:`fastgraph.plugins.backend`) for what it :meth:`fits`."""

    results = "sums"

    def fits(
        self, graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool
    ) -> bool:
        """True if tiles may be faster for this product, as accurate as torch allows."""
        return self.why_not(graph, x, weight, reduce, transpose) is None

    def why_not(
        self, graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool
    ) -> str | None:
        """Why tiles are not for this product, or ``None`` if they may be faster."""
        # Factors of gathered nodes would be rounded as the features are.
        if reduce == "mean_adjoint" or (weight is not None and weight.dim() != 1):
            return "features of neighbours must have one factor, which is that of their edge"
        if not _is_packed(x):
            return f"rows of features must be whole packs of {_PACK_BYTES} bytes in aligned memory"
        return self._why_not(graph, x, x.shape[1], weight is not None, transpose)

    def __call__(
        self, graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, transpose: bool
    ) -> Tensor:
        row_scale, _ = scales(graph, reduce, transpose, x.dtype)
        out = x.new_empty((graph.num_src if transpose else graph.num_dst, x.shape[1]))
        weight = None if weight is None else weight.contiguous()
        prepared = self._prepared(graph, transpose)
        self._library().spmm_tiles(*prepared, weight, row_scale, x, out)
        return out

    def error(self, device: torch.device, dtype: torch.dtype) -> float:
        index, weight, x = (t.to(device) for t in _case())
        weight, x = weight.to(dtype), x.to(dtype)
        graph = Graph(index, len(x), _NODES)
        found = self(graph, x, weight, "sum", False)
        exact = reference.spmm(graph, x.double(), weight.double(), "sum", False)
        size = reference.spmm(graph, x.double().abs(), weight.double().abs(), "sum", False)
        # Of tf32, whose numbers have 10 bits; products of bfloat16 are exact, and so is their sum
        # but for what float32 loses.
        of_product = 2.0**-10 if dtype == torch.float32 else 2.0**-16
        return _over(found, exact, of_product * size + torch.finfo(dtype).eps * exact.abs())


class TilesAttention(_OnTiles):
    """The kernel of ``attention`` for what it :meth:`fits`.

    Its scores are those of float32 and it leaves the same statistics as the kernel of rows, so that
    the backward pass can be that of rows, than which it is never slower.
    """

    results = "weighted sums"

    def fits(self, *arguments: Any, addend: Tensor | None = None) -> bool:
        """True if tiles may be faster for this call, as accurate as torch allows."""
        return self.why_not(*arguments, addend=addend) is None

    def why_not(self, graph: Graph, *arguments: Any, addend: Tensor | None = None) -> str | None:
        """Why tiles are not for this call, or ``None`` if they may be faster."""
        query, key, value, edge, transpose, _, dropout, _, weights = arguments
        why_not = why_not_attention(key, edge is not None, dropout, weights)
        if why_not is not None:
            return why_not
        tensors = (query, key, value) if addend is None else (query, key, value, addend)
        if not all(map(_is_packed, tensors)):
            return f"heads must be whole packs of {_PACK_BYTES} bytes in aligned memory"
        return self._why_not(graph, key, width_of_attention(key), False, transpose)

    def __call__(
        self, graph: Graph, *arguments: Any, addend: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _, transpose, scale, *_ = arguments
        out = query.new_empty(query.shape)
        stats = query.new_empty((*query.shape[:2], 2), dtype=torch.float32)
        prepared, rows = self._prepared(graph, transpose), graph.grouped(transpose=transpose)
        tensors = (query, key, value, scale, out, stats, addend)
        self._library().attention_tiles(*prepared, rows.ptr, *tensors)
        return out, stats, query.new_empty((0, query.shape[1]))

    def error(self, device: torch.device, dtype: torch.dtype) -> float:
        index, _, x = _case()
        key, value = (t.to(device, dtype).unsqueeze(1) for t in (x[:, :32], x[:, 32:64]))
        query = key[:_NODES].contiguous()
        graph = Graph(index.to(device), len(x), _NODES)
        options = (None, False, 0.25, 0.0, 0, False)
        out, stats, _ = self(graph, query, key.contiguous(), value.contiguous(), *options)
        q, k, v = (t.double() for t in (query, key, value))
        exact, exact_stats, _ = reference.attention(graph, q, k, v, *options)
        size, _, _ = reference.attention(graph, q, k, v.abs(), *options)
        # Weights and values are rounded to 10 bits of tf32, or weights to 7 of bfloat16.
        of_weight = 2.0**-10 if dtype == torch.float32 else 2.0**-8
        of_score = 2.0**-16  # of float32
        allowed = (of_weight + of_score) * size + torch.finfo(dtype).eps * exact.abs()
        of_stats = of_score * (1 + exact_stats.abs())
        return max(_over(out, exact, allowed), _over(stats, exact_stats, of_stats))


def _is_packed(x: Tensor) -> bool:
    """True if the last dimension has whole packs in aligned memory."""
    return x.shape[-1] * x.element_size() % _PACK_BYTES == 0 and x.data_ptr() % _PACK_BYTES == 0


def _over(found: Tensor, exact: Tensor, allowed: Tensor) -> float:
    """The largest error, over what is allowed."""
    error = (found.double() - exact).abs() / allowed.clamp(min=1e-30)
    return float(error.nan_to_num(nan=2).max())


_NODES = 100


@functools.cache
def _case() -> tuple[Tensor, Tensor, Tensor]:
    """Edges with duplicates, windows without, and one that is cut; weights and features."""
    generator = torch.Generator().manual_seed(0)
    hub = torch.stack([torch.arange(500, device="cpu"), torch.full((500,), 3, device="cpu")])
    edges = torch.randint(60, (2, 400), generator=generator, device="cpu")
    index = torch.cat([hub, edges], 1)
    weight = torch.randn(index.shape[1], generator=generator, device="cpu")
    return index, weight, torch.randn(500, 72, generator=generator, device="cpu")


def _on_cpu(rows: Csr) -> Csr:
    """The edges by row, for functions of the CPU."""
    edge_id = None if rows.edge_id is None else rows.edge_id.cpu()
    return Csr(rows.ptr.cpu(), rows.col.cpu(), edge_id)
