"""The floors of training on uneven ranks, and the tables as Markdown."""

from __future__ import annotations

from typing import Any

import numpy as np

from measure.report import Floor, floor_lines, highest, lowest, machine_lines, table

_FASTER = 1.4
_OFF_BEST = 5.0
_LOSSES = 1e-6

NAMED = ("uniform", "auto")
"""How the names begin of shares that were not searched."""

KINDS = ("unseen", "own", "unseen, calibrated", "own, calibrated")
"""Models of performance by what they have learnt from."""

_ERROR = 12.0

PAPER = "7-10 %"
"""The error that nuGNN reports of its models on graphs that they have not seen."""


def medians(cell: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of a step, by the name of the shares."""
    return {one["name"]: one["spread"]["median"] for one in cell["candidates"]}


def faster(cell: dict[str, Any]) -> float:
    """How many times as fast as with equal shares."""
    found = medians(cell)
    return found["uniform"] / found["auto"]


def off_best(cell: dict[str, Any]) -> float:
    """Percent that ``auto`` takes more than the fastest of the shares that were searched."""
    found = medians(cell)
    best = min(value for name, value in found.items() if not name.startswith(NAMED))
    return 100 * (found["auto"] / best - 1)


def losses_off(cell: dict[str, Any]) -> float:
    """The largest difference of a loss from that with equal shares, of the latter."""
    losses = {one["name"]: np.array(one["losses"]) for one in cell["candidates"]}
    return float(max(np.abs(found / losses["uniform"] - 1).max() for found in losses.values()))


def floors(results: dict[str, Any]) -> list[Floor]:
    """All floors, met or not."""
    cells = results["cells"]
    of_calibrated = {
        graph: _percent(errors["own, calibrated"]) for graph, errors in results["unseen"].items()
    }
    losses = {name: 1e6 * losses_off(cell) for name, cell in cells.items()}
    return [
        lowest("auto, of equal shares", {n: faster(c) for n, c in cells.items()}, _FASTER),
        highest(
            "auto, above the best by search",
            {n: off_best(c) for n, c in cells.items()},
            _OFF_BEST,
            "%",
        ),
        *(
            [highest("error of calibrated models", of_calibrated, _ERROR, "%")]
            if of_calibrated
            else []
        ),
        highest("losses off those of equal shares, millionths", losses, 1e6 * _LOSSES, ""),
    ]


def _percent(errors: list[float]) -> float:
    return 100 * float(np.mean(errors))


def markdown(results: dict[str, Any], listed: list[Floor]) -> str:
    """All tables."""
    lines = [
        "# Training on two ranks, one of which has a share of a core",
        "",
        f"`{results['command']}`",
        "",
        f"Rank 1 may use {results['share']:.0%} of a core, by {results['quota']}; rank 0 a whole "
        f"one. {results['layers']} layers of",
        f"{results['channels']} channels, fused operators, one thread a rank; steps of all shares "
        "in turns.",
        "",
    ]
    if results["by processor"]:
        lines += [
            "Predictions are of processor time, that of rank 1 divided by its share, and nobody",
            "was slowed down for them: other work on the machine counts by what it does to caches.",
            "",
        ]
    for name, cell in results["cells"].items():
        rows = []
        equal = medians(cell)["uniform"]
        for one in cell["candidates"]:
            spread = one["spread"]
            rows.append(
                [
                    one["name"],
                    f"{one['share']:.1%}",
                    f"{spread['median']:.0f}",
                    f"{spread['lower_quartile']:.0f} to {spread['upper_quartile']:.0f}",
                    f"{equal / spread['median']:.2f}x",
                ]
            )
        lines += [f"## {name}", ""]
        head = ["shares", "of rank 0", "ms of a step", "quartiles", "of equal shares"]
        lines += table(head, rows)
        lines += ["", "Milliseconds of an epoch with `auto`, predicted and measured:", ""]
        phases = [
            [f"{rank} {kind}", *(f"{1e3 * one[phase]:.0f}" for phase in one)]
            for kind in ("predicted", "measured")
            for rank, one in enumerate(cell[kind])
        ]
        lines += table(["rank", "compute", "exchange", "wait"], phases)
        errors = [f"{100 * e:.1f} %" for e in cell["cross-validation"].values()]
        lines += [
            "",
            f"The model was learnt in {cell['learning']:.0f} s, the shares found in "
            f"{cell['sharding']:.0f} s; regressors of the ranks:",
            f"{', '.join(cell['regressors'].values())}, with a mean absolute percentage error of "
            f"{', '.join(errors)} in cross-validation.",
            "",
        ]
    if results["unseen"]:
        by_graph = dict(results["unseen"])
        every = list(results["unseen"].values())
        by_graph["all"] = {kind: [e for one in every for e in one[kind]] for kind in KINDS}
        rows = [
            [graph, *(f"{_percent(errors[kind]):.1f} %" for kind in KINDS)]
            for graph, errors in by_graph.items()
        ]
        lines += [
            "## How well seconds of computing are predicted",
            "",
            "Mean absolute percentage errors for whole graphs on both ranks, with equal shares and "
            "those of the scores,",
            "learnt from samples of the other graphs alone, or from those of the graph itself "
            f"(nuGNN reports {PAPER}). Calibrated: with shares by the scores, of models that",
            "what was measured with equal shares has corrected.",
            "",
            *table(
                [
                    "graph",
                    *("others' samples", "its own samples"),
                    *("others', calibrated", "its own, calibrated"),
                ],
                rows,
            ),
            "",
        ]
    lines += [*floor_lines(listed), "", *machine_lines(results["machine"])]
    return "\n".join(lines)
