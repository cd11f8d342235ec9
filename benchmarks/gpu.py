"""Build, test and measure the CUDA kernels on a machine with a GPU, in one command or in a few.

    FASTGRAPH_DATA=... python benchmarks/gpu.py

Needs a GPU with its driver, nvcc, cmake, ninja and a C++17 compiler, compute-sanitizer, and the
packages torch, torch_geometric, numpy and what fastgraph depends on, for the tests also pytest and
pytest-timeout; what is missing is named before anything runs. fastgraph itself need not be
installed, and there need be no network: unpack wheels into a folder and let PYTHONPATH name it.
Where pytest-xdist, matplotlib or pymetis are missing, tests run one by one, there is no figure, or
no graph in the order of clusters.

The stages: ``build`` compiles the kernels; ``preflight`` looks at what they rely on and only a
device can show; ``turbo-gnn`` builds that package from the sources that ``--turbo-gnn`` names,
beside the stages before the measurements, and may fail; ``test`` and ``sanitize`` run the tests on
the GPU; ``measure`` times message passing of each layer beside upstream and other packages, and
compares what they compute. Each package of others runs in a process of its own, and what crashes or
hangs loses its own cell only.

What is found goes line by line to ``benchmarks/results/<date>-gpu.jsonl``, and in the end, also
when the time is over, to ``.json``, ``.md`` and ``.svg`` beside it. Several calls share the work
with ``--stages``, ``--graphs`` and one ``--record``: cells that are in the record already are not
measured again. Of a run that was killed, ``--stages '' --record FILE`` makes the report.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from measure.requirements import find_program, missing

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "fastgraph" / "lib" / "libfastgraph_cuda.so"
BUILD = ROOT / "build" / "gpu"
TURBO_GNN = BUILD / "turbo_gnn"
STAGES = ("build", "preflight", "check", "turbo-gnn", "test", "sanitize", "measure")
# On a machine that is lent for minutes: stages in the order of their worth, the share of all
# seconds after which each has to have ended, and the graphs that are measured, if not all.
SHOT: tuple[tuple[str, float, list[str] | None], ...] = (
    ("preflight", 0.15, None),
    ("check", 0.3, None),
    ("measure", 0.6, ["tolokers"]),
    ("test", 0.8, None),
    ("measure", 1.0, None),
)
OTHERS = ("turbo-gnn", "compile", "flex_attention")
WIDTHS = (256, 64, 512, 128)
# Each test under a tool that watches every access runs a hundred times slower.
_SANITIZED = "test_every_graph and (random or hub_small) and not dropout"
_TURBO_JOBS = 8  # beside our own compilers
_LINES_KEPT = 200  # of what a stage prints: the table of all operators and dtypes among them


def main() -> None:
    options = _options()
    tell(f"{options.seconds:.0f} seconds for {', '.join(options.stages) or 'the report alone'}")
    start = time.monotonic()
    lacking = missing(options.stages)
    if lacking:
        sys.exit(f"this machine lacks {', '.join(lacking)}")
    sys.path.insert(0, str(ROOT))  # where fastgraph is not installed
    from measure.output import RESULTS, Record

    path, folder = options.record, options.out or RESULTS
    record = Record(path) if path is not None else Record.fresh(folder, "gpu")
    record.mend()
    record.add("command", shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]]))
    # A time limit of others ends this process by a signal; what is known then is reported, too.
    signal.signal(signal.SIGTERM, _end)
    try:
        if options.shot:
            failed = shoot(options, record, start)
        else:
            failed = run_and_measure(options, record, start + options.seconds)
    finally:
        report(record)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; see {record.stem}.md")


def _options() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    def some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
        def chosen(text: str) -> list[str]:
            if set(names(text)) - set(known):
                raise argparse.ArgumentTypeError(
                    f"expected some of {', '.join(known)}, got {text!r}"
                )
            return names(text)

        return chosen

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    default = [stage for stage in STAGES if stage != "turbo-gnn"]
    add("--stages", type=some_of(STAGES), help="some, with commas; none: report only")
    add("--seconds", type=float, default=450.0, help="for all stages together; default: 450")
    add("--shot", type=float, help="so many seconds, spent in the order of worth: see SHOT")
    add("--turbo-gnn", type=Path, help="its source distribution or a folder with it, to be built")
    add(
        "--others",
        type=some_of(OTHERS),
        default=list(OTHERS),
        help="packages beside us, with commas",
    )
    add("--graphs", type=names, help="with commas; default: all there are")
    add("--layers", type=names, help="with commas; default: all")
    add("--widths", type=lambda text: [int(w) for w in names(text)], default=list(WIDTHS))
    add("--timed-seconds", type=float, default=3.0, help="in which a cell is timed; default: 3")
    add(
        "--cell-seconds", type=float, default=120.0, help="after which it is given up; default: 120"
    )
    add("--out", type=Path, help="folder for the results")
    add("--record", type=Path, help="a .jsonl file to add to; default: a new one in the folder")
    add("--device", default="cuda", help="cpu tries everything but the kernels")
    options = parser.parse_args()
    if options.shot:
        options.seconds = options.shot
        options.stages = list(dict.fromkeys(stage for stage, *_ in SHOT))
    if options.stages is None:
        options.stages = [*default, *(["turbo-gnn"] if options.turbo_gnn else [])]
    if "turbo-gnn" in options.stages and options.turbo_gnn is None:
        parser.error("the stage turbo-gnn needs --turbo-gnn")
    return options


def shoot(options: argparse.Namespace, record: Any, start: float) -> list[str]:
    """Run the stages of a shot; return the names of those that failed.

    What fails stops nothing that comes after it: there may be no other shot.
    """
    failed: list[str] = []
    for stage, share, graphs in SHOT:
        options.stages = [stage]
        if graphs is not None and os.environ.get("FASTGRAPH_DATA"):
            given = argparse.Namespace(**vars(options) | {"graphs": graphs, "widths": [WIDTHS[0]]})
        else:
            given = options
        failed += run_and_measure(given, record, start + share * options.seconds)
        tell(f"{stage} ended after {time.monotonic() - start:.0f} of {options.seconds:.0f} s")
    return list(dict.fromkeys(failed))


def run_and_measure(options: argparse.Namespace, record: Any, deadline: float) -> list[str]:
    """Run all stages that are asked for; return the names of those that failed."""
    failed = run_stages(options, record, deadline)
    if "measure" in options.stages and "build" not in failed:
        measure(options, record, deadline)
        # Memory may be too small; anything else is a mistake of ours.
        if any(
            row["rival"].startswith("ours")
            and row.get("failed", "out of memory") != "out of memory"
            for row in record.lines("row")
        ):
            failed.append("measure")
    return failed


_running: set[subprocess.Popen[str]] = set()


def _end(*_: object) -> None:
    for process in list(_running):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    sys.exit("ended by a signal")


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run_stages(options: argparse.Namespace, record: Any, deadline: float) -> list[str]:
    """Run the stages before the measurements; return the names of those that failed."""
    failed: list[str] = []
    with beside(options, record, deadline):
        for stage, commands in (
            ("build", build_commands),
            ("preflight", lambda: preflight_commands(options.device)),
            ("check", lambda: check_commands(options.device)),
            ("test", test_commands),
            ("sanitize", sanitize_commands),
        ):
            if stage not in options.stages or "build" in failed:
                continue
            given, environ = commands()
            seconds = max(1.0, deadline - time.monotonic())
            if stage == "sanitize" and "measure" in options.stages:
                seconds /= 3
            # Only the commands of a build need each other.
            with ThreadPoolExecutor(1 if stage == "build" else len(given)) as pool:
                steps = list(pool.map(lambda c: run(c, environ, seconds), given))  # noqa: B023
            for step in steps:
                record.add("stage", {"stage": stage, **step})
                if stage in ("preflight", "check") and not step["exit_code"]:
                    tell("\n".join(step["output"]))
            if any(step["exit_code"] for step in steps) or (
                stage == "build" and not LIBRARY.exists()
            ):
                failed.append(stage)
    return failed


@contextlib.contextmanager
def beside(options: argparse.Namespace, record: Any, deadline: float) -> Iterator[None]:
    """Build turbo-gnn meanwhile, if that is asked for; nothing else depends on whether it works."""
    if "turbo-gnn" not in options.stages:
        yield
        return
    command, environ = turbo_gnn_command(options.turbo_gnn)
    seconds = max(1.0, deadline - time.monotonic())
    with ThreadPoolExecutor(1) as pool:
        built = pool.submit(run, command, environ, seconds)
        yield
        record.add("stage", {"stage": "turbo-gnn", **built.result()})


Commands = tuple[list[list[str]], dict[str, str]]


def capability() -> str:
    """That of the GPU, such as 90, as its driver says."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        shown = ""
    number = shown.strip().partition("\n")[0].replace(".", "")
    if not number.isdigit():
        sys.exit("nvidia-smi shows no GPU")
    return number


