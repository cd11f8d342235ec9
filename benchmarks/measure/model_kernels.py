"""Which kernels the passes of a layer start, and what the table of machine code says of each.

Kernels are found in ``tests/cuda/registers.json`` by what their names say: the kernel, the element
type, the pass, and how many values, lanes and packs a group has. So other kernels and other figures
need no change here, unless an operator starts other kernels than it did.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TOGETHER = "HeadsOfNode"
"""The layout in which groups of a warp take the heads of one node."""
ELEMENTS = {"float32": "float", "bfloat16": "bfloat16"}
SIZES = {"float32": 4, "bfloat16": 2}
_PACK_BYTES = 16
_LOOP_ARCHITECTURE = "sm_90"
"""The only one whose machine code is read; its loops stand for those of the others."""


class MissingKernelError(LookupError):
    """The table does not say what a prediction needs."""


@dataclass(frozen=True)
class Figures:
    """Of a kernel: what a group holds, registers of a thread, and its busiest loop."""

    name: str
    values: int
    lanes: int
    packs: int
    registers: int
    instructions: int
    loads: int
    waits: int

    @property
    def width(self) -> int:
        """Columns that a group holds."""
        return self.values * self.lanes * self.packs

    @property
    def of_round(self) -> tuple[int, int]:
        """Instructions and waits of the loop."""
        return self.instructions, self.waits


Table = Mapping[str, Mapping[str, list[int]]]


def find(
    table: Table, kernel: str, words: tuple[str, ...], dtype: str, width: int, architecture: str
) -> Figures:
    """The kernel that takes rows of a width, or the widest where none holds a whole row.

    Args:
        kernel: its name.
        words: what its template arguments have in this order, besides the element type.
        dtype: ``float32`` or ``bfloat16``.
        width: of a row, or of a head of it.
        architecture: whose registers to take; those of the loops' where the table has no others.

    Raises:
        MissingKernelError: there is none, or none whose loop is known, or several that fit alike.
    """
    values = _PACK_BYTES // SIZES[dtype]
    found: dict[tuple[int, int], list[Figures]] = {}
    for name, by_architecture in table.items():
        base, _, arguments = name.partition("<")
        tokens = re.findall(r"[\w()]+", arguments)
        if base != kernel or ELEMENTS[dtype] not in tokens or not _has(tokens, words):
            continue
        if TOGETHER in tokens and TOGETHER not in words:
            continue
        numbers = [int(token) for token in tokens if token.isdigit()]
        if numbers[:1] != [values]:
            continue
        of_loop = by_architecture[_LOOP_ARCHITECTURE]
        registers = by_architecture.get(architecture, of_loop)[0]
        lanes, packs = numbers[1], numbers[2] if len(numbers) > 2 else 1
        loop = of_loop[4:] or [0, 0, 0]
        figures = Figures(name, values, lanes, packs, registers, *loop)
        found.setdefault((lanes, packs), []).append(figures)
    if not found:
        raise MissingKernelError(f"no {kernel} of {dtype} with {', '.join(words)} in the table")
    wide_enough = [size for size in found if values * size[0] * size[1] >= width]
    candidates = found[min(wide_enough) if wide_enough else max(found)]
    if len(candidates) > 1:
        names = "; ".join(figures.name for figures in candidates)
        raise MissingKernelError(f"several kernels fit rows of {width}: {names}")
    if not candidates[0].loads:
        raise MissingKernelError(f"no loop of {candidates[0].name} in the table")
    return candidates[0]


def _has(tokens: list[str], words: tuple[str, ...]) -> bool:
    left = iter(tokens)
    return all(word in left for word in words)


@dataclass(frozen=True)
class Gather:
    """A kernel that walks over the entries of rows and gathers for each.

    Attributes:
        kernel: its name.
        words: see :func:`find`.
        rows: of features, gathered for each entry.
        tables: arrays from which they come, each as large as the features.
        transpose: whether it walks over the transposed graph.
        of_head: whether groups hold a head, not a row.
        streamed: rows of features for each node that are read or written once.
        entry_bytes: read for each entry besides, at every head.
        loop: another kernel whose loop gathers, where the busiest one of this does not.
        pieces_only: whether it walks over pieces of long rows alone.
        merged: whether the pieces of long rows are merged by another kernel.
        codes: whether it gathers a byte for each value first: the backward pass of extrema.
        together: whether there is a kernel for all heads of a node, where the cache has room.
    """

    kernel: str
    words: tuple[str, ...] = ()
    rows: int = 1
    tables: int = 1
    transpose: bool = False
    of_head: bool = False
    streamed: int = 1
    entry_bytes: int = 8
    loop: str | None = None
    pieces_only: bool = False
    merged: bool = True
    codes: bool = False
    together: bool = False


@dataclass(frozen=True)
class Stream:
    """A kernel that reads and writes arrays from end to end.

    Attributes:
        kernel: its name, or what it is for.
        elements: for each value of the features, how many of their dtype.
        bytes: for each value of the features, besides.
        edge_bytes: for each edge.
    """

    kernel: str
    elements: float = 0
    bytes: float = 0
    edge_bytes: float = 0


Launch = Gather | Stream
Passes = dict[str, tuple[Launch, ...]]


def _confirmed(results: int, weight_bytes: int = 0) -> tuple[Stream, ...]:
    """The kernels that confirm a call's edges by their fingerprint; see ``graphs/witness.py``."""
    return (
        Stream("check_content", edge_bytes=16 + weight_bytes),
        Stream("flag to the host"),
        *(Stream("fill_with_nan_if") for _ in range(results)),
    )


