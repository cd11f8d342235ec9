"""The page of accuracies of attention that takes turns."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable
from typing import Any

from measure.output import machine_table

NAMES = {
    "MLP": "MLP, two layers",
    "GCN": "GCN, two layers",
    "TransformerConv": "TransformerConv, two layers",
}


def markdown(results: dict[str, Any], notes: str) -> str:
    """The page of some runs.

    Args:
        results: ``machine``, ``rules`` and ``runs``.
        notes: text for the end.
    """
    lines = [
        "# Accuracy of attention that takes turns",
        "",
        "`benchmarks/dual_accuracy.py`. Scores in per cent, mean and deviation of seeds: accuracy",
        "on Cora and CiteSeer with their public splits (140 and 120 nodes to train on), the area",
        "under the ROC curve on minesweeper and tolokers, whose seeds have splits of their own.",
        "Test scores are those at the best validation. Time is of processor, for an epoch with its",
        "share of evaluations, on one thread of a machine that others used, too.",
        "",
        "| graph | model | layers, channels | epochs | seeds | training | validation | test | ms |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    rules = {rule["graph"]: rule for rule in results["rules"]}
    for _, runs in itertools.groupby(sorted(results["runs"], key=_graph), key=_graph):
        groups = itertools.groupby(runs, key=lambda run: (run["model"], run["sizes"]))
        for (model, sizes), group in groups:
            same = list(group)
            lines.append(_row(same, model, sizes))
            if model == "dense" and rules.get(same[0]["graph"], {}).get("dense"):
                lines.append(_row(same, "paper, which is dense here", sizes))
    lines += ["", "TorchGT's rule, without tokens and for four layers:", ""]
    for rule in results["rules"]:
        reasons = "; ".join(rule["reason"].splitlines())
        lines.append(f"- {rule['graph']}: {'dense' if rule['dense'] else 'sparse'}. {reasons}.")
    return "\n".join([*lines, "", notes, "", *machine_table(results["machine"])]) + "\n"


def _graph(run: dict[str, Any]) -> str:
    return str(run["graph"])


def _row(runs: list[dict[str, Any]], model: str, sizes: dict[str, Any]) -> str:
    depth = 2 if model in NAMES else sizes["layers"]
    cells = [runs[0]["graph"], NAMES.get(model, model), f"{depth}, {sizes['channels']}"]
    cells += [str(sizes["epochs"]), str(len(runs))]
    cells += [_spread(run[part] for run in runs) for part in ("train", "validation", "test")]
    each = min(run["seconds"] for run in runs) / sizes["epochs"]
    return f"| {' | '.join([*cells, f'{1000 * each:.0f}'])} |"


def _spread(scores: Iterable[float]) -> str:
    found = [100 * score for score in scores]
    deviation = statistics.stdev(found) if len(found) > 1 else 0.0
    return f"{statistics.mean(found):.1f} ± {deviation:.1f}"
