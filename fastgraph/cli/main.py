"""Arguments of ``python -m fastgraph``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import click

from fastgraph.cli import profiled, runner

_PROGRAM = "python -m fastgraph"
_TARGET = "fastgraph.target"

_RUN_HELP = """Run a python program with fastgraph enabled.

Works like plain python: everything after the script (or after -m MODULE, -c CODE, or a dash for
standard input) belongs to the program, even if it looks like an option of fastgraph.
"""

_GROUP_HELP = """Run python programs with PyG's message passing replaced by fused kernels.

\b
  python -m fastgraph [OPTIONS] SCRIPT [ARGS]...
  python -m fastgraph [OPTIONS] -m MODULE [ARGS]...
  python -m fastgraph [OPTIONS] -c CODE [ARGS]...
  python -m fastgraph [OPTIONS] - [ARGS]...

  python -m fastgraph compare [OPTIONS] {SCRIPT | -m MODULE | -c CODE} [ARGS]...

  python -m fastgraph partition GRAPH -k PARTS --out FOLDER

  python -m fastgraph tokens GRAPH OUT --k K [OPTIONS]

  python -m fastgraph context GRAPH FEATURES OUT [OPTIONS]

  python -m fastgraph dist-plan [OPTIONS] SCRIPT [ARGS]...

  python -m fastgraph tune [OPTIONS] SCRIPT [ARGS]...

The first are short for the command `run`, which lists the options. A script whose name is that of a
command is run as ./NAME.
"""


_COMPARE_HELP = """Run a python program plain and with fastgraph, and compare.

Both run in fresh processes with the same seed for torch, numpy and random. Everything after the
script (or after -m MODULE or -c CODE) belongs to the program. Times are from one optimizer step to
the next, without the first ones; losses are those whose backward() was called.
"""


class _RunCommand(click.Command):
    """A command whose options end where python's own would: at the program to run."""

    forms = "{SCRIPT | -m MODULE | -c CODE | -} [ARGS]..."

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own, target = self._split(ctx, args)
        ctx.meta[_TARGET] = target
        return super().parse_args(ctx, own)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), self.forms]

    def _split(self, ctx: click.Context, args: list[str]) -> tuple[list[str], runner.Target | None]:
        takes_value = {
            name
            for option in self.params
            if isinstance(option, click.Option) and not option.is_flag
            for name in option.opts
        }
        position = 0
        while position < len(args):
            word, rest = args[position], args[position + 1 :]
            if word in takes_value:
                position += 2
            elif word == "--":
                target = runner.Target("script", rest[0], rest[1:]) if rest else None
                return args[:position], target
            elif word == "-" or not word.startswith("-"):
                return args[:position], runner.Target(
                    "stdin" if word == "-" else "script", word, rest
                )
            elif word[:2] in ("-m", "-c"):
                value = [word[2:], *rest] if len(word) > 2 else rest
                if not value:
                    raise click.UsageError(f"Argument expected for the {word[:2]} option.", ctx)
                form: Literal["module", "code"] = "module" if word[:2] == "-m" else "code"
                return args[:position], runner.Target(form, value[0], value[1:])
            else:
                position += 1
        return args, None


class _CompareCommand(_RunCommand):
    forms = "{SCRIPT | -m MODULE | -c CODE} [ARGS]..."


class _DefaultToRun(click.Group):
    """A group in which anything that is not a command is a program for ``run``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {"--help", "--version", *self.commands}
        is_program = args[0] not in own if args else _has_program_on_stdin()
        if is_program:
            args = ["run", *args]
        return super().parse_args(ctx, args)


def _has_program_on_stdin() -> bool:
    """True if python would take standard input for the program, where none is named."""
    return sys.stdin is None or not sys.stdin.isatty()


def _print_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from fastgraph import __version__

        click.echo(f"fastgraph {__version__}")
        ctx.exit()


@click.group(cls=_DefaultToRun, help=_GROUP_HELP)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Dispatch to a command."""


