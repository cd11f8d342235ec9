"""Accuracy of LargeGT on the CPU, beside an MLP, GraphSAGE and GAT.

    FASTGRAPH_DATA=... python benchmarks/largegt_accuracy.py minesweeper --name quick

LargeGT and its modules alone are trained by ``examples/largegt``, an MLP, GraphSAGE and GAT of two
layers with full batches on the same split and both directions of edges. Every run reports the test
where validation was best: accuracy, or of two classes the area under the ROC curve.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from torch_geometric.nn import GAT, MLP, GraphSAGE

import fastgraph
from measure.machine import machine_facts
from measure.output import RESULTS, publish
from measure.report import machine_lines, table

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "largegt"
BASELINES = ("MLP", "GraphSAGE", "GAT")
MODULES = ("global", "local", "full")
sys.path.insert(0, str(EXAMPLE))


def baseline(name: str, graph: Any, seed: int, epochs: int, hidden: int, dropout: float) -> float:
    torch.manual_seed(seed)
    x, y, num_classes = graph.x, graph.y, int(graph.y.max()) + 1
    if name == "MLP":
        model: torch.nn.Module = MLP([x.shape[1], hidden, num_classes], dropout=dropout)
        arguments = (x,)
    elif name == "GraphSAGE":
        model = GraphSAGE(x.shape[1], hidden, 2, num_classes, dropout=dropout)
        arguments = (x, graph.edge_index)
    else:
        model = GAT(x.shape[1], hidden, 2, num_classes, dropout=dropout, heads=4)
        arguments = (x, graph.edge_index)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    parts = [graph.split == part for part in range(3)]
    best, test_then = -1.0, -1.0
    for _ in range(epochs):
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(*arguments)[parts[0]], y[parts[0]]).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            logits = model(*arguments)
        valid, test = (score(logits[part], y[part]) for part in parts[1:])
        if valid > best:
            best, test_then = valid, test
    return test_then


def score(logits: torch.Tensor, y: torch.Tensor) -> float:
    from metrics import accuracy_or_roc_auc

    return accuracy_or_roc_auc(logits, y)


def script(name: str, *words: Any) -> str:
    command = [sys.executable, str(EXAMPLE / name), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@click.command()
@click.argument("graph")
@click.option("--seeds", default=4, show_default=True, help="Runs of each model.")
@click.option("--epochs", default=30, show_default=True, help="Of LargeGT.")
@click.option("--baseline-epochs", default=300, show_default=True)
@click.option("--k", default=50, show_default=True)
@click.option("--hidden", default=64, show_default=True)
@click.option("--batch-size", default=512, show_default=True)
@click.option("--centroids", default=256, show_default=True)
@click.option("--positions", default=16, show_default=True, help="Channels.")
@click.option("--dropout", default=0.2, show_default=True)
@click.option("--model", "models", multiple=True, help="Only these; by default all.")
@click.option("--threads", default=1, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
@click.option("--name", default="", help="Of the results, behind largegt-accuracy and the graph.")
def main(**options: Any) -> None:
    """Train all models on a graph of the example."""
    import graphs

    torch.set_num_threads(options["threads"])
    fastgraph.enable()
    facts, found = machine_facts(options["threads"]), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        for model in options["models"] or (*BASELINES, *MODULES):
            scores, started = [], time.perf_counter()
            for seed in range(options["seeds"]):
                if model in BASELINES:
                    given = (options["baseline_epochs"], options["hidden"], options["dropout"])
                    scores.append(
                        baseline(model, graphs.load(options["graph"], seed), seed, *given)
                    )
                    continue
                tokens = Path(folder, str(seed))
                if not tokens.exists():
                    small = ("--k", options["k"], "--position-channels", options["positions"])
                    script("prepare.py", options["graph"], tokens, *small, "--seed", seed)
                sizes = {name: options[name] for name in ("epochs", "batch_size", "centroids")}
                sizes |= {"hidden_channels": options["hidden"], "dropout": options["dropout"]}
                words = [f"--{key.replace('_', '-')}={value}" for key, value in sizes.items()]
                printed = script("train.py", tokens, "--module", model, "--seed", seed, *words)
                scores.append(float(re.findall(r"best: (\S+)", printed)[0]))
            found[model] = {"test": scores, "seconds": time.perf_counter() - started}
            print(model, found[model], flush=True)
    results = {
        "machine": facts,
        "options": {k: str(v) for k, v in options.items() if k != "out"},
        "models": found,
    }
    name = "-".join(filter(None, ["largegt-accuracy", options["graph"], options["name"]]))
    publish(Console(stderr=True), options["out"], name, results, markdown(results))


def markdown(results: dict[str, Any]) -> str:
    options = results["options"]
    rows = []
    for model, run in results["models"].items():
        deviation = statistics.stdev(run["test"]) if len(run["test"]) > 1 else None
        spread = "" if deviation is None else f"{100 * deviation:.2f}"
        mean = f"{100 * statistics.mean(run['test']):.2f}"
        name = model if model in BASELINES else f"LargeGT, {model}"
        rows.append((name, mean, spread, f"{run['seconds']:.0f}"))
    listed = ", ".join(f"{k} {v}" for k, v in options.items() if k != "models")
    lines = [
        f"# LargeGT on {options['graph']}",
        "",
        f"Test where validation was best, in percent, of runs: {options['seeds']}. Accuracy, or of "
        "two classes the area under the ROC curve. Seconds are those of all runs, beside other "
        "programs.",
        "",
        *table(("model", "mean", "deviation", "seconds"), rows),
        "",
        f"Options: {listed}.",
        "",
        *machine_lines(results["machine"]),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
