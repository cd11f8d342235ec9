"""The wheel: what it holds, and that it runs where there is no compiler."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
GENERATED = "fastgraph/csrc/generated"  # sources that are compiled on the user's machine
CPU_LIBRARIES = {f"fastgraph/lib/libfastgraph_cpu_{x}.so" for x in ("baseline", "avx2", "avx512")}
CUDA_LIBRARY = "fastgraph/lib/libfastgraph_cuda.so"
COMPILERS = ("c++", "cc", "clang", "clang++", "cmake", "g++", "gcc", "ld", "make", "ninja")
# Every system that runs torch has these.
SYSTEM_LIBRARIES = {
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libgcc_s.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "libstdc++.so.6",
}

QUICKSTART = """
import torch
from torch_geometric.nn import GCNConv

import fastgraph

fastgraph.enable()
x = torch.randn(1000, 16, requires_grad=True)
edge_index = torch.randint(0, 1000, (2, 8000))
layer = GCNConv(16, 8)
layer(x, edge_index).square().sum().backward()
assert x.grad is not None and bool(x.grad.isfinite().all())
print(fastgraph.status())
assert [row.layer for row in fastgraph.status().rows if row.routed] == ["GCNConv"]
"""

LOADING = """
import re
import sys
from pathlib import Path

import fastgraph
from fastgraph.machine import native

assert Path(fastgraph.__file__).is_relative_to(sys.prefix), fastgraph.__file__
assert native.available_levels()
for level in native.available_levels():
    assert native.library(level).max_threads() >= 1
maps = Path("/proc/self/maps").read_text()
runtimes = set(re.findall(r"/\\S*(?:libgomp|libomp|libiomp)\\S*", maps))
assert len(runtimes) <= 1, runtimes
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment whose programs are the only ones on PATH."""

    folder: Path

    def run(self, *arguments: str, timeout: float = 240) -> str:
        """Run its Python away from the source tree and return what it prints."""
        environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("FASTGRAPH", "PYTHON", "CC", "CXX"))
        }
        process = subprocess.run(
            [self.folder / "bin" / "python", *arguments],
            cwd=self.folder,
            env=environ | {"PATH": str(self.folder / "bin")},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout


def with_requirements(name: str) -> dict[str, metadata.Distribution]:
    """An installed distribution and, recursively, the ones it requires here."""
    found: dict[str, metadata.Distribution] = {}
    pending = [name]
    while pending:
        distribution = metadata.distribution(pending.pop())
        if distribution.name in found:
            continue
        found[distribution.name] = distribution
        for line in distribution.requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                pending.append(requirement.name)
    return found


def borrow_torch(folder: Path) -> None:
    """Link torch and what it requires into a folder: nobody downloads gigabytes twice."""
    folder.mkdir()
    for distribution in with_requirements("torch").values():
        names = {file.parts[0] for file in distribution.files or ()}
        for name in names - {"..", "__pycache__"}:
            link = folder / name
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(name))))


@pytest.fixture(scope="session")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("wheel") / "venv"
    venv.create(folder)
    environment = Environment(folder)
    for compiler in COMPILERS:
        assert shutil.which(compiler, path=str(folder / "bin")) is None
    borrow_torch(folder / "borrowed")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    (site / "borrowed.pth").write_text(f"{folder / 'borrowed'}\n")
    # Anything that would need a compiler is refused rather than built.
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python"]
    install = ["install", "--quiet", "--no-compile", "--only-binary", ":all:", f"{wheel}[pyg]"]
    subprocess.run([*pip, *install], check=True)
    return environment


def test_one_wheel_serves_every_python_and_torch(wheel: Path) -> None:
    name, _, _, tags = parse_wheel_filename(wheel.name)
    assert name == "fastgraph"
    for tag in tags:
        assert (tag.interpreter, tag.abi) == ("py3", "none")
        assert re.fullmatch(r"manylinux(_2_\d+|20\d\d|1)_x86_64", tag.platform)


def test_the_wheel_holds_the_package_and_its_libraries_only(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
    info = {name.split("/")[0] for name in names if ".dist-info/" in name}
    assert {name.split("/")[0] for name in names} == {"fastgraph", *info} and len(info) == 1
    # `make wheel` adds the CUDA kernels where there is nvcc.
    assert {name for name in names if ".so" in name} - {CUDA_LIBRARY} == CPU_LIBRARIES
    sources = {name for name in names if name.startswith("fastgraph/csrc/")}
    assert sources == {f"{GENERATED}/{file.name}" for file in (ROOT / GENERATED).iterdir()}
    suffixes = {Path(name).suffix for name in {*names} - sources if name.startswith("fastgraph/")}
    assert suffixes == {".html", ".py", ".so", ".typed"}
    assert "fastgraph/py.typed" in names
    assert "fastgraph/cli/startup/sitecustomize.py" in names  # found by path, not imported
    assert "fastgraph/comparison/templates/report.html" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)


@pytest.mark.parametrize("name", sorted({*CPU_LIBRARIES, CUDA_LIBRARY}))
def test_libraries_need_nothing_that_the_wheel_should_hold(wheel: Path, name: str) -> None:
    elffile = pytest.importorskip("elftools.elf.elffile")
    with zipfile.ZipFile(wheel) as archive:
        if name == CUDA_LIBRARY and name not in archive.namelist():
            pytest.skip("the wheel was built without CUDA")
        file = io.BytesIO(archive.read(name))
        elf = elffile.ELFFile(file)
        tags = list(elf.get_section_by_name(".dynamic").iter_tags())
        undefined = {
            symbol.name
            for symbol in elf.get_section_by_name(".dynsym").iter_symbols()
            if symbol["st_shndx"] == "SHN_UNDEF"
        }
        sections = {section.name for section in elf.iter_sections()}
    needed = {tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"}
    assert "libtvm_ffi.so" in needed
    # No libgomp in particular: OpenMP is the runtime that torch has loaded; and no libcudart.
    assert needed - {"libtvm_ffi.so"} <= SYSTEM_LIBRARIES
    assert any(symbol.startswith("GOMP_") for symbol in undefined) == (name in CPU_LIBRARIES)
    assert not {tag.entry.d_tag for tag in tags} & {"DT_RPATH", "DT_RUNPATH"}
    assert not sections & {".symtab", ".debug_info"}


def test_libraries_load_and_share_the_openmp_runtime(environment: Environment) -> None:
    environment.run("-c", LOADING)


def test_a_pyg_script_is_accelerated(environment: Environment) -> None:
    assert "GCNConv" in environment.run("-c", QUICKSTART)


def test_the_quickstart_of_the_readme_runs(environment: Environment) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    scripts = [block for block in blocks if "fastgraph.enable()" in block]
    assert scripts, "the README shows no script that calls fastgraph.enable()"
    check = "\nassert any(row.routed for row in fastgraph.status().rows), fastgraph.status()\n"
    environment.run("-c", scripts[0] + check)


def test_info_describes_the_installation(environment: Environment) -> None:
    assert metadata.version("fastgraph") in environment.run("-m", "fastgraph", "info")
