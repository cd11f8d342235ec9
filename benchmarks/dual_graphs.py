"""Accuracy on graphs of a graph transformer whose attention is sparse, dense, or takes turns.

    python benchmarks/dual_graphs.py train runs.jsonl --task molecules
    python benchmarks/dual_graphs.py report runs.jsonl

Tasks are "molecules", those of ZINC that ``molsets`` has, of which logP - SA - rings is asked, as
RDKit has it, and "code", modules of Python packages that are installed here, whose package is
asked (in MalNet's place): nodes are definitions, edges uses and membership; names are left out.
``fastgraph.nn.Graphormer.slim`` is "exact" (never dense), "union" (its first layer is), "dense"
(all layers), "paper" (graphs that TorchGT's rule has dense), or "elastic": "exact" on edges of
TorchGT's elastic reformation, of four clusters in each graph and sub-blocks of two rows, by its
Auto Tuner. Beside it PyG's ``MLP``, ``GCN`` and ``TransformerConv``, with means over nodes. Batches
and their patterns are made once, and take turns at random. Molecules need
``rdkit``, and ``molsets`` without what that depends on. Each run is a line of a file as soon as it
has ended; runs that the file has already are left out.
"""

from __future__ import annotations

import csv
import gzip
import importlib.util
import math
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.utils import to_undirected

import fastgraph
from fastgraph.nn import Graphormer, Reformation, Schedule, dual_pattern
from measure.machine import machine_facts
from measure.output import RESULTS, Record, machine_table, write

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

HOPS = 5
PERIODS = {"exact": None, "union": 4, "dense": 1}
"""Of layers that are dense."""
WAYS = (*PERIODS, "paper", "elastic")

MODELS = ("MLP", "GCN", "TransformerConv", *WAYS)
ATOMS = ("C", "N", "O", "F", "S", "Cl", "Br", "H")
PACKAGES = ("torch", "sympy", "scipy", "sklearn", "torch_geometric")
LARGEST = 200  # definitions of a module


def molecules(count: int) -> list[Data]:
    """Molecules with what is asked of each, in the order of the file.

    The rings are those beyond six atoms of the largest cycle, as is usual for logP - SA - rings.
    """
    from rdkit import Chem, RDConfig, RDLogger
    from rdkit.Chem import Crippen

    sys.path.append(str(Path(RDConfig.RDContribDir) / "SA_Score"))
    import sascorer

    RDLogger.DisableLog("rdApp.*")
    # Its __init__ imports what no longer exists.
    spec = importlib.util.find_spec("moses")
    assert spec is not None and spec.submodule_search_locations is not None
    found: list[Data] = []
    file = Path(spec.submodule_search_locations[0]) / "dataset" / "data" / "train.csv.gz"
    with gzip.open(file, "rt") as lines:
        for row in csv.DictReader(lines):
            if len(found) == count:
                break
            molecule = Chem.MolFromSmiles(row["SMILES"])
            atoms = [atom.GetSymbol() for atom in molecule.GetAtoms()]
            kinds = torch.tensor([ATOMS.index(atom) for atom in atoms])
            bonds = [(b.GetBeginAtomIdx(), b.GetEndAtomIdx()) for b in molecule.GetBonds()]
            largest = max((len(ring) for ring in molecule.GetRingInfo().AtomRings()), default=0)
            wanted = Crippen.MolLogP(molecule) - sascorer.calculateScore(molecule)
            data = Data(x=F.one_hot(kinds, len(ATOMS)).float())
            data.edge_index = to_undirected(torch.tensor(bonds).t().contiguous())
            data.y = torch.tensor([wanted - max(largest - 6, 0)])
            found.append(data)
    return found


def code(count: int) -> list[Data]:
    """Modules of each package, as many of each, with what their definitions use of each other."""
    import python_source

    found = []
    for label, package in enumerate(PACKAGES):
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.submodule_search_locations is not None
        root = Path(spec.submodule_search_locations[0])
        files = sorted(path for path in root.rglob("*.py") if "test" not in str(path))
        order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
        own: list[Data] = []
        for path in (files[i] for i in order):
            if len(own) == count // len(PACKAGES):
                break
            name = ".".join(path.relative_to(root.parent).with_suffix("").parts)
            source = python_source.SourceFile(str(path), name, package, False)
            parsed = python_source.parse_file(source, 16)
            if parsed is None or not 8 <= len(parsed.definitions) <= LARGEST:
                continue
            own.append(_graph_of(parsed.definitions, label))
        found += own
    return found


def _graph_of(definitions: list[Any], label: int) -> Data:
    number = {definition.name: i for i, definition in enumerate(definitions)}
    edges = set()
    for i, definition in enumerate(definitions):
        parent = number.get(definition.name.rpartition(".")[0], 0)
        targets = [parent, *(number.get(target.lstrip("=^"), i) for _, target in definition.uses)]
        edges |= {(j, i) for j in targets if j != i}
    index = torch.tensor(sorted(edges)).t().contiguous()
    kinds = torch.tensor([definition.kind for definition in definitions])
    return Data(F.one_hot(kinds, 3).float(), to_undirected(index), y=torch.tensor([label]))


