"""``python -m fastgraph tokens``: samples local nodes into a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Sample(NamedTuple):
    """Options of :func:`fastgraph.tokens.write_tokens`."""

    k: int
    seed: int
    direction: str
    hub_cap: int | None
    variant: str
    resume: bool


def write_sample(
    graph: Path, out: Path, sample: Sample, nodes: Path | None, shard: str | None
) -> int:
    """Write shards of local nodes and print what is in them.

    Args:
        graph: a folder of :func:`fastgraph.tokens.open_graph`, or a file of
            :func:`fastgraph.cli.partition.read_graph`.
        out: the folder of shards.
        sample: how it is sampled.
        nodes: a file with those that get rows; by default all.
        shard: see :func:`shards_of`.

    Returns:
        The exit code, 0.

    Raises:
        click.ClickException: the graph cannot be read, or a file cannot be written.
        click.UsageError: ``shard`` is none.
    """
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        own, shards = shards_of(shard, rank, ranks)
    except ValueError as error:
        raise click.UsageError(f"--shard {error}") from None
    from fastgraph import manifest
    from fastgraph.tokens import write_tokens
    from fastgraph.tokens.store import FORM

    console = Console()
    try:
        found = read_lists(graph)
        chosen = None if nodes is None else _nodes(nodes)
        for number in own:
            with progress_bar(quiet=ranks > 1) as progress:
                bar = progress.add_task(f"shard {number} of {shards}", total=None)
                folder = write_tokens(
                    found,
                    out,
                    **sample._asdict(),
                    nodes=chosen,
                    shard=number,
                    shards=shards,
                    progress=lambda done, total: progress.update(bar, completed=done, total=total),  # noqa: B023
                )
            content = manifest.read(folder, FORM).content
            console.print(_summary(content), soft_wrap=True, highlight=False)
            console.print(f"Wrote {folder}", soft_wrap=True, highlight=False)
    except (OSError, ValueError, TypeError, IndexError, ModuleNotFoundError) as error:
        raise click.ClickException(str(error)) from None
    return 0


def shards_of(text: str | None, rank: int, ranks: int) -> tuple[list[int], int]:
    """Which shards a process writes, counted from 1, and how many there are.

    Args:
        text: ``"3/16"`` for the third of sixteen, ``"16"`` for all of sixteen, which the ranks of
            ``torchrun`` share; by default one for each rank.
        rank: of this process.
        ranks: how many there are.

    Raises:
        ValueError: it is something else, or one of several ranks is to write one shard.
    """
    one, slash, all_ = (text or str(ranks)).rpartition("/")
    if not all_.isdecimal() or not (one.isdecimal() or not slash):
        raise ValueError(f"must be a number of shards, or one of them as 3/16, got {text}")
    shards = int(all_)
    if shards < 1 or (slash and not 1 <= int(one) <= shards):
        raise ValueError(f"must be from 1/{max(shards, 1)} to {max(shards, 1)}/..., got {text}")
    if slash and ranks > 1:
        raise ValueError(f"must be a number of shards, which {ranks} ranks share, got {text}")
    return ([int(one)] if slash else list(range(1, shards + 1))[rank::ranks]), shards


def read_lists(path: Path) -> Any:
    """The graph in a folder of lists, or in a file as for ``partition``.

    Raises:
        ValueError: it has several types of nodes, or files are not what they must be.
    """
    from fastgraph.tokens import open_graph

    if path.is_dir():
        return open_graph(path)
    from fastgraph.cli.partition import read_graph
    from fastgraph.tokens.graph_files import graph_of_edges

    data = read_graph(path)
    if not hasattr(data, "edge_index"):
        raise ValueError(f"{path}: expected one type of nodes and of edges, got {data}")
    return graph_of_edges(data.edge_index, data.num_nodes)


def _nodes(file: Path) -> Any:
    import numpy as np
    import torch

    try:
        values = np.load(file, allow_pickle=False)
        return torch.from_numpy(values)
    except (ValueError, EOFError, TypeError, AttributeError) as error:
        raise ValueError(
            f"--nodes {file}: expected an .npy file of numbers or of a mask: {error}"
        ) from error


def _summary(content: dict[str, Any]) -> str:
    parts = [
        f"{content['rows']:,} rows of {content['k']}",
        f"{content['candidates']:,} candidates",
        f"{content['few']:,} rows with replacement, as there were few",
        f"{content['none']:,} of nodes with none",
    ]
    if content["hub_cap"] is not None:
        parts.append(f"{content['thinned']:,} lists thinned to {content['hub_cap']:,}")
    return "; ".join(parts) + "."


def progress_bar(*, quiet: bool) -> Progress:
    """A bar on the standard error, which is gone in the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, *times, console=Console(stderr=True), transient=True, disable=quiet)
