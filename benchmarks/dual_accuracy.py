"""Accuracy of a graph transformer whose attention is sparse, dense, or takes turns.

    FASTGRAPH_DATA=... python benchmarks/dual_accuracy.py train runs.jsonl --graph Cora
    FASTGRAPH_DATA=... python benchmarks/dual_accuracy.py rule runs.jsonl
    python benchmarks/dual_accuracy.py report runs.jsonl

``fastgraph.nn.GraphTransformer`` with 4 layers of 64 channels and 8 heads: "exact" never attends
to all pairs, "union" in its first layer, "dense" in all, "paper" as TorchGT's own rule has it;
"elastic" is "exact" on edges of TorchGT's elastic reformation of 8 clusters, by its Auto Tuner.
"typed" models have learned biases by distance, up to four edges, without which attention of all
pairs does not see the graph.
Beside them PyG's ``MLP`` and ``GCN``, and two layers of its ``TransformerConv``. Each run is a line
of a file as soon as it has ended; runs that the file has already are left out.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastgraph
from fastgraph.nn import GraphTransformer, Reformation, Schedule
from measure.dual_accuracy_report import markdown
from measure.machine import machine_facts
from measure.output import RESULTS, Record, write

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "largegt"))

PERIODS = {"exact": None, "union": 4, "dense": 1}
TYPED = {"exact, typed": None, "union, typed": 4, "dense, typed": 1}
MODELS = ("MLP", "GCN", "TransformerConv", *PERIODS, *TYPED, "elastic")
HOPS = 4


class Sizes(NamedTuple):
    """Of models and training.

    Attributes:
        epochs: of training, each a step with all training nodes.
        every: after how many of them the model is evaluated.
        dropout: of all models.
        layers: of the graph transformer.
        channels: of all models.
        lr: of AdamW for models with attention; that of others is 0.01.
        decay: of weights.
    """

    epochs: int = 60
    every: int = 1
    dropout: float = 0.5
    layers: int = 4
    channels: int = 64
    lr: float = 1e-3
    decay: float = 0.01


SIZES = {
    "Cora": Sizes(),
    "CiteSeer": Sizes(),
    "minesweeper": Sizes(80, 4, 0.2),
    "tolokers": Sizes(80, 4, 0.2),
    "wordnet": Sizes(20, 4, 0.2),
    "debian": Sizes(20, 4, 0.2),
}


class Graph(NamedTuple):
    """A graph for node classification.

    Attributes:
        x: of nodes, float32 ``[nodes, channels]``.
        edge_index: both directions of each edge.
        y: int64 ``[nodes]``.
        parts: nodes of training, validation and test, bool ``[nodes]`` each.
    """

    x: Tensor
    edge_index: Tensor
    y: Tensor
    parts: tuple[Tensor, Tensor, Tensor]


class TransformerConvs(nn.Module):
    """Two layers of PyG's ``TransformerConv``."""

    def __init__(self, in_channels: int, channels: int, out_channels: int, dropout: float) -> None:
        from torch_geometric.nn import TransformerConv

        super().__init__()
        self.first = TransformerConv(in_channels, channels // 8, 8)
        self.second = TransformerConv(channels, out_channels, 1)
        self.dropout = dropout

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """``[nodes, out_channels]``."""
        h = F.dropout(self.first(x, edge_index).relu(), self.dropout, self.training)
        out: Tensor = self.second(h, edge_index)
        return out


@click.group(help=__doc__.partition("\n")[0])
def main() -> None:
    pass


@main.command()
@click.argument("record", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--graph", "names", multiple=True, type=click.Choice(list(SIZES)), default=SIZES)
@click.option("--model", "models", multiple=True, type=click.Choice(MODELS), default=MODELS)
@click.option("--seeds", default=3, show_default=True, help="Runs of each model.")
@click.option("--set", "changes", multiple=True, help="A size that is another, as layers=2.")
def train(
    record: Path,
    names: tuple[str, ...],
    models: tuple[str, ...],
    seeds: int,
    changes: tuple[str, ...],
) -> None:
    """Train models on graphs, on one thread."""
    torch.set_num_threads(1)
    fastgraph.enable()
    lines = Record(record)
    lines.mend()
    lines.add("machine", machine_facts(1))
    for name in names:
        given = dict(change.split("=") for change in changes)
        default = SIZES[name]._asdict()
        sizes = Sizes(**default | {key: type(default[key])(x) for key, x in given.items()})
        for model in models:
            for seed in range(seeds):
                key = {"graph": name, "model": model, "seed": seed, "sizes": sizes._asdict()}
                if any(line | key == line for line in lines.lines("run")):
                    continue
                found = _run(_load(name, seed), model, seed, sizes)
                lines.add("run", key | found)
                print(name, model, seed, sizes.layers, sizes.channels, found["test"], flush=True)


@main.command()
@click.argument("record", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--graph", "names", multiple=True, type=click.Choice(list(SIZES)), default=SIZES)
def rule(record: Path, names: tuple[str, ...]) -> None:
    """Ask TorchGT's rule whether graphs are dense."""
    lines = Record(record)
    for name in names:
        graph = _load(name, 0)
        model = _transformer(graph, SIZES[name], policy="paper", schedule=Schedule("layer", None))
        attention = model.layers[0].self_attn
        report = attention.report(attention.pattern(graph.edge_index, len(graph.x)))
        found = {"graph": name, "dense": report.dense[0], "reason": str(report.conditions[0])}
        lines.add("rule", found)
        print(name, report, flush=True)


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
        "rules": lines.lines("rule"),
        "runs": lines.lines("run"),
    }
    text = markdown(results, "" if notes is None else notes.read_text())
    print("written:", write(out, "dual-accuracy", results, text).name)


def _load(name: str, seed: int) -> Graph:
    if name in ("Cora", "CiteSeer"):
        from torch_geometric.datasets import Planetoid
        from torch_geometric.transforms import NormalizeFeatures

        source = Path(os.environ["FASTGRAPH_DATA"]) / "Planetoid" / name / "raw"
        with tempfile.TemporaryDirectory() as folder:  # PyG writes beside what it reads
            shutil.copytree(source, Path(folder) / name / "raw")
            data = Planetoid(folder, name, transform=NormalizeFeatures())[0]
        parts = data.train_mask, data.val_mask, data.test_mask
        return Graph(data.x, data.edge_index, data.y, parts)
    import graphs

    found = graphs.load(name, seed)
    train, validation, test = (found.split == part for part in range(3))
    return Graph(found.x, found.edge_index, found.y, (train, validation, test))


def _transformer(graph: Graph, sizes: Sizes, **attention: Any) -> GraphTransformer:
    return GraphTransformer(
        graph.x.shape[1],
        int(graph.y.max()) + 1,
        sizes.channels,
        sizes.layers,
        8,
        dropout=sizes.dropout,
        attention_dropout=0,
        **attention,
    )


def _model(graph: Graph, name: str, sizes: Sizes) -> nn.Module:
    from torch_geometric.nn import GCN, MLP

    channels, classes = graph.x.shape[1], int(graph.y.max()) + 1
    if name == "MLP":
        return MLP([channels, sizes.channels, classes], dropout=sizes.dropout)
    if name == "GCN":
        return GCN(channels, sizes.channels, 2, classes, dropout=sizes.dropout)
    if name == "TransformerConv":
        return TransformerConvs(channels, sizes.channels, classes, sizes.dropout)
    if name == "elastic":
        made = Reformation("elastic", clusters=8)
        return _transformer(graph, sizes, schedule=Schedule("layer", None), reformation=made)
    schedule = Schedule("layer", (PERIODS | TYPED)[name])
    types = {"type_bias": True, "hops": HOPS} if name in TYPED else {}
    return _transformer(graph, sizes, schedule=schedule, **types)


def _run(graph: Graph, name: str, seed: int, sizes: Sizes) -> dict[str, Any]:
    """Scores of the parts when validation was best, that epoch, and seconds of all."""
    torch.manual_seed(seed)
    model = _model(graph, name, sizes)
    inputs = (graph.x,) if name == "MLP" else (graph.x, graph.edge_index)
    rate = 0.01 if name in ("MLP", "GCN") else sizes.lr
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=sizes.decay)
    train = graph.parts[0]
    best: dict[str, Any] = {"validation": -1.0}
    start = time.process_time()
    for epoch in range(1, sizes.epochs + 1):
        model.train()
        optimizer.zero_grad()
        began = time.process_time()
        loss = F.cross_entropy(model(*inputs)[train], graph.y[train])
        loss.backward()
        optimizer.step()
        if name == "elastic":
            tuner = model.layers[0].self_attn.reformation.tuner
            tuner.step(loss.detach(), time.process_time() - began)
        if epoch % sizes.every == 0:
            model.eval()
            with torch.no_grad():
                out = model(*inputs)
            scores = [_score(out[part], graph.y[part]) for part in graph.parts]
            if scores[1] > best["validation"]:
                best = dict(zip(("train", "validation", "test"), scores, strict=True))
                best["epoch"] = epoch
    return best | {"last train": scores[0], "seconds": time.process_time() - start}


def _score(out: Tensor, y: Tensor) -> float:
    from metrics import accuracy_or_roc_auc

    return float(accuracy_or_roc_auc(out, y))


if __name__ == "__main__":
    main()
