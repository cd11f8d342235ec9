"""The page of accuracies of attention that takes turns."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from measure.output import machine_table

GRAPHS = ("Cora", "CiteSeer", "minesweeper", "tolokers", "wordnet", "debian")
MODELS = ("MLP", "GCN", "TransformerConv", "exact", "exact, typed")
MODELS += ("elastic", "union", "union, typed", "dense", "dense, typed")


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
        "on Cora and CiteSeer with their public splits (140 and 120 nodes to train on), and on",
        "wordnet and debian with random ones, half of the nodes to train on; the area under the",
        "ROC curve on minesweeper and tolokers. Seeds of these four have splits of their own.",
        "Test scores are those at the best validation. Time is of processor, for an epoch with its",
        "share of evaluations, on one thread of a machine that others used, too.",
        "",
        "| graph | model | changed | epochs | seeds | training | validation | test | ms |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    rules = {rule["graph"]: rule for rule in results["rules"]}
    usual: dict[str, dict[str, Any]] = {}
    for run in results["runs"]:
        usual.setdefault(run["graph"], run["sizes"])
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for run in results["runs"]:
        own = usual[run["graph"]]
        changed = {name: x for name, x in run["sizes"].items() if x != own[name]}
        text = ", ".join(f"{name} {x:g}" for name, x in changed.items() if name != "every")
        groups.setdefault((run["graph"], run["model"], text), []).append(run)
    for (graph, model, text), runs in sorted(groups.items(), key=_place):
        lines.append(_row(runs, model, text))
        if model == "dense" and rules.get(graph, {}).get("dense"):
            lines.append(_row(runs, "paper, which is dense here", text))
    if results["rules"]:
        lines += ["", "TorchGT's rule, without tokens and for four layers:", ""]
    for rule in results["rules"]:
        reasons = "; ".join(rule["reason"].splitlines())
        lines.append(f"- {rule['graph']}: {'dense' if rule['dense'] else 'sparse'}. {reasons}.")
    commits = f"Commits: {', '.join(results['commits'])}."
    return (
        "\n".join([*lines, "", notes, "", commits, "", *machine_table(results["machine"])]) + "\n"
    )


def _place(group: tuple[tuple[str, str, str], list[dict[str, Any]]]) -> tuple[int, bool, int]:
    """Graphs in turn, and what is changed behind the models as they are."""
    (graph, model, text), _ = group
    return GRAPHS.index(graph), bool(text), MODELS.index(model)


def _row(runs: list[dict[str, Any]], model: str, text: str) -> str:
    epochs = runs[0]["sizes"]["epochs"]
    cells = [runs[0]["graph"], model, text, str(epochs), str(len(runs))]
    cells += [_spread(run[part] for run in runs) for part in ("train", "validation", "test")]
    each = min(run["seconds"] for run in runs) / epochs
    return f"| {' | '.join([*cells, f'{1000 * each:.0f}'])} |"


def _spread(scores: Iterable[float]) -> str:
    found = [100 * score for score in scores]
    mean = f"{statistics.mean(found):.1f}"
    return f"{mean} ± {statistics.stdev(found):.1f}" if len(found) > 1 else mean
