"""The tables and pictures of ``largegt_accuracy.py``."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from measure.largegt_models import BEYOND, MODELS
from measure.report import machine_lines, table

# "Graph Transformers for Large Graphs", table 2; percent, of 4 runs. Its baselines are those of two
# hops. There is no MLP.
PAPER = {
    "GraphSAGE": ("76.62 ± 0.93", "48.43 ± 0.21", ""),
    "GAT": ("77.38 ± 0.59", "45.92 ± 0.22", ""),
    "GT-sparse": ("60.76 ± 0.00", "47.81 ± 0.00", ""),
    "NAGphormer-like": ("75.28 ± 0.04", "60.11 ± 0.05", ""),
    "GOAT-global": ("70.28 ± 1.95", "42.65 ± 0.07", ""),
    "LargeGT-local": ("78.95 ± 0.80", "68.19 ± 3.11", ""),
    "LargeGT-full": ("79.81 ± 0.25", "70.21 ± 0.12", "64.73 ± 0.05"),
}
PAPER_GRAPHS = ("products", "snap-patents", "papers100M")
PAPER_EPOCHS = {
    "GraphSAGE": 7.0,
    "GAT": 31.0,
    "GT-sparse": 12.0,
    "NAGphormer-like": 8.0,
    "GOAT-global": 3.5,
    "LargeGT-local": 45.0,
    "LargeGT-full": 68.0,
}
"""Seconds of an epoch of products on a V100: table A.1."""

Runs = Sequence[dict[str, Any]]
ORDER = MODELS + BEYOND


def grouped(runs: Runs) -> dict[str, dict[tuple[Any, ...], Runs]]:
    """By experiment and graph, then by model and ``k``: those of one limit for all, and sweeps."""
    found: dict[str, dict[tuple[Any, ...], list[dict[str, Any]]]] = {}
    for run in sorted(runs, key=lambda run: (ORDER.index(run["model"]), run["sizes"]["k"])):
        kind = "sweep" if run["limits"]["seconds"] is None else "models"
        cells = found.setdefault(f"{kind} {run['graph']}", {})
        cells.setdefault((run["model"], run["sizes"]["k"]), []).append(run)
    return found  # type: ignore[return-value]


def mean_and_deviation(values: Sequence[float]) -> str:
    """In percent."""
    mean = f"{100 * statistics.mean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ± {100 * statistics.stdev(values):.2f}"


def still_rising(run: dict[str, Any]) -> bool:
    """True if the best model is of the last fifth of a run that time has ended."""
    seconds = run["limits"]["seconds"]
    ended = seconds is None or run["seconds"] >= seconds
    return bool(ended and run["best_at"] >= 0.8 * run["seconds"])


def _rows(cells: dict[tuple[Any, ...], Runs]) -> Iterator[list[str]]:
    for (model, k), runs in cells.items():
        epochs = [run["epochs"] for run in runs]
        seconds = statistics.mean(run["seconds"] for run in runs)
        yield [
            model if not model.startswith("LargeGT") else f"{model}, K = {k}",
            mean_and_deviation([run["test"] for run in runs]),
            str(len(runs)),
            _range(epochs, 1),
            f"{seconds:.1f}",
            _range([run["seconds"] / run["epochs"] for run in runs], 2),
            f"{statistics.mean(run['best_at'] for run in runs):.1f}",
            f"{sum(map(still_rising, runs))} of {len(runs)}",
        ]


def _range(values: Sequence[float], digits: int) -> str:
    ends = [f"{end(values):.{digits}f}" for end in (min, max)]
    return " to ".join(dict.fromkeys(ends))


HEADING = ("model", "test, %", "runs", "epochs", "seconds", "of an epoch", "best after")
HEADING += ("still rising",)


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    lines = [
        "# Accuracy of LargeGT and of what its paper compares it with",
        "",
        "Mean and deviation of the test where validation was best: accuracy, of minesweeper and "
        "tolokers the area under the ROC curve. Runs of a graph have the same processor time for "
        "training, one thread, and end earlier if they train 2.5 times as long as the best model "
        "took, for a quarter of the time and three epochs; evaluation does not count. *Still "
        "rising* are those whose best model is of the last "
        "fifth of the time: they are under-trained. Message passing samples 20 and 10 neighbours "
        "in training and sees all in evaluation. Points of the curves are of 1,500 nodes of each "
        "part, the test at the end of all. Runs of minesweeper and tolokers are of their splits "
        "0 to 3; those of debian and wordnet of one split, 50/25/25, and several seeds.",
        "",
        *([results["note"], ""] if results["note"] else []),
        *machine_lines(results["machine"]),
    ]
    for name, cells in grouped(results["runs"]).items():
        kind, _, graph = name.partition(" ")
        first = next(iter(cells.values()))[0]
        sizes = {key: value for key, value in first["sizes"].items() if key != "k"}
        limit = first["limits"]
        of = f"{limit['seconds']:g} s" if kind == "models" else f"{limit['epochs']:g} epochs"
        title = graph if kind == "models" else f"{graph}, by epochs"
        lines += [
            f"## {title}",
            "",
            f"{of} each; " + ", ".join(f"{key} {value}" for key, value in sizes.items()) + ".",
            "",
            *table(HEADING, _rows(cells)),
            "",
        ]
    lines += [
        "## The paper",
        "",
        "Table 2, of 4 runs, in percent, and of table A.1 the seconds of an epoch of products on a "
        "V100.",
        "",
        *table(
            ("model", *PAPER_GRAPHS, "epoch"),
            ([model, *row, f"{PAPER_EPOCHS[model]:g}"] for model, row in PAPER.items()),
        ),
    ]
    return "\n".join(lines)


def draw(results: dict[str, Any], stem: Path) -> list[Path]:
    """Pictures of the curves and of the sweeps, ``<stem>-curves.svg`` and ``<stem>-k.svg``."""
    import matplotlib

    matplotlib.use("svg")
    # Text stays text, and the same results give the same file.
    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "fastgraph", "font.size": 8}
    )
    groups = grouped(results["runs"])
    sweeps = {
        name: cells
        for name, cells in groups.items()
        if name.startswith("sweep") and len({k for _, k in cells}) > 1
    }
    models = {name: cells for name, cells in groups.items() if name.startswith("models")}
    paths = [_draw_curves(models, Path(f"{stem}-curves.svg"))] if models else []
    return [*paths, *([_draw_sweeps(sweeps, Path(f"{stem}-k.svg"))] if sweeps else [])]


def _draw_curves(groups: dict[str, Any], path: Path) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(groups), figsize=(11, 5.6), squeeze=False, sharex="col")
    for column, (name, cells) in enumerate(groups.items()):
        for row, part in enumerate(("valid", "test")):
            axis = axes[row][column]
            for (model, _), runs in cells.items():
                if model in BEYOND:
                    continue
                colour = f"C{MODELS.index(model)}"
                for number, run in enumerate(runs):
                    curve = run["curve"]
                    axis.plot(
                        curve["minutes"],
                        [100 * value for value in curve[part]],
                        color=colour,
                        linewidth=1,
                        alpha=0.85,
                        label=model if number == 0 else None,
                    )
            axis.spines[["top", "right"]].set_visible(False)
        axes[0][column].set_title(name.partition(" ")[2], fontsize=9)
        axes[1][column].set_xlabel("minutes of processor time")
    axes[0][0].set_ylabel("validation, %")
    axes[1][0].set_ylabel("test, %")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(MODELS), frameon=False)
    figure.suptitle("Validation and test by time of training, one line for each run", fontsize=10)
    figure.subplots_adjust(left=0.06, right=0.985, top=0.89, bottom=0.15, wspace=0.22, hspace=0.12)
    return _saved(figure, path)


def _draw_sweeps(groups: dict[str, Any], path: Path) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(groups), figsize=(4.5 * len(groups), 3.4), squeeze=False)
    for axis, (name, cells) in zip(axes[0], groups.items(), strict=True):
        ks = [k for _, k in cells]
        tests = [[100 * run["test"] for run in runs] for runs in cells.values()]
        means = [statistics.mean(values) for values in tests]
        spread = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in tests]
        axis.errorbar(ks, means, yerr=spread, marker="o", markersize=4, capsize=2)
        for k, mean, runs in zip(ks, means, cells.values(), strict=True):
            seconds = statistics.mean(run["seconds"] / run["epochs"] for run in runs)
            axis.annotate(f"{seconds:.1f} s", (k, mean), (3, 4), textcoords="offset points")
        axis.set_title(name.partition(" ")[2], fontsize=9)
        axis.set_xlabel("K; labels are processor seconds of an epoch")
        axis.set_ylabel("test, %")
        axis.spines[["top", "right"]].set_visible(False)
    figure.subplots_adjust(left=0.15, right=0.97, top=0.9, bottom=0.15)
    return _saved(figure, path)


def _saved(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(path, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    return path
