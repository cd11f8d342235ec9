"""Build, test and measure the CUDA kernels on a machine with a GPU, in one command.

    FASTGRAPH_DATA=... python benchmarks/gpu.py

Needs a GPU with its driver, nvcc, cmake, ninja and a C++17 compiler, compute-sanitizer, and the
packages torch, torch_geometric, apache-tvm-ffi, attrs, click, numpy, pluggy, rich and wrapt, for
the tests also filelock, pytest and pytest-timeout; what is missing is named before anything runs.
fastgraph itself need not be installed, and there need be no network: unpack wheels into a folder
and let PYTHONPATH name it. Where pytest-xdist or matplotlib are missing, tests run one by one, or
there is no figure.

The tests run on the GPU, some also under compute-sanitizer; then message passing of each layer is
timed beside upstream and other packages, and what they compute is compared. What is found goes line
by line to ``benchmarks/results/<date>-gpu.jsonl``, and in the end, also when the time is over, to
``.json``, ``.md`` and ``.svg`` beside it. Several calls share the work with ``--stages``,
``--graphs`` and one ``--record``: cells that are in the record already are not measured again.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from measure.requirements import find_program, missing

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "fastgraph" / "lib" / "libfastgraph_cuda.so"
STAGES = ("build", "test", "sanitize", "measure")
WIDTHS = (256, 64, 512, 128)
# Each test under a tool that watches every access runs a hundred times slower.
_SANITIZED = "test_every_graph and (random or hub_small) and not dropout"
# Of memory, for sorted graphs: all that are measured stay known.
_CACHE_BYTES = 32 << 30


def main() -> None:
    options = _options()
    tell(f"{options.seconds:.0f} seconds for {', '.join(options.stages) or 'the report alone'}")
    lacking = missing(options.stages)
    if lacking:
        sys.exit(f"this machine lacks {', '.join(lacking)}")
    sys.path.insert(0, str(ROOT))  # where fastgraph is not installed
    from measure.output import RESULTS, Record

    path, folder = options.record, options.out or RESULTS
    record = Record(path) if path is not None else Record.fresh(folder, "gpu")
    record.add("command", shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]]))
    # A time limit of others ends this process by a signal; what is known then is reported, too.
    signal.signal(signal.SIGTERM, _end)
    deadline = time.monotonic() + options.seconds
    try:
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
    finally:
        report(record)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; see {record.stem}.md")


def _options() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    def stages(text: str) -> list[str]:
        unknown = set(names(text)) - set(STAGES)
        if unknown:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(STAGES)}, got {text!r}")
        return names(text)

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--stages", type=stages, default=list(STAGES), help="some, with commas; none: report only")
    add("--seconds", type=float, default=450.0, help="for all stages together; default: 450")
    add("--graphs", type=names, help="with commas; default: all there are")
    add("--layers", type=names, help="with commas; default: all")
    add("--widths", type=lambda text: [int(w) for w in names(text)], default=list(WIDTHS))
    add("--out", type=Path, help="folder for the results")
    add("--record", type=Path, help="a .jsonl file to add to; default: a new one in the folder")
    add("--device", default="cuda", help="cpu tries the measurements themselves")
    return parser.parse_args()


_running: set[subprocess.Popen[str]] = set()


def _end(*_: object) -> None:
    for process in _running:
        os.killpg(process.pid, signal.SIGKILL)
    sys.exit("ended by a signal")


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run_stages(options: argparse.Namespace, record: Any, deadline: float) -> list[str]:
    """Run the stages before the measurements; return the names of those that failed."""
    failed: list[str] = []
    for stage, commands in (
        ("build", build_commands),
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
        if any(step["exit_code"] for step in steps) or (stage == "build" and not LIBRARY.exists()):
            failed.append(stage)
    return failed


Commands = tuple[list[list[str]], dict[str, str]]


def build_commands() -> Commands:
    """The library for the GPU at hand, and for no other."""
    import torch

    if not torch.cuda.is_available():
        sys.exit("torch finds no GPU")
    LIBRARY.unlink(missing_ok=True)  # what is tested is what was built
    major, minor = torch.cuda.get_device_capability()
    folder = str(ROOT / "build" / "gpu")
    given = {
        "Python_EXECUTABLE": sys.executable,
        "CMAKE_CUDA_COMPILER": find_program("nvcc"),
        "FASTGRAPH_CUDA": "on",
        "FASTGRAPH_CUDA_ARCHITECTURES": f"{major}{minor}",
    }
    options = [f"-D{name}={value}" for name, value in given.items()]
    return [
        ["cmake", "-S", str(ROOT), "-B", folder, "-G", "Ninja", *options],
        ["cmake", "--build", folder, "--target", "all"],
    ], {}


def test_commands() -> Commands:
    parallel = ["-n", "8", "--dist", "worksteal"] if importlib.util.find_spec("xdist") else []
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    own = "--ignore=tests/cuda/test_benchmark.py"
    return [[*pytest, *parallel, own, "--gpu", "tests/cuda"]], {}


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
    tail = output.splitlines()[-40:]
    if code:
        tell("\n".join(tail))
    return {
        "command": shlex.join(command),
        "exit_code": code,
        "seconds": round(time.perf_counter() - start, 1),
        "last_line": tail[-1] if tail else "",
        **({"output": tail} if code else {}),
    }


def measure(options: argparse.Namespace, record: Any, deadline: float) -> None:
    """Put machine, bandwidth and the rows of all cells into the record."""
    import torch

    from fastgraph.backends.cpu import CpuBackend
    from fastgraph.backends.cuda import CudaBackend
    from measure.cells import Bench, plan
    from measure.device import DeviceLostError, bandwidth, cache_bytes, facts
    from measure.graphs import SHAPES, default_graphs
    from measure.layers import LAYERS
    from measure.routing import Counted

    device = torch.device(options.device)
    counted = Counted(CudaBackend() if device.type == "cuda" else CpuBackend())
    why_not = counted.unavailable()
    if why_not is not None:
        sys.exit(why_not)
    record.add("machine", facts(device))
    record.add("cache_bytes", cache_bytes(device))
    record.add("bandwidth", bandwidth(device))
    graphs = options.graphs or [*default_graphs(), *SHAPES]
    cells = plan(graphs, options.layers or list(LAYERS), options.widths)
    with counted.enabled(_CACHE_BYTES):
        try:
            Bench(device, counted).measure(cells, record, deadline, tell)
        except DeviceLostError as error:
            sys.exit(f"the GPU is lost, call again with --record {record.path}: {error}")


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
