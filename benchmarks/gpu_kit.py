"""All that a GPU machine without a network needs for one shot, in one folder.

    FASTGRAPH_DATA=... python benchmarks/gpu_kit.py build/gpu-kit --turbo-gnn-python PYTHON

It holds the libraries with the kernels for the GPUs named by ``--architectures`` and for every
instruction set of CPUs, wheels for the Python there, the real graphs, turbo-gnn, a program ``run``
and a manifest. There, in this source tree:

    sh build/gpu-kit/run --shot 540 --out RESULTS

turbo-gnn is built by ``--turbo-gnn-python``, a Python as that machine has it, with its torch, which
needs no GPU for that. Without it the kit has its sources, which ``run`` leaves alone.

``--rehearse PYTHON`` runs the kit by such a Python, on the CPU, as far as a machine without a GPU
can go: every stage of the shot but the kernels.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 64 << 20
"""The size of the kit that may be sent to a machine that is lent."""

WHEELS = ("apache-tvm-ffi", "platformdirs", "pymetis")
TURBO_GNN = "turbo-gnn==0.1.0rc4"
MANIFEST = "manifest.json"

# What the kit is unpacked to is where `gpu.py` looks for it.
RUN = """\
set -e
kit=$(cd "$(dirname "$0")" && pwd)
mkdir -p fastgraph/lib build/gpu
tar -xzf "$kit/lib.tar.gz" -C fastgraph/lib
if test -f "$kit/turbo_gnn.tar.gz"; then tar -xzf "$kit/turbo_gnn.tar.gz" -C build/gpu; fi
export FASTGRAPH_DATA="$kit/data" PYTHONPATH="$kit/site" PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" benchmarks/gpu.py "$@"
"""


def main() -> None:
    options = _options()
    kit: Path = options.kit.resolve()
    if options.rehearse is None:
        make(kit, options)
    else:
        # Not what a link of an environment points to; it is called from another folder.
        results = rehearse(kit, options.rehearse.absolute(), options.shot)
        if options.out is not None:
            manifest = json.loads((kit / MANIFEST).read_text())
            known = subprocess.run(
                ["git", "rev-parse", "--short", "HEAD"],
                cwd=ROOT, check=True, capture_output=True, text=True,
            )  # fmt: skip
            options.out.write_text(log(manifest, results, known.stdout.strip()))
        judge(results)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("kit", type=Path, help="the folder")
    add("--python", default="3.12", help="its version there; default: 3.12")
    add("--architectures", default="90", help="compute capabilities, with semicolons; default: 90")
    add("--library", type=Path, help="folder with libraries that are built already")
    add("--turbo-gnn-python", type=Path, help="a Python as there, with its torch")
    add("--rehearse", type=Path, metavar="PYTHON", help="run a kit that is there, on the CPU")
    add("--out", type=Path, metavar="FILE.md", help="where the log of the rehearsal goes")
    add("--shot", type=float, default=240.0, help="seconds of the rehearsal; default: 240")
    return parser.parse_args()


def make(kit: Path, options: argparse.Namespace) -> None:
    """Put everything into the folder, and say what took how long."""
    data = os.environ.get("FASTGRAPH_DATA")
    if not data:
        sys.exit("FASTGRAPH_DATA must name the folder of the real graphs")
    shutil.rmtree(kit, ignore_errors=True)
    kit.mkdir(parents=True)
    start = time.monotonic()
    library = options.library or build(options.architectures)
    pack(library, kit / "lib.tar.gz", "libfastgraph_*.so")
    _tell("libraries", start)
    _pip(
        *("--target", str(kit / "site"), "--no-deps", "--no-compile", "--only-binary", ":all:"),
        *("--python-version", options.python, "--implementation", "cp", *_platforms(), *WHEELS),
        command="install",
    )
    shutil.copytree(data, kit / "data", dirs_exist_ok=True)
    _tell("wheels and graphs", start)
    with_turbo_gnn(kit, options.turbo_gnn_python, options.architectures)
    _tell("turbo-gnn", start)
    (kit / "run").write_text(RUN)
    write_manifest(kit, options.python, options.architectures)


def build(architectures: str) -> Path:
    """The libraries with these kernels, and for all instruction sets of CPUs; where they are."""
    folder = ROOT / "build" / "gpu-kit-build"
    given = {
        "Python_EXECUTABLE": sys.executable,
        "FASTGRAPH_CPU_LEVELS": "all",
        "FASTGRAPH_CUDA": "on",
        "FASTGRAPH_CUDA_ARCHITECTURES": architectures,
        "FASTGRAPH_LIBRARY_DIR": str(folder / "lib"),
        "CMAKE_CUDA_COMPILER_LAUNCHER": os.environ.get("CMAKE_CXX_COMPILER_LAUNCHER", ""),
    }
    options = [f"-D{name}={value}" for name, value in given.items()]
    _run("cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", *options)
    _run("cmake", "--build", str(folder), "--target", "all")
    return folder / "lib"


def with_turbo_gnn(kit: Path, python: Path | None, architectures: str) -> None:
    """Add that package, compiled by a Python as there is on the other machine, or its sources."""
    sources = kit / "turbo-gnn"
    _pip(
        *("--dest", str(sources), "--no-deps", "--no-build-isolation", "--no-binary", ":all:"),
        TURBO_GNN,
        command="download",
    )
    if python is None:
        return
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import gpu

    (archive,) = sources.iterdir()
    lowest = architectures.partition(";")[0]
    command, environ = gpu.turbo_gnn_command(archive, str(python), lowest)
    _run(*command, environ=environ)
    pack(gpu.TURBO_GNN.parent, kit / "turbo_gnn.tar.gz", gpu.TURBO_GNN.name)


def pack(folder: Path, archive: Path, pattern: str) -> None:
    """Put what fits a pattern into an archive, without what debuggers read.

    Raises:
        FileNotFoundError: nothing fits.
    """
    found = sorted(folder.glob(pattern))
    if not found:
        raise FileNotFoundError(f"{folder} must hold {pattern}")
    with tempfile.TemporaryDirectory() as name, tarfile.open(archive, "w:gz") as file:
        for path in found:
            copy = Path(name) / path.name
            (shutil.copytree if path.is_dir() else shutil.copy)(path, copy)
            for library in copy.rglob("*.so") if copy.is_dir() else [copy]:
                _run("strip", "--strip-unneeded", str(library))
            file.add(copy, path.name)


def write_manifest(kit: Path, python: str, architectures: str) -> None:
    """List the files with their sizes and SHA-256, and refuse a kit that is too large."""
    files = {
        str(path.relative_to(kit)): {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in sorted(kit.rglob("*"))
        if path.is_file()
    }
    total = sum(entry["bytes"] for entry in files.values())
    listed = {"python": python, "architectures": architectures, "bytes": total, "files": files}
    (kit / MANIFEST).write_text(json.dumps(listed, indent=1) + "\n")
    if total > MOST_BYTES:
        sys.exit(f"the kit has {total / 2**20:.1f} MiB, and may have {MOST_BYTES >> 20}")
    print(f"{len(files)} files, {total / 2**20:.1f} MiB in {kit}")


def verify(kit: Path) -> None:
    """Refuse a kit whose files are not those of its manifest."""
    for name, entry in json.loads((kit / MANIFEST).read_text())["files"].items():
        path = kit / name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != entry["sha256"]:
            sys.exit(f"{name} is not the file of the manifest")


def rehearse(kit: Path, python: Path, shot: float) -> dict[str, Any]:
    """Run a kit in a copy of the files that git knows, by another Python, on the CPU.

    Returns:
        What `gpu.py` has written there.
    """
    verify(kit)
    copy = ROOT / "build" / "gpu-kit-rehearsal"
    shutil.rmtree(copy, ignore_errors=True)
    known = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in known.stdout.splitlines():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    out = copy / "results"
    ended = subprocess.run(
        [
            "sh",
            str(kit / "run"),
            "--shot",
            str(shot),
            "--device",
            "cpu",
            "--out",
            str(out),
            "--layers",
            "SAGE-mean",
            "--widths",
            "64",
            "--others",
            "",
            "--graphs",
            "cora",
        ],
        cwd=copy,
        env=os.environ | {"PYTHON": str(python), "PYTHONNOUSERSITE": "1"},
        check=False,  # tests of kernels fail where there is no GPU
    )
    written = next(out.glob("*.json"), None)
    if written is None:
        sys.exit(f"the rehearsal failed: run ended with {ended.returncode} and left no results")
    results: dict[str, Any] = json.loads(written.read_text())
    return results


def judge(results: dict[str, Any]) -> None:
    """Refuse a rehearsal in which something failed that needs no GPU."""
    failed = [
        f"{step['stage']}: {step['last_line']}"
        for step in results["stages"]
        if step["exit_code"] and step["stage"] != "test"
    ]
    failed += [f"{row['layer']}: {row['failed']}" for row in results["cells"] if "failed" in row]
    if failed or not results["cells"]:
        sys.exit(f"the rehearsal failed: {'; '.join(failed) or 'nothing was measured'}")


def log(manifest: dict[str, Any], results: dict[str, Any], commit: str) -> str:
    """The log of a rehearsal: sizes of what travels, and what each step took here.

    Args:
        manifest: of the kit.
        results: of `gpu.py`.
        commit: of this source tree.
    """
    machine = ", ".join(f"{name} {value}" for name, value in results["machine"].items())
    failed = [row for row in results["cells"] if "failed" in row]
    sizes: dict[str, int] = {}
    for name, entry in manifest["files"].items():
        part = name.partition("/")[0]
        sizes[part] = sizes.get(part, 0) + entry["bytes"]
    steps = [
        f"| {step['stage']} | {step['seconds']:.1f} | {step['exit_code']} | {step['last_line']} |"
        for step in results["stages"]
    ]
    return "\n".join(
        [
            "# Rehearsal of the kit for a GPU machine, without a GPU",
            "",
            f"{machine}, commit `{commit}`, kernels for {manifest['architectures']}.",
            "",
            "| part | bytes |",
            "| --- | ---: |",
            *(f"| {part} | {size:,} |" for part, size in sizes.items()),
            f"| all {len(manifest['files'])} files | {manifest['bytes']:,} |",
            "",
            "| step | seconds | exit code | last line |",
            "| --- | ---: | ---: | --- |",
            *steps,
            "",
            f"{len(results['cells'])} cells were measured after that.",
            *(f"- {row['layer']}, {row['graph']}: {row['failed']}" for row in failed),
            "",
        ]
    )


def _platforms() -> list[str]:
    return [f"--platform=manylinux_2_{minor}_x86_64" for minor in (17, 24, 27, 28, 31, 34)]


def _pip(*arguments: str, command: str) -> None:
    _run(sys.executable, "-m", "pip", command, "--quiet", *arguments)


def _run(*command: str, environ: dict[str, str] | None = None) -> None:
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | (environ or {}))


def _tell(what: str, start: float) -> None:
    print(f"{what}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
