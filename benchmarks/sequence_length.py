"""The longest sequence that a graph transformer trains on, by the number of ranks.

    PYTHONPATH=. python benchmarks/sequence_length.py [--ranks 1,2,4,8] [--modes heads,halo]

Tokens are the nodes of a generated graph. Each rank loads its shard, and may have as much private
memory more than it has before (``RLIMIT_DATA``) as all others. The longest sequence is found by
trying: one that is a few per cent longer was tried, too, and did not fit. With ``--record FILE``
several runs make one: what the file has is not tried again. Results go to
``benchmarks/results/<date>-sequence-length.json`` and ``.md``.
"""

from __future__ import annotations

import math
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from measure.output import RESULTS, Record, publish

_MIB = 2**20
_GROWTH = 1.8
_ALONE = "one rank"
_ROWS = 16  # of all channels that a token takes, to begin with
_STEPS = 2  # Adam has its state from the second one on

Tried = dict[str, Any]


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--kind", default="communities", show_default=True, help="Of the graph, or random.")
@click.option("--ranks", default="1,2,4,8", show_default=True, help="Separated by commas.")
@click.option("--modes", default="heads,halo", show_default=True, help="Separated by commas.")
@click.option("--channels", type=click.IntRange(8), default=256, show_default=True)
@click.option("--limit", type=click.IntRange(1), default=128, show_default=True, help="MiB.")
@click.option("--within", type=float, default=0.04, show_default=True, help="Of the longest.")
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), help="To go on with.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
def main(
    kind: str,
    ranks: str,
    modes: str,
    channels: int,
    limit: int,
    within: float,
    record: Path | None,
    out: Path,
) -> None:
    from measure.dist_transformer_steps import HEADS, NUM_LAYERS
    from measure.machine import machine_facts

    console = Console(stderr=True)
    done = Record(record) if record else Record.fresh(out, "sequence-length")
    done.mend()
    done.add("command", shlex.join(["python", "benchmarks/sequence_length.py", *sys.argv[1:]]))
    for size in (int(size) for size in ranks.split(",")):
        # One rank has all heads of all nodes in any mode.
        for mode in modes.split(",") if size > 1 else [_ALONE]:

            def attempt(nodes: int, size: int = size, mode: str = mode) -> Tried:
                by = "halo" if mode == _ALONE else mode
                found = tried(f"{kind}-{nodes}", channels, size, by, limit * _MIB)
                found = {"ranks": size, "mode": mode, "nodes": nodes, **found}
                done.add("try", found)
                console.print(found)
                return found

            known = of_search(done.lines("try"), size, mode)
            fewer = of_search(done.lines("try"), size // 2, mode if size > 2 else _ALONE)
            if any(of["trains"] for of in fewer):
                guess = round(_GROWTH * longest(fewer)["nodes"])
            else:
                guess = size * limit * _MIB // (4 * channels * _ROWS)
            search(attempt, known, guess, limit * _MIB, within)
    results: dict[str, Any] = {
        "command": done.lines("command"),
        "machine": machine_facts(1),
        "kind": kind,
        "channels": channels,
        "layers": NUM_LAYERS,
        "heads": HEADS,
        "limit": limit * _MIB,
        "tries": done.lines("try"),
    }
    publish(console, out, "sequence-length", results, markdown(results))
    if record is None:
        done.path.unlink()


def tried(name: str, channels: int, ranks: int, mode: str, more: int) -> Tried:
    """The outcome of training on a graph: success or not, and the largest rank's peak in bytes."""
    from fastgraph.dist.ranks.spawning import RankError, run_on_ranks
    from measure.dist_memory_steps import OUT_OF_MEMORY, is_of_memory
    from measure.sequence_length_steps import ENDED_BY_OTHERS, train, write

    with tempfile.TemporaryDirectory() as folder:
        shards = str(Path(folder) / "shards")
        facts: Tried = write(name, channels, ranks, shards)
        try:
            found = run_on_ranks(train, ranks, shards, channels, mode, more, _STEPS)
        except RankError as error:
            if not is_of_memory(str(error)):
                raise
            return {**facts, "trains": False}
    if OUT_OF_MEMORY in found:
        return {**facts, "trains": False}
    if ENDED_BY_OTHERS in found:
        raise RuntimeError("a rank ended, and none is out of memory")
    losses = [of["returned"] for of in found]
    if any(of_rank != losses[0] for of_rank in losses):
        raise RuntimeError(f"losses differ by rank: {losses}")
    peak = max(of["data"] - of["before"] for of in found)
    return {**facts, "trains": True, "peak": peak, "losses": losses[0]}


def search(
    attempt: Callable[[int], Tried], known: list[Tried], guess: int, limit: int, within: float
) -> None:
    """Try until the longest that trains is next to the shortest that does not.

    Args:
        attempt: tries a number of nodes.
        known: what was tried before.
        guess: the number to begin with.
        limit: in bytes.
        within: how near, of the longest.
    """
    tries = list(known)
    while True:
        trained = [found for found in tries if found["trains"]]
        low = max((found["nodes"] for found in trained), default=0)
        high = min((found["nodes"] for found in tries if not found["trains"]), default=0)
        if low and high and high <= low * (1 + within):
            return
        expected = low * limit / longest(tries)["peak"] if trained else float(guess)
        tries.append(attempt(_next(expected, low, high, within)))


def _next(expected: float, low: int, high: int, within: float) -> int:
    """Where what was measured expects the limit, or else in between, or beyond."""
    if not high:
        return math.floor(max(expected, low * (1 + within)))
    if not low:
        return math.floor(min(expected, high / (1 + 2 * within)))
    shortest, longest = low * (1 + within / 2), high / (1 + within / 2)
    if shortest < expected < longest:
        return round(expected)
    return round(math.sqrt(low * high))


def of_search(tries: list[Tried], ranks: int, mode: str) -> list[Tried]:
    """Those of one number of ranks and mode."""
    return [found for found in tries if (found["ranks"], found["mode"]) == (ranks, mode)]


def longest(tries: list[Tried]) -> Tried:
    """The longest that trains."""
    return max((found for found in tries if found["trains"]), key=lambda found: found["nodes"])


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    from measure.report import machine_lines, table

    of_modes: dict[str, dict[int, list[Tried]]] = {}
    for mode in dict.fromkeys(of["mode"] for of in results["tries"] if of["mode"] != _ALONE):
        for found in results["tries"]:
            if found["mode"] in (_ALONE, mode):
                by_ranks = of_modes.setdefault(mode, {})
                by_ranks.setdefault(found["ranks"], []).append(found)
    rows, growths = [], {}
    for mode, by_ranks in of_modes.items():
        before = None
        for ranks, tries in sorted(by_ranks.items()):
            found = longest(tries)
            failed = min(of["nodes"] for of in tries if not of["trains"])
            growth = ""
            if before is not None and ranks == 2 * before[0]:
                growths[mode, ranks] = found["nodes"] / before[1]
                growth = f"{growths[mode, ranks]:.2f}x"
            before = ranks, found["nodes"]
            rows.append(
                [
                    mode,
                    str(ranks),
                    f"{found['nodes']:,}",
                    f"{failed:,}",
                    growth,
                    f"{found['peak'] / _MIB:.0f}",
                    f"{found['edges']:,}",
                    f"{found['halo']:,}",
                ]
            )
    least = {mode: min(g for (of, _), g in growths.items() if of == mode) for mode, _ in growths}
    verdicts = [
        f"By {mode} the longest sequence grows {growth:.2f} times or more with twice the ranks."
        for mode, growth in least.items()
    ]
    if "heads" in least:
        met = "met" if least["heads"] >= _GROWTH else "**missed**"
        verdicts.append(f"Required by heads: {_GROWTH} times; {met}.")
    head = ["mode", "ranks", "longest that trains", "does not", "of half the ranks"]
    head += ["its peak, MiB", "its edges", "largest halo"]
    return "\n".join(
        [
            f"# The longest sequence that trains with {results['limit'] / _MIB:.0f} MiB a rank",
            "",
            *(f"`{command}`" for command in results["command"]),
            "",
            f"Tokens are nodes of `{results['kind']}-N`, 16 edges for each. "
            f"{results['layers']} layers of `TransformerConv`, {results['channels']} channels in "
            f"{results['heads']} heads,",
            f"float32, {_STEPS} steps with Adam on ranks that have loaded a shard each. The limit "
            "is one of private memory (`RLIMIT_DATA`),",
            "above what a rank has once it has trained on something small.",
            "",
            *verdicts,
            "",
            *table(head, rows),
            "",
            *machine_lines(results["machine"]),
        ]
    )


if __name__ == "__main__":
    main()