_FILE = click.Path(dir_okay=False, path_type=Path)

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _enable_options(command: _Function) -> _Function:
    """Add the options that both commands hand on to ``enable()``."""
    for option in (
        click.option(
            "--min-edges",
            type=click.IntRange(min=0),
            metavar="N",
            help="Leave graphs with fewer edges to upstream.",
        ),
        click.option(
            "--strict", is_flag=True, help="Fail where a layer that has a route cannot take it."
        ),
        click.option("--backend", metavar="NAME", help="Use one backend for everything."),
    ):
        command = option(command)
    return command


@cli.command(cls=_RunCommand, help=_RUN_HELP)
@click.option("--report", is_flag=True, help="At exit, show on stderr what was routed and why not.")
@click.option(
    "-v", "--verbose", is_flag=True, help="Say on stderr, once each, which layer takes which route."
)
@click.option(
    "--profile",
    is_flag=True,
    help="At exit, show on stderr where the time went: by layer and line, and by kind of work.",
)
@click.option("--profile-html", type=_FILE, help="Write that as a page there.")
@click.option("--profile-trace", type=_FILE, help="Write all calls there, for chrome://tracing.")
@_enable_options
@click.pass_context
def run(
    ctx: click.Context,
    report: bool,
    verbose: bool,
    profile: bool,
    profile_html: Path | None,
    profile_trace: Path | None,
    backend: str | None,
    strict: bool,
    min_edges: int | None,
) -> tuple[runner.Target, runner.Options]:
    """Describe the program to run; it starts outside click, which handles exceptions itself."""
    target = ctx.meta[_TARGET]
    if target is None and _has_program_on_stdin():
        target = runner.Target("stdin", "", [])
    if target is None:
        raise click.UsageError("Missing a script, -m MODULE, -c CODE or - for stdin.", ctx)
    # A flag that is not given leaves the choice to the environment.
    asked = profile or profile_html is not None or profile_trace is not None
    try:
        outputs = profiled.Outputs.of(profile, profile_html, profile_trace) if asked else None
    except OSError as error:
        raise click.UsageError(str(error), ctx) from None
    return target, runner.Options(
        report, backend, strict or None, min_edges, verbose or None, outputs
    )


@cli.command(cls=_CompareCommand, help=_COMPARE_HELP)
@click.option(
    "--repeats", type=click.IntRange(min=1), default=1, metavar="N", help="Run each way N times."
)
@click.option(
    "--seeds",
    type=click.IntRange(min=2),
    default=5,
    metavar="N",
    help="Seeds on each side where attention dropout is active (default: 5).",
)
@click.option("--seed", type=int, default=0, metavar="N", help="Seed of both (default: 0).")
@click.option("--html", type=click.Path(dir_okay=False), help="Write a page with plots there.")
@_enable_options
@click.pass_context
def compare(
    ctx: click.Context,
    repeats: int,
    seeds: int,
    seed: int,
    html: str | None,
    backend: str | None,
    strict: bool,
    min_edges: int | None,
) -> int:
    """Run a program both ways and print what differs."""
    target = ctx.meta[_TARGET]
    if target is None:
        raise click.UsageError("Missing a script, -m MODULE or -c CODE.", ctx)
    if target.kind == "stdin":
        raise click.UsageError("A program from stdin cannot be run twice: give a script.", ctx)
    from fastgraph.cli.compare import compare_program
    from fastgraph.cli.programs.scripts import Plan

    options = runner.Options(False, backend, strict or None, min_edges)
    return compare_program(Plan(target, options, repeats, seeds, seed), html)


