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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from measure.model_kernels import (
    HEADS,
    LAYERS,
    SIZES,
    Figures,
    Gather,
    MissingKernelError,
    Stream,
    Table,
    find,
)
from measure.model_sheets import SCHEDULERS, Sheet
from measure.model_slots import Rows, Walk

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
# Of the second cache, what random rows can use of it beside what streams through.
USABLE = 0.8
# Microseconds between kernels of one stream that were queued before.
LAUNCH = 2.0
# In the backward pass of extrema: the loop of those lanes that may have won has so many
# instructions, and runs 0.23 times for each entry of tolokers, where 1.44 of 32 lanes look.
_LOOK_INSTRUCTIONS = 104
_LOOKS_OF_LANE = 0.23 / 1.44
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
    rows = graph.rows(launch.transpose)
    if launch.pieces_only and not (rows.num_pieces and _is_known(table, launch.kernel)):
        return
    heads = HEADS if launch.of_head else 1
    of_group = width // heads
    wanted = (launch.words, dtype, of_group, sheet.architecture)
    figures = find(table, launch.loop or launch.kernel, *wanted)
    registers = figures.registers
    if launch.loop is not None:
        registers = max(registers, _registers(table, launch, *wanted))
    parts = heads * -(-of_group // figures.width)
    at_once = max(1, round(figures.loads / (launch.rows * figures.packs)))
    walk = rows.walk(figures.lanes, at_once, pieces_only=launch.pieces_only)
    instructions, gathered = _of_entries(rows, launch, width, dtype)
    extra = instructions * at_once
    times = {
        "issue": _issue(sheet, figures, walk, parts, extra),
        **_memory(sheet, rows, launch, parts, width, dtype, gathered),
        **_latency(sheet, rows, launch, figures, registers, walk, parts, width, dtype),
    }
    bound = max(times, key=times.__getitem__)
    yield Prediction(launch.kernel, times[bound] + LAUNCH / 1e3, bound)
    if rows.num_pieces and launch.merged:
        yield _merged(sheet, rows, launch.pieces_only, width)


def _is_known(table: Table, kernel: str) -> bool:
    return any(name.startswith(f"{kernel}<") for name in table)


def _registers(
    table: Table, launch: Gather, words: tuple[str, ...], dtype: str, width: int, architecture: str
) -> int:
    return find(table, launch.kernel, words, dtype, width, architecture).registers


def _of_entries(rows: Rows, launch: Gather, width: int, dtype: str) -> tuple[float, float]:
    """Instructions besides the loop's, and bytes that are gathered, for each entry."""
    row_bytes = width * SIZES[dtype]
    if not launch.codes:
        return 0.0, launch.rows * row_bytes
    degree = rows.entries / max(1, len(rows.lengths))
    values = 16 // SIZES[dtype]
    lanes = width / values
    if degree < _CODED_DEGREE:
        return 0.0, 2 * row_bytes
    # The lanes that see a code of one of their values: it has won, or another edge has the code.
    looking = lanes * min(1.0, values * (1 / degree + 1 / 255))
    runs = min(1.0, looking * _LOOKS_OF_LANE)
    return runs * _LOOK_INSTRUCTIONS, width + looking * 2 * 32


def _issue(sheet: Sheet, figures: Figures, walk: Walk, parts: int, extra: float) -> float:
    count = (
        walk.iterations * (figures.instructions + extra)
        + walk.batches * BATCH[0]
        + walk.warps * SPAN[0]
    )
    slots = sheet.multiprocessors * SCHEDULERS * ISSUED * sheet.gigahertz * 1e9
    return 1e3 * parts * count / slots


def _memory(
    sheet: Sheet, rows: Rows, launch: Gather, parts: int, width: int, dtype: str, gathered: float
) -> Mapping[str, float]:
    entries = rows.entries
    nodes = len(rows.lengths)
    of_entries = entries * (gathered + parts * launch.entry_bytes)
    table = nodes * width * SIZES[dtype] * launch.tables
    hit = _hit_rate(sheet, rows, launch, parts, width, dtype)
    streamed = nodes * width * SIZES[dtype] * launch.streamed + entries * launch.entry_bytes
    missed = max(min(table, entries * gathered), (1 - hit) * entries * gathered)
    return {
        "cache": of_entries / sheet.cache_gb_per_s / 1e6,
        "memory": (streamed + missed) / sheet.dram_gb_per_s / 1e6,
    }


def _hit_rate(
    sheet: Sheet, rows: Rows, launch: Gather, parts: int, width: int, dtype: str
) -> float:
    """Of gathered rows, what the second cache has; blocks at work take one head or part."""
    held = len(rows.lengths) * width * SIZES[dtype] * launch.tables / parts
    return min(1.0, USABLE * sheet.cache_bytes / max(1.0, held))


def _latency(
    sheet: Sheet,
    rows: Rows,
    launch: Gather,
    figures: Figures,
    registers: int,
    walk: Walk,
    parts: int,
    width: int,
    dtype: str,
) -> Mapping[str, float]:
    hit = _hit_rate(sheet, rows, launch, parts, width, dtype)
    wait = hit * sheet.cache_ns + (1 - hit) * sheet.dram_ns

    def nanoseconds(warps: float, batches: float, iterations: float) -> float:
        terms = (
            (warps, SPAN[0], SPAN[1]),
            (batches, BATCH[0], BATCH[1]),
            (iterations, figures.instructions, figures.waits),
        )
        return sum(
            count * (instructions * CYCLES_ALONE / sheet.gigahertz + waits * wait)
            for count, instructions, waits in terms
        )

    together = sheet.multiprocessors * sheet.warps_at_work(registers)
    return {
        "waiting": parts * nanoseconds(walk.warps, walk.batches, walk.iterations) / together / 1e6,
        "longest warp": nanoseconds(1, walk.longest_batches, walk.longest) / 1e6,
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