TASKS = {"molecules": (molecules, 1500, 20), "code": (code, 1000, 30)}


class Pooled(nn.Module):
    """Layers of PyG, the mean of nodes, and a linear layer."""

    def __init__(self, name: str, channels: int, out: int) -> None:
        from torch_geometric.nn import GCN, MLP, TransformerConv

        super().__init__()
        self.name = name
        if name == "MLP":
            self.layers = MLP([channels, 64, 64], norm=None)
        elif name == "GCN":
            self.layers = GCN(channels, 64, 4)
        else:
            sizes = [channels, 64, 64, 64]
            self.layers = nn.ModuleList(TransformerConv(size, 8, 8) for size in sizes)
        self.out = nn.Linear(64, out)

    def forward(self, data: Batch) -> Tensor:
        from torch_geometric.nn import global_mean_pool

        h = data.x
        if self.name == "MLP":
            h = self.layers(h)
        elif self.name == "GCN":
            h = self.layers(h, data.edge_index)
        else:
            for layer in self.layers:
                h = layer(h, data.edge_index).relu()
        out: Tensor = self.out(global_mean_pool(h, data.batch, data.num_graphs))
        return out


class Transformer(nn.Module):
    """Graphormer by a way of attention, on the patterns of batches."""

    def __init__(self, way: str, channels: int, out: int) -> None:
        super().__init__()
        given: dict[str, Any] = {"schedule": Schedule("layer", PERIODS.get(way))}
        self.reformation = None
        if way == "elastic":
            self.reformation = Reformation("elastic", clusters=4, block=2)
            given["reformation"] = self.reformation
        if way == "paper":
            given = {"policy": "paper"}
        self.model = Graphormer.slim(channels, out, level="graph", hops=HOPS, **given)

    def forward(self, data: Batch) -> Tensor:
        out: Tensor = self.model(data.x, data.pattern)
        return out


@click.group(help=__doc__.partition("\n")[0])
def main() -> None:
    pass


