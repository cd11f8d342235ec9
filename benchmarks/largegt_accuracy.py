"""Accuracy of LargeGT beside the models that its paper compares it with, on the CPU.

    FASTGRAPH_DATA=... python benchmarks/largegt_accuracy.py train runs.jsonl --graph debian
    python benchmarks/largegt_accuracy.py report runs.jsonl --name largegt-accuracy

An MLP; GraphSAGE, GAT and a sparse graph transformer on sampled neighbours; LargeGT-local with one
local node, as NAGphormer; the global module alone, as GOAT's; LargeGT. All see both directions of
edges. Each run has the same processor time, and the model that was best on validation is tested.
Each is a line of a file as soon as it has ended; runs that the file has already are left out.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
import torch

import fastgraph
from measure.largegt_models import BEYOND, MODELS, Sizes, Source
from measure.largegt_training import Limits, run
from measure.machine import machine_facts
from measure.output import RESULTS, Record, write

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "largegt"))

SIZES = {
    "minesweeper": Sizes(k=8, hidden=32, batch=256),
    "tolokers": Sizes(k=8, hidden=32, batch=256),
    "debian": Sizes(k=8),
    "wordnet": Sizes(k=8),
}
SECONDS = {"minesweeper": 12.0, "tolokers": 15.0, "debian": 45.0, "wordnet": 45.0}
PICTURES = Path(__file__).parents[1] / "docs" / "images"
OWN_SPLITS = ("minesweeper", "tolokers")


@click.group(help=__doc__.partition("\n")[0])
def main() -> None:
    pass


@main.command()
@click.argument("record", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--graph", "names", multiple=True, type=click.Choice(list(SIZES)), default=SIZES)
@click.option(
    "--model", "models", multiple=True, type=click.Choice(MODELS + BEYOND), default=MODELS
)
@click.option("--seeds", default=4, show_default=True, help="Runs of each model.")
@click.option("--k", "all_k", multiple=True, type=int, help="Local nodes, for several values.")
@click.option("--hidden", type=int, help="Channels.")
@click.option("--batch", type=int, help="Training nodes of a step.")
@click.option("--seconds", type=float, help="Of training, in processor time.")
@click.option("--epochs", type=float, help="Train for so many, however long it takes.")
@click.option("--threads", default=1, show_default=True)
def train(
    record: Path,
    names: tuple[str, ...],
    models: tuple[str, ...],
    seeds: int,
    all_k: tuple[int, ...],
    hidden: int | None,
    batch: int | None,
    seconds: float | None,
    epochs: float | None,
    threads: int,
) -> None:
    """Train models on graphs, first all with one seed."""
    import graphs

    torch.set_num_threads(threads)
    fastgraph.enable()
    lines = Record(record)
    lines.mend()
    lines.add("machine", machine_facts(threads))
    for seed in range(seeds):
        for name in names:
            graph = graphs.load(name, seed if name in OWN_SPLITS else 0)
            source = Source(graph, seed)
            for model in models:
                for k in all_k or (SIZES[name].k,):
                    limits = (
                        Limits(seconds or SECONDS[name])
                        if epochs is None
                        else Limits(epochs=epochs, patient=False)
                    )
                    given = {"k": k, "hidden": hidden, "batch": batch}
                    sizes = SIZES[name]._replace(**{s: v for s, v in given.items() if v})
                    key = (name, model, seed, sizes._asdict(), limits._asdict())
                    if any(_key(line) == key for line in lines.lines("run")):
                        continue
                    found = {"graph": name, "limits": limits._asdict()}
                    found |= run(model, source, sizes, limits)
                    lines.add("run", found)
                    shown = (f"{what} {found[what]:.4g}" for what in ("test", "epochs", "seconds"))
                    print(name, model, f"seed {seed}, K {k}:", ", ".join(shown), flush=True)


def _key(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[key] for key in ("graph", "model", "seed", "sizes", "limits"))


@main.command()
@click.argument("records", nargs=-1, type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
@click.option("--name", default="largegt-accuracy", show_default=True, help="Of the results.")
@click.option("--note", default="", help="A sentence for the report.")
@click.option(
    "--pictures", type=click.Path(path_type=Path, file_okay=False), default=PICTURES, help="Folder."
)
def report(records: tuple[Path, ...], out: Path, name: str, note: str, pictures: Path) -> None:
    """Publish the runs of some files, with their pictures."""
    from measure.largegt_report import draw, markdown

    lines = [Record(path) for path in records]
    results = {
        "note": note,
        "machine": next(m for line in lines for m in line.lines("machine")),
        "runs": [found for line in lines for found in line.lines("run")],
    }
    path = write(out, name, results, markdown(results))
    drawn = draw(results, pictures / "largegt")
    print("written:", *(file.name for file in [path, *drawn]))


if __name__ == "__main__":
    main()