def _sums(entry_bytes: int, weight_bytes: int) -> Passes:
    forward = Gather("spmm_rows", entry_bytes=entry_bytes)
    backward = Gather("spmm_rows", transpose=True, entry_bytes=entry_bytes)
    confirmed = _confirmed(1, weight_bytes)
    return {"forward": (*confirmed, forward), "backward": (*confirmed, backward)}


def _attention(name: str, rows: tuple[int, int, int], added: int) -> Passes:
    """Of an operator whose passes gather so many rows: forward, of destinations, of sources."""
    # Without features of edges and, of attention, without a bias.
    edges = {"Gat": (), "Gatv2": ("false",), "Attention": ("false", "NoBias")}[name]
    forward, of_destinations, of_sources = rows
    whole: dict[str, Any] = {"of_head": True}
    destinations = (f"{name}Destinations", *edges)
    return {
        "forward": (
            *_confirmed(2),
            Gather(
                "softmax_rows",
                (f"{name}Scores", *edges),
                forward,
                streamed=2,
                together=name == "Gatv2",
                **whole,
            ),
        ),
        "backward": (
            *_confirmed(3),
            Gather(
                "destination_rows",
                destinations,
                of_destinations,
                streamed=3,
                loop="piece_deltas" if name == "Gat" else None,
                merged=name != "Gat",
                **whole,
            ),
            Gather(
                "source_rows",
                (f"{name}Sources", *edges),
                of_sources,
                tables=min(2, of_sources),
                transpose=True,
                streamed=2,
                entry_bytes=8 + 12,  # two numbers of a softmax and delta
                **whole,
            ),
            *(Stream("gradients added", elements=3) for _ in range(added)),
        ),
    }


_GAT = _attention("Gat", (1, 1, 1), 0)
_GATV2 = _attention("Gatv2", (1, 1, 2), 1)

# As ``benchmarks/gpu.py`` measures them: message passing alone, of features that are queries, keys
# and values, or sources and destinations, in one, so that their gradients are added.
LAYERS: dict[str, Passes] = {
    # Columns; for weights also the number of the edge and its weight, of which a sector is read.
    "GCN": _sums(4 + 8 + 32, 4),
    "SAGE-mean": _sums(4, 0),
    "SAGE-max": {
        # (Record)1 are ties: their number or the edge that has won.
        "forward": (
            *_confirmed(1),
            Gather("extremum_rows", ("(Record)1", "false"), streamed=2, entry_bytes=12),
        ),
        "backward": (
            *_confirmed(1),
            Stream("divide_packs", elements=2, bytes=4),
            Stream("code_winners", elements=1, bytes=5),
            Gather(
                "backward_rows", ("false",), transpose=True, streamed=2, entry_bytes=12, codes=True
            ),
        ),
    },
    "GATv2": {
        "forward": _GATV2["forward"],
        "backward": (*_GATV2["backward"], Stream("add_rows")),
    },
    "GAT": {
        "forward": (Stream("head_scores_nodes", elements=1), *_GAT["forward"]),
        "backward": (
            *_GAT["backward"],
            Stream("head_scores_grad_x", elements=3),
            Stream("head_scores_sums", elements=1),
            Stream("add_rows"),
        ),
    },
    "Transformer": _attention("Attention", (2, 2, 2), 2),
}
WITH_SELF_LOOPS = ("GCN", "GATv2", "GAT")
HEADS = 4