@main.command()
@click.argument("record", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--task", "tasks", multiple=True, type=click.Choice(list(TASKS)), default=TASKS)
@click.option("--model", "models", multiple=True, type=click.Choice(MODELS), default=MODELS)
@click.option("--seeds", default=3, show_default=True, help="Runs of each model.")
@click.option("--graphs", "count", type=click.IntRange(6), help="Default: 1,500, of code 1,000.")
@click.option("--epochs", type=click.IntRange(1), help="Default: 20, of code 30.")
def train(
    record: Path,
    tasks: tuple[str, ...],
    models: tuple[str, ...],
    seeds: int,
    count: int | None,
    epochs: int | None,
) -> None:
    """Train models on graphs, on one thread."""
    torch.set_num_threads(1)
    fastgraph.enable()
    lines = Record(record)
    lines.mend()
    lines.add("machine", machine_facts(1))
    for task in tasks:
        make, usual_count, usual_epochs = TASKS[task]
        length = epochs or usual_epochs
        graphs = make(count or usual_count)
        sizes = [len(graph.x) for graph in graphs]
        facts = {"task": task, "epochs": length, "graphs": len(graphs)}
        facts |= {"nodes": statistics.mean(sizes), "most": max(sizes)}
        facts["dense by rule"] = dense_by_rule(graphs)
        if any(line["task"] == task and line != facts for line in lines.lines("task")):
            raise click.UsageError(f"{record} has runs of other graphs or epochs of {task}")
        lines.add("task", facts)
        for seed in range(seeds):
            parts = batches(graphs, seed)
            for model in models:
                key = {"task": task, "model": model, "seed": seed}
                if not any(line | key == line for line in lines.lines("run")):
                    lines.add("run", key | _run(parts, task, model, seed, length))
                    print(lines.lines("run")[-1], flush=True)


def batches(graphs: list[Data], seed: int) -> list[list[Batch]]:
    """Batches for training, validation and test, of 4 parts, 1 and 1."""
    order = torch.randperm(len(graphs), generator=torch.Generator().manual_seed(seed)).tolist()
    cuts = [0, *(len(order) * part // 6 for part in (4, 5, 6))]
    found = []
    for begin, end in pairwise(cuts):
        own = [graphs[i] for i in order[begin:end]]
        found.append([_batch(own[i : i + 32]) for i in range(0, len(own), 32)])
    return found


def _batch(graphs: list[Data]) -> Batch:
    batch = Batch.from_data_list(graphs)
    sizes = {"num_nodes": batch.num_nodes, "num_graphs": batch.num_graphs}
    batch.pattern = dual_pattern(batch.edge_index, batch=batch.batch, token=True, **sizes)
    return batch


def _run(parts: list[list[Batch]], task: str, name: str, seed: int, epochs: int) -> dict[str, Any]:
    """Scores of the parts when validation was best, that epoch, and seconds of all."""
    torch.manual_seed(seed)
    is_regression = task == "molecules"
    channels, out = parts[0][0].x.shape[1], 1 if is_regression else len(PACKAGES)
    model = (Transformer if name in WAYS else Pooled)(name, channels, out)
    wanted = torch.cat([batch.y for batch in parts[0]])
    centre, spread = (wanted.mean(), wanted.std()) if is_regression else (0, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)

    def loss_of(batch: Batch) -> Tensor:
        found = model(batch)
        if is_regression:
            return F.l1_loss(found.view(-1), (batch.y - centre) / spread)
        return F.cross_entropy(found, batch.y)

    def score(part: list[Batch]) -> float:
        """The mean absolute error, or the part that is right."""
        right, count = 0.0, 0
        for batch in part:
            found = model(batch)
            if is_regression:
                right += float((found.view(-1) * spread + centre - batch.y).abs().sum())
            else:
                right += float((found.argmax(-1) == batch.y).sum())
            count += batch.num_graphs
        return right / count

    reformation = getattr(model, "reformation", None)
    best: dict[str, Any] = {"validation": math.inf if is_regression else -math.inf}
    start = time.process_time()
    for epoch in range(1, epochs + 1):
        model.train()
        began, losses = time.process_time(), 0.0
        for i in torch.randperm(len(parts[0])).tolist():
            optimizer.zero_grad()
            loss = loss_of(parts[0][i])
            loss.backward()
            optimizer.step()
            losses += float(loss.detach())
        if reformation is not None:
            reformation.tuner.step(losses / len(parts[0]), time.process_time() - began)
        model.eval()
        with torch.no_grad():
            scores = [score(part) for part in parts]
        if (scores[1] < best["validation"]) == is_regression and scores[1] != best["validation"]:
            best = dict(zip(("train", "validation", "test"), scores, strict=True))
            best["epoch"] = epoch
    return best | {"seconds": time.process_time() - start}


def dense_by_rule(graphs: list[Data], budget: int = 200_000) -> float:
    """The part of some graphs that TorchGT's rule has dense, with a token and four layers.

    Undecided ones are among them: searches that the budget ends would seldom find a path.
    """
    found = [dual_pattern(graph.edge_index, len(graph.x), token=True) for graph in graphs[::10]]
    return statistics.mean(not one.conditions(4, budget)[0].hold for one in found)


@main.command()
@click.argument("record", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
@click.option("--notes", type=click.Path(path_type=Path, exists=True), help="Text for the end.")
def report(record: Path, out: Path, notes: Path | None) -> None:
    """Publish the runs of a file."""
    lines = Record(record)
    results = {
        "machine": lines.lines("machine")[0],
        "commits": sorted({machine["commit"] for machine in lines.lines("machine")}),
        "tasks": {task["task"]: task for task in lines.lines("task")},
        "runs": lines.lines("run"),
    }
    text = markdown(results, "" if notes is None else notes.read_text())
    print("written:", write(out, "dual-graphs", results, text).name)


def markdown(results: dict[str, Any], notes: str) -> str:
    lines = ["# Accuracy on graphs of attention that takes turns", ""]
    for task in results["tasks"].values():
        lines.append(
            f"- {task['task']}: {task['graphs']:,} graphs of {task['nodes']:.1f} nodes on average "
            f"and {task['most']} at most, 4/6 to train on, {task['epochs']} epochs; TorchGT's rule "
            f"has {task['dense by rule']:.0%} of every tenth of them dense"
        )
    lines += [
        "",
        "`benchmarks/dual_graphs.py`. Molecules: the mean absolute error of logP - SA - rings,",
        "less is better; code: per cent of packages that are right. Mean and deviation of seeds,",
        "each with a split of its own; test scores are those at the best validation. Time is of",
        "processor, for an epoch with its evaluations, on one thread of a machine that others",
        "used, too.",
        "",
        "| task | model | seeds | training | validation | test | ms |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for task, facts in results["tasks"].items():
        for model in MODELS:
            runs = [r for r in results["runs"] if (r["task"], r["model"]) == (task, model)]
            if runs:
                cells = [task, model, str(len(runs))]
                parts = ("train", "validation", "test")
                cells += [_spread([run[part] for run in runs], task) for part in parts]
                each = min(run["seconds"] for run in runs) / facts["epochs"]
                lines.append(f"| {' | '.join([*cells, f'{1000 * each:.0f}'])} |")
    commits = f"Commits: {', '.join(results['commits'])}."
    tail = ["", notes, "", commits, "", *machine_table(results["machine"])]
    return "\n".join([*lines, *tail]) + "\n"


def _spread(scores: list[float], task: str) -> str:
    digits, factor = (3, 1) if task == "molecules" else (1, 100)
    found = [factor * score for score in scores]
    mean = f"{statistics.mean(found):.{digits}f}"
    return f"{mean} ± {statistics.stdev(found):.{digits}f}" if len(found) > 1 else mean


if __name__ == "__main__":
    main()