def build_commands() -> Commands:
    """The library for the GPU at hand, and for no other, with all cores."""
    LIBRARY.unlink(missing_ok=True)  # what is tested is what was built
    given = {
        "Python_EXECUTABLE": sys.executable,
        "CMAKE_CUDA_COMPILER": find_program("nvcc"),
        "FASTGRAPH_CPU_LEVELS": "native",
        "FASTGRAPH_CUDA": "on",
        "FASTGRAPH_CUDA_ARCHITECTURES": capability(),
        # On few cores, to read the headers once more for each type costs more than it gains.
        "FASTGRAPH_CUDA_SPLIT": "ON" if (os.cpu_count() or 1) > 4 else "OFF",
    }
    options = [f"-D{name}={value}" for name, value in given.items()]
    return [
        ["cmake", "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", *options],
        ["cmake", "--build", str(BUILD), "--target", "all"],
    ], {}


def preflight_commands(device: str) -> Commands:
    paths = _paths(str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH"))
    command = [sys.executable, "-m", "measure.preflight", "--device", device]
    return [command], {"PYTHONPATH": paths}


def check_commands(device: str) -> Commands:
    """Every operator beside plain torch in float64, as users check their device."""
    paths = _paths(str(ROOT), os.environ.get("PYTHONPATH"))
    return [[sys.executable, "-m", "fastgraph", "check", "--device", device]], {"PYTHONPATH": paths}


def _paths(*parts: str | None) -> str:
    return os.pathsep.join(part for part in parts if part)


def turbo_gnn_command(
    sources: Path, python: str = sys.executable, number: str = ""
) -> tuple[list[str], dict[str, str]]:
    """Into a folder of its own, by the torch of a Python, and for this GPU or one like it."""
    number = number or capability()
    links = BUILD / "links"
    links.mkdir(parents=True, exist_ok=True)
    # Packages have cuSPARSE under a name with its version, for which linkers do not look.
    found = [
        *_packages(python).glob("nvidia/*/lib/libcusparse.so*"),
        *Path("/usr/local").glob("cuda*/lib64/libcusparse.so*"),
    ]
    link = links / "libcusparse.so"
    link.unlink(missing_ok=True)
    if found:
        link.symlink_to(found[0])
    command = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
    command += ["--no-index", "--no-build-isolation", "--no-cache-dir", "--target", str(TURBO_GNN)]
    return (
        [*command, str(sources.resolve())],
        {
            "TURBO_GNN_FORCE_BUILD": "TRUE",  # it would look for a wheel on the network
            "TORCH_CUDA_ARCH_LIST": f"{number[:-1]}.{number[-1]}",
            "MAX_JOBS": str(_TURBO_JOBS),
            "LIBRARY_PATH": _paths(str(links), os.environ.get("LIBRARY_PATH")),
        },
    )


def _packages(python: str) -> Path:
    """Where a Python has its packages."""
    command = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


def test_commands() -> Commands:
    parallel = []
    if importlib.util.find_spec("xdist"):
        parallel = ["-n", str(min(8, os.cpu_count() or 1)), "--dist", "worksteal"]
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    own = [f"--ignore=tests/cuda/test_{name}.py" for name in ("benchmark", "model", "one_shot")]
    return [[*pytest, *parallel, *own, "--gpu", "tests/cuda"]], {}


def sanitize_commands() -> Commands:
    tool = find_program("compute-sanitizer") or "compute-sanitizer"
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--gpu"]
    tests += ["tests/cuda/test_operators.py", "-k", _SANITIZED, "-o", "timeout=0"]
    # Torch looks for what a GPU can do by calls that fail; they are no errors.
    options = ["--error-exitcode", "9", "--report-api-errors", "no"]
    # Blocks of torch's cache are larger than asked for, and overruns into them go unseen.
    return [
        [tool, "--tool", kind, *options, *tests]
        for kind in ("memcheck", "racecheck", "initcheck", "synccheck")
    ], {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def run(command: Sequence[str], environ: dict[str, str], seconds: float) -> dict[str, Any]:
    """Run a command and tell how it went; one that takes longer is stopped."""
    tell(shlex.join(command))
    start = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    _running.add(process)
    try:
        output, _ = process.communicate(timeout=seconds)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, code = process.communicate()[0] + f"\nstopped after {seconds:.0f} s", 124
    _running.discard(process)
    tail = output.splitlines()[-_LINES_KEPT:]
    if code:
        tell("\n".join(tail))
    return {
        "command": shlex.join(command),
        "exit_code": code,
        "seconds": round(time.perf_counter() - start, 1),
        "last_line": tail[-1] if tail else "",
        "output": tail,
    }


def measure(options: argparse.Namespace, record: Any, deadline: float) -> None:
    """Put machine, bandwidth and the rows of all cells into the record."""
    import torch

    from measure.apart import LostError, Running
    from measure.cells import plan
    from measure.graphs import CLUSTERED, SHAPES, default_graphs
    from measure.layers import LAYERS
    from measure.programs import PROGRAMS

    if TURBO_GNN.exists():
        sys.path.append(str(TURBO_GNN))  # also of the processes that are started
    others = [
        name
        for name in options.others
        if name != "turbo-gnn" or importlib.util.find_spec("turbo_gnn") is not None
    ]
    _, dense, *_ = default_graphs()
    graphs = options.graphs or [*default_graphs(), *SHAPES, dense + CLUSTERED]
    layers = options.layers or [*LAYERS, *PROGRAMS]
    cells = plan(graphs, layers, options.widths, others)
    running = Running(torch.device(options.device), record, tell)
    try:
        running.measure(cells, deadline, options.timed_seconds, options.cell_seconds)
    except LostError as error:
        sys.exit(f"nothing can be measured: {error}")
    finally:
        running.end()


def report(record: Any) -> None:
    """Write everything that the record holds as JSON, Markdown and a figure."""
    from measure.gpu_report import markdown, plot
    from measure.output import write_to

    def last(kind: str, otherwise: Callable[[], Any]) -> Any:
        return (record.lines(kind) or [otherwise()])[-1]

    results = {
        "commands": record.lines("command"),
        "machine": last("machine", dict),
        "bandwidth": last("bandwidth", dict),
        "cache_bytes": last("cache_bytes", int),
        "left": last("left", list),
        "stages": record.lines("stage"),
        "cells": record.lines("row"),
    }
    path = write_to(record.stem, results, markdown(results))
    try:
        plot(results, record.path.with_suffix(".svg"))
    except ImportError as error:
        tell(f"no figure: {error}")
    tell(f"written to {path}")


if __name__ == "__main__":
    main()