@cli.command()
@click.argument("graph", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "-k", "--parts", type=click.IntRange(min=1), required=True, metavar="N", help="Number of ranks."
)
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, metavar="FOLDER", help="A new folder."
)
@click.option("--weights", metavar="W,...", help="Share of the work of each rank, such as 2,1.")
@click.option(
    "--method",
    type=click.Choice(["metis", "even"]),
    default="metis",
    help="metis: few edges between ranks (default); even: consecutive nodes.",
)
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Write a plot there.")
def partition(
    graph: Path, parts: int, out: Path, weights: str | None, method: str, plot: Path | None
) -> int:
    """Write a graph in a file for each rank, for fastgraph.dist.load_shards.

    GRAPH is a .npz of arrays, a Data or HeteroData of PyG that torch.save wrote, or a graph of DGL
    that dgl.save_graphs wrote.
    """
    from fastgraph.cli.partition import partition_graph

    try:
        shares = None if weights is None else [float(share) for share in weights.split(",")]
    except ValueError:
        raise click.UsageError(f"--weights must be numbers like 2,1, got {weights}") from None
    return partition_graph(graph, out, parts, shares, method, plot)


@cli.command()
@click.argument("graph", type=click.Path(exists=True, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@click.option("-k", "--k", type=click.IntRange(min=1), required=True, help="Nodes of a row.")
@click.option("--seed", type=int, default=0, show_default=True, help="Any int64.")
@click.option(
    "--nodes",
    type=click.Path(exists=True, path_type=Path, dir_okay=False),
    help="An .npy file with the nodes that get rows, or a mask of them. Default: all.",
)
@click.option(
    "--shard", metavar="[I/]N", help="The I-th of N shards, or all N, which torchrun's ranks share."
)
@click.option("--resume", is_flag=True, help="Finish what was begun; leave what is whole.")
@click.option(
    "--direction",
    type=click.Choice(["in", "out", "both"]),
    default="in",
    show_default=True,
    help="Against edges, along them, or either way.",
)
@click.option(
    "--hub-cap",
    type=click.IntRange(min=1),
    metavar="N",
    help="Thin longer lists of neighbours to N, at random. Default: none.",
)
@click.option(
    "--variant",
    type=click.Choice(["paper", "release"]),
    default="paper",
    show_default=True,
    help="Of LargeGT's sampling.",
)
def tokens(
    graph: Path,
    out: Path,
    k: int,
    seed: int,
    nodes: Path | None,
    shard: str | None,
    resume: bool,
    direction: str,
    hub_cap: int | None,
    variant: str,
) -> int:
    """Sample nodes one or two hops away from each node, for LargeGT's tokens.

    GRAPH is a folder with colptr.npy and row.npy (edges by destination), rowptr.npy and col.npy (by
    source) or both, which are mapped rather than loaded; or a file as for `partition`. OUT is a
    folder of shards for fastgraph.tokens.TokenStore.
    """
    from fastgraph.cli.tokens import Sample, write_sample

    sample = Sample(k, seed, direction, hub_cap, variant, resume)
    return write_sample(graph, out, sample, nodes, shard)


@cli.command()
@click.argument("graph", type=click.Path(exists=True, path_type=Path))
@click.argument("features", type=click.Path(exists=True, path_type=Path, dir_okay=False))
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@click.option("--hops", type=click.IntRange(min=1), default=2, show_default=True)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    default="bfloat16",
    show_default=True,
)
@click.option("--memory", default="4GiB", show_default=True, help="May be allocated.")
@click.option("--resume", is_flag=True, help="Finish what was begun; what is whole is left.")
def context(
    graph: Path, features: Path, out: Path, hops: int, dtype: str, memory: str, resume: bool
) -> int:
    """Aggregate features one hop and more, for LargeGT's tokens.

    GRAPH is as for `tokens`. FEATURES is an .npy file with a row for each node. Both are mapped
    rather than loaded. OUT is a folder for fastgraph.tokens.HopFeatures.
    """
    from fastgraph.cli.context import write_features

    return write_features(graph, features, out, hops, dtype, memory, resume)


@cli.command(
    "dist-plan", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.option(
    "--devices",
    default="1..64",
    show_default=True,
    metavar="A..B",
    help="Powers of two, or numbers such as 2,4,8.",
)
@click.option("--latency", type=float, metavar="US", help="Microseconds of a message.")
@click.option("--bandwidth", type=float, metavar="GB/S", help="GB that a device sends in a second.")
@click.option(
    "--work", type=float, metavar="NS", help="Nanoseconds for an edge and a channel of a layer."
)
@click.option("--memory", type=float, metavar="GIB", help="GiB that a device has.")
@click.option(
    "--seconds",
    type=float,
    default=300.0,
    show_default=True,
    metavar="S",
    help="For METIS partitions; halos for more devices than it allows are extrapolated.",
)
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Write a plot there.")
@click.option(
    "--json", type=click.Path(path_type=Path, dir_okay=False), help="Write figures there."
)
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def dist_plan(
    devices: str,
    latency: float | None,
    bandwidth: float | None,
    work: float | None,
    memory: float | None,
    seconds: float,
    plot: Path | None,
    json: Path | None,
    script: Path,
    arguments: tuple[str, ...],
) -> int:
    """Show what a training script of PyG would take on numbers of devices.

    Its first steps are run, on one process; what is shown for several is modelled. Links, work and
    memory are those of this machine, unless they are given.
    """
    from fastgraph.cli.dist_plan import Options, devices_of, plan_script

    given = {"latency": latency, "bandwidth": bandwidth, "work": work, "memory": memory}
    for name, value in given.items():
        if value is not None and not value > 0:
            raise click.UsageError(f"--{name} must be above 0, got {value}")
    try:
        numbers = devices_of(devices)
    except ValueError as error:
        raise click.UsageError(f"--devices: {error}") from None
    options = Options(numbers, latency, bandwidth, work, memory, seconds, plot, json)
    return plan_script(script, arguments, options)


@cli.command(
    "tune", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.option(
    "--budget",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="S",
    help="Seconds for measuring.",
)
@click.option(
    "--device",
    metavar="DEVICE",
    help="cpu, or a GPU by its name, such as H200. Default: the CPU, and every GPU that is known.",
)
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def tune(budget: float, device: str | None, script: Path, arguments: tuple[str, ...]) -> int:
    """Measure what a script calls in the ways that there are, and keep what is fastest.

    Its first steps are run. Later runs, of this and of other scripts, visit the rows of the same
    graphs in the order that was fastest, to the same bits. Printed besides: what other orders of
    nodes would do, and what a model expects of tiles for tensor cores on GPUs. Of calls on a GPU
    it is kept which kernel is fastest, for runs with FASTGRAPH_MEASURE=1.
    """
    from fastgraph.cli.tune import tune_script

    return tune_script(script, arguments, budget, device)


@cli.command()
def info() -> None:
    """Show versions, CPU, backends, settings and what would be routed.

    Works when torch or PyG is missing or broken, and says so.
    """
    from fastgraph.cli.info import print_info

    print_info()


@cli.command()
@click.option(
    "--device", metavar="DEVICE", help="As torch names it. Default: the CPU, and GPUs by kind."
)
@click.option("--backend", metavar="NAME", help="Default: those made for the device.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
def check(device: str | None, backend: str | None, as_json: bool) -> int:
    """Call every kernel on small awkward graphs, and compare with plain torch in float64.

    Exits with 1 where one of them fails. Kernels for GPUs are checked without being asked at the
    first call on a kind of GPU, and only those that pass are used; this shows all of it.
    """
    from fastgraph.cli.check import print_check

    return print_check(device, backend, as_json)


def main(argv: list[str] | None = None) -> None:
    """Entry point; ``argv`` defaults to ``sys.argv[1:]``. Exits with the program's own status."""
    try:
        result: Any = cli.main(argv, prog_name=_PROGRAM, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    if isinstance(result, tuple):
        runner.run(*result)
    elif isinstance(result, int):
        sys.exit(result)
