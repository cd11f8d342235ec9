"""The floors of training on several ranks, and the tables as Markdown."""

from __future__ import annotations

from typing import Any

from measure.report import Floor, floor_lines, highest, machine_lines, table

_SLOWER = 1.15
_SUBCLASS = 5.0

# The subclass is Python, whose cost a small graph would show in percent and a large one not.
_LARGE_NODES = 100_000


def times_of_one_process(cell: dict[str, Any]) -> float:
    """How long a step of the ranks takes in steps of one process."""
    first = cell["ranks"][0]
    return float(first["ranks"]["median"] / first["one process"]["median"])


def subclass_percent(cell: dict[str, Any]) -> float:
    """The time that sharded tensors add to a step on a single rank, in percent."""
    spreads = cell["subclass"]
    return 100 * float(spreads["sharded"]["median"] / spreads["plain"]["median"] - 1)


def _bytes_off(cell: dict[str, Any]) -> float:
    return max(abs(rank["sent"] - rank["predicted"]) for rank in cell["ranks"])


def _cells(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        f"{graph} {layer}": cell
        for graph, cells in results["cells"].items()
        for layer, cell in cells.items()
    }


def floors(results: dict[str, Any]) -> list[Floor]:
    """All floors, met or not."""
    cells = _cells(results)
    large = {
        name: cell
        for name, cell in cells.items()
        if sum(rank["nodes"] for rank in cell["ranks"]) >= _LARGE_NODES
    }
    slower = {name: times_of_one_process(cell) for name, cell in large.items()}
    subclass = {name: subclass_percent(cell) for name, cell in large.items()}
    off = {name: _bytes_off(cell) for name, cell in cells.items()}
    return [
        highest("a step of the ranks, of one process's", slower, _SLOWER, "x"),
        highest("cost of the tensor subclass", subclass, _SUBCLASS, "%"),
        highest("bytes sent, off the plan's", off, 0, ""),
    ]


def markdown(results: dict[str, Any], listed: list[Floor]) -> str:
    """All tables."""
    rows = []
    for name, cell in _cells(results).items():
        first, subclass = cell["ranks"][0], cell["subclass"]
        edges = "/".join(f"{rank['edges']:,}" for rank in cell["ranks"])
        rows.append(
            [
                name,
                f"{first['one process']['median']:.1f}",
                f"{first['ranks']['median']:.1f}",
                f"{times_of_one_process(cell):.2f}",
                f"{subclass['plain']['median']:.1f}",
                f"{subclass['sharded']['median']:.1f}",
                f"{subclass_percent(cell):+.1f} %",
                edges,
                f"{sum(rank['sent'] for rank in cell['ranks']):,}",
                f"{sum(rank['predicted'] for rank in cell['ranks']):,}",
            ]
        )
    head = ["cell", "one process", "ranks", "times", "plain", "sharded", "subclass"]
    head += ["edges of ranks", "bytes sent", "predicted"]
    lines = [
        "# Training on several ranks of one thread, and on one process with as many threads",
        "",
        f"`{results['command']}`",
        "",
        f"Milliseconds of a training step, medians, {results['layers']} layers of "
        f"{results['channels']} channels, fused",
        f"operators on both sides, {results['ranks']} ranks. Plain and sharded: one process with",
        f"{results['ranks']} threads, whose sharded tensors hold everything. Bytes are those of",
        "rows of nodes that all ranks send in a step.",
        "",
        *table(head, rows),
        "",
        *floor_lines(listed),
        "",
        *machine_lines(results["machine"]),
    ]
    return "\n".join(lines)
