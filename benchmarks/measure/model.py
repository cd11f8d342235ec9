"""How long a kernel takes, from its machine code, a graph's degrees and a GPU's data sheet.

The longest of five times, and what starting a kernel takes:

- to issue the instructions of all warps;
- to read what is gathered from the second cache;
- to move what does not stay there from and to memory;
- to wait: each warp for its batches of loads, as many warps at a time as registers allow;
- for the warp with most work, alone.

Nothing here was fitted to measurements of these kernels, of which there are none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fastgraph.tune.gpus import SCHEDULERS, USABLE, WARP, Sheet
from measure.model_kernels import (
    HEADS,
    LAYERS,
    SIZES,
    TOGETHER,
    Figures,
    Gather,
    MissingKernelError,
    Stream,
    Table,
    find,
)
from measure.model_slots import Rows

# Schedulers find a warp that can go on in so many of all cycles; the share that well-filled kernels
# which mix arithmetic, shuffles and loads reach.
ISSUED = 0.7
# Cycles from one instruction of a warp to its next, when it waits for no memory: results come after
# four, and about every second instruction needs the one before it.
CYCLES_ALONE = 2.0
# Outside of the busiest loop, read off the code of spmm_rows and softmax_rows for sm_90: what a
# warp does for each span and each batch of entries, and how often it waits for memory there.
SPAN = (200, 3)
BATCH = (50, 1)
# Microseconds between kernels of one stream that were queued before.
LAUNCH = 2.0
# In the backward pass of extrema: the loop of those lanes that may have won has so many
# instructions, and runs 0.23 times for each entry of tolokers, where 1.44 of 32 lanes look.
_LOOK_INSTRUCTIONS = 104
_LOOKS_OF_LANE = 0.23 / 1.44
_LOOKED_AT_ONCE = 2
_CODED_DEGREE = 8


@dataclass(frozen=True)
class Graph:
    """Both directions of a graph: rows of destinations, and of sources."""

    destinations: Rows
    sources: Rows

    def rows(self, transpose: bool) -> Rows:
        return self.sources if transpose else self.destinations


@dataclass(frozen=True)
class Prediction:
    """Of one kernel, in milliseconds. ``bound`` is what takes longest."""

    kernel: str
    milliseconds: float
    bound: str


def predict(
    table: Table, sheet: Sheet, graph: Graph, layer: str, direction: str, width: int, dtype: str
) -> list[Prediction]:
    """Every kernel of a pass of a layer.

    Raises:
        MissingKernelError: the table does not know one of them.
    """
    found: list[Prediction] = []
    for launch in LAYERS[layer][direction]:
        if isinstance(launch, Stream):
            nodes = len(graph.destinations.lengths)
            size = nodes * width * (launch.elements * SIZES[dtype] + launch.bytes)
            size += graph.destinations.entries * launch.edge_bytes
            milliseconds = size / sheet.dram_gb_per_s / 1e6 + LAUNCH / 1e3
            found.append(Prediction(launch.kernel, milliseconds, "memory" if size else "launch"))
        else:
            found += _gathered(table, sheet, graph, launch, width, dtype)
    return found


def _gathered(
    table: Table, sheet: Sheet, graph: Graph, launch: Gather, width: int, dtype: str
) -> Iterator[Prediction]:
    """A kernel that gathers, and the one that merges pieces of long rows, if there are any."""
    rows = graph.rows(launch.transpose)
    if launch.pieces_only and not (rows.num_pieces and _is_known(table, launch.kernel)):
        return
    heads = HEADS if launch.of_head else 1
    together = _is_together(table, sheet, rows, launch, width, dtype)
    words = (TOGETHER, *launch.words) if together else launch.words
    wanted = (words, dtype, width // heads, sheet.architecture)
    figures = find(table, launch.loop or launch.kernel, *wanted)
    if launch.loop is not None:
        registers = find(table, launch.kernel, *wanted).registers
        figures = replace(figures, registers=max(registers, figures.registers))
    parts = heads * -(-(width // heads) // figures.width)
    if together:
        parts = heads * figures.lanes // WARP
    gathering = _Gathering(sheet, rows, launch, figures, parts, together, width * SIZES[dtype])
    times = gathering.times()
    bound = max(times, key=times.__getitem__)
    yield Prediction(launch.kernel, times[bound] + LAUNCH / 1e3, bound)
    if rows.num_pieces and launch.merged:
        yield _merged(sheet, rows, launch.pieces_only, width)


def _is_known(table: Table, kernel: str) -> bool:
    return any(name.startswith(f"{kernel}<") for name in table)


def _is_together(
    table: Table, sheet: Sheet, rows: Rows, launch: Gather, width: int, dtype: str
) -> bool:
    """True if groups of a warp take the heads of one node: ``with_heads`` of edge_softmax.cuh."""
    packs = width // HEADS * SIZES[dtype] // 16
    gathered = launch.rows * len(rows.lengths) * width * SIZES[dtype]
    return (
        launch.together
        and rows.order != "uncut"
        and dtype == "float32"
        and 8 < packs <= 32
        and gathered <= USABLE * sheet.cache_bytes
        and _is_known(table, f"{launch.kernel}<{TOGETHER}")
    )


class _Gathering:
    """A kernel that gathers for the entries of rows.

    Args:
        parts: warps that walk over the same entries: for other heads, or parts of the columns.
        together: whether the groups of a warp take the heads of one node, and blocks all columns.
        row_bytes: of the features of a node.
    """

    def __init__(
        self,
        sheet: Sheet,
        rows: Rows,
        launch: Gather,
        figures: Figures,
        parts: int,
        together: bool,
        row_bytes: int,
    ) -> None:
        self.sheet, self.rows, self.launch, self.figures = sheet, rows, launch, figures
        self.parts, self.row_bytes = parts, row_bytes
        # Blocks at work take one part of the columns, and so do those that gather beside them.
        self.turns = 1 if together else parts
        self.at_once = max(1, round(figures.loads / (launch.rows * figures.packs)))
        self.walk = rows.walk(
            figures.lanes, self.at_once, pieces_only=launch.pieces_only, alone=together
        )

    def times(self) -> dict[str, float]:
        """Milliseconds by what they are spent on."""
        looks, gathered = self._of_entries()
        table = len(self.rows.lengths) * self.row_bytes * self.launch.tables
        hit = self.sheet.hit(table, self.turns)
        wait = hit * self.sheet.cache_ns + (1 - hit) * self.sheet.dram_ns
        return {
            "issue": self._issue(looks),
            **self._moved(gathered, table, hit),
            **self._waited(wait),
        }

    def _of_entries(self) -> tuple[float, float]:
        """Instructions besides the loop's, and bytes that are gathered, for each entry."""
        if not self.launch.codes:
            return 0.0, self.launch.rows * self.row_bytes
        degree = self.rows.entries / max(1, len(self.rows.lengths))
        if degree < _CODED_DEGREE:  # all entries are looked at
            return _LOOK_INSTRUCTIONS / _LOOKED_AT_ONCE, 2 * self.row_bytes
        values, lanes = self.figures.values, self.row_bytes / 16
        # Lanes that see a code of one of their values: it has won, or another edge has the code.
        looking = lanes * min(1.0, values * (1 / degree + 1 / 255))
        runs = min(1.0, looking * _LOOKS_OF_LANE)
        return runs * _LOOK_INSTRUCTIONS, lanes * values + looking * 2 * 32

    def _issue(self, looks: float) -> float:
        of_round = self.figures.instructions + looks * self.at_once
        walk = self.walk
        count = walk.iterations * of_round + walk.batches * BATCH[0] + walk.warps * SPAN[0]
        slots = self.sheet.multiprocessors * SCHEDULERS * ISSUED * self.sheet.gigahertz * 1e9
        return 1e3 * self.parts * count / slots

    def _moved(self, gathered: float, table: int, hit: float) -> dict[str, float]:
        entries, launch = self.rows.entries, self.launch
        read = entries * (gathered + self.parts * launch.entry_bytes)
        streamed = len(self.rows.lengths) * self.row_bytes * launch.streamed
        streamed += entries * launch.entry_bytes
        return self.sheet.moved(entries * gathered, read, streamed, table, hit)

    def _waited(self, wait: float) -> dict[str, float]:
        """Of all warps, as many at a time as fit, and of the longest alone."""
        walk, sheet, figures = self.walk, self.sheet, self.figures

        def milliseconds(warps: int, batches: int, rounds: int) -> float:
            terms = ((warps, *SPAN), (batches, *BATCH), (rounds, *figures.of_round))
            return sum(
                count * (instructions * CYCLES_ALONE / sheet.gigahertz + waits * wait) / 1e6
                for count, instructions, waits in terms
            )

        together = sheet.multiprocessors * sheet.warps_at_work(figures.registers)
        everyone = milliseconds(walk.warps, walk.batches, walk.iterations)
        return {
            "waiting": self.parts * everyone / together,
            "longest warp": milliseconds(1, walk.longest_batches, walk.longest),
        }


def _merged(sheet: Sheet, rows: Rows, one_value: bool, width: int) -> Prediction:
    """The pieces of long rows, four at a time, by the block that has most of them."""
    values = HEADS if one_value else width
    columns = -(-values // 128)
    waits = sum(2 + -(-count // 4) for count in rows.merged_in_series())
    of_block = waits * sheet.cache_ns * (1 if columns == 1 else 2)
    moved = rows.num_pieces * values * 4 / sheet.dram_gb_per_s
    return Prediction("merge of pieces", max(of_block, moved) / 1e6 + LAUNCH / 1e3, "merge")


def predict_cell(
    table: Table, sheet: Sheet, graph: Graph, layer: str, width: int, dtype: str
) -> dict[str, list[Prediction]] | str:
    """Both passes of a layer, or why there is no prediction."""
    try:
        return {
            direction: predict(table, sheet, graph, layer, direction, width, dtype)
            for direction in ("forward", "backward")
        }
    except MissingKernelError as error:
        return str(error)
