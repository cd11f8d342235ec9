"""``import dgl`` where DGL has no GraphBolt library for this torch, on a package like it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastgraph.upstream import PACKAGES
from tests import forks
from tests.cli.commands import ROOT, fastgraph
from tests.forks import python

LIBRARY = f"libgraphbolt_pytorch_{torch.__version__.partition('+')[0]}.so"
SPARSE = f"libdgl_sparse_pytorch_{torch.__version__.partition('+')[0]}.so"
USE = "import dgl; print(dgl.graphbolt.__name__); dgl.graphbolt.ItemSet"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a package that imports what DGL 2.1 does, in its way."""
    package = tmp_path / "dgl"
    (package / "graphbolt").mkdir(parents=True)
    (package / "libdgl.so").touch()
    (package / "__init__.py").write_text("import torch\nfrom . import distributed\n")
    (package / "distributed.py").write_text("from . import graphbolt as gb\n")
    (package / "graphbolt" / "__init__.py").write_text(
        f"""\
import os
ItemSet = 1
if not os.path.exists(os.path.join(os.path.dirname(__file__), {LIBRARY!r})):
    raise FileNotFoundError("Cannot find DGL C++ graphbolt library")
"""
    )
    return tmp_path


@pytest.mark.parametrize(
    "first", ["import fastgraph; fastgraph.enable()", "import fastgraph.dgl as d; d.fix_import()"]
)
def test_it_succeeds_once_it_was_asked_for(project: Path, first: str) -> None:
    ours = python("-c", f"{first}\n{USE}", cwd=project)
    assert ours.stdout == "dgl.graphbolt\n"
    assert (
        "ImportError: dgl.graphbolt.ItemSet cannot be used: this DGL has no GraphBolt library for "
        f"torch {LIBRARY[21:-3]} ({LIBRARY})"
    ) in ours.stderr


USE_SPARSE = """
import dgl
print(dgl.adj().nnz)
import dgl.sparse as s
from dgl.sparse.matmul import matmul
print(s.__name__, matmul is s.matmul, s is dgl.sparse)
"""


@pytest.fixture
def with_matrices(project: Path) -> Path:
    """The package with sparse matrices, of which a module is imported before the failure."""
    package = project / "dgl"
    (package / "__init__.py").write_text(
        "def adj():\n    from .sparse import identity\n    return identity((3, 3))\n"
    )
    (package / "sparse").mkdir()
    (package / "sparse" / "matmul.py").write_text("def matmul(): pass\n")
    (package / "sparse" / "__init__.py").write_text(
        f"""\
import os
from .matmul import *
class identity:
    nnz = "theirs"
    def __init__(self, shape): pass
library = os.path.join(os.path.dirname(__file__), "..", "dgl_sparse", {SPARSE!r})
if not os.path.exists(library):
    raise FileNotFoundError("Cannot find DGL C++ sparse library")
"""
    )
    return project


@pytest.mark.parametrize(
    "first", ["import fastgraph; fastgraph.enable()", "import fastgraph.dgl as d; d.fix_import()"]
)
def test_its_sparse_matrices_are_ours(with_matrices: Path, first: str) -> None:
    ours = python("-c", f"{first}\n{USE_SPARSE}", cwd=with_matrices)
    assert (ours.stdout, ours.stderr) == ("3\nfastgraph.sparse True True\n", "")


def test_they_are_so_after_an_import_that_failed(with_matrices: Path) -> None:
    first = "import dgl\ntry: dgl.adj()\nexcept FileNotFoundError as error: print(error)\n"
    code = f"{first}import fastgraph; fastgraph.enable()\n{USE_SPARSE}"
    ours = python("-c", code, cwd=with_matrices)
    expected = "Cannot find DGL C++ sparse library\n3\nfastgraph.sparse True True\n"
    assert (ours.stdout, ours.stderr) == (expected, "")


@pytest.mark.parametrize("first", ["import fastgraph, torch", "import torch, fastgraph.sparse"])
def test_they_are_not_unasked(with_matrices: Path, first: str) -> None:
    ours = python("-c", f"{first}\n{USE_SPARSE}", cwd=with_matrices)
    assert "FileNotFoundError: Cannot find DGL C++ sparse library" in ours.stderr


def test_they_are_dgls_where_its_library_exists(with_matrices: Path) -> None:
    (with_matrices / "dgl" / "dgl_sparse").mkdir()
    (with_matrices / "dgl" / "dgl_sparse" / SPARSE).touch()
    ours = python("-c", f"import fastgraph; fastgraph.enable()\n{USE_SPARSE}", cwd=with_matrices)
    assert (ours.stdout, ours.stderr) == ("theirs\ndgl.sparse True True\n", "")


def test_they_are_dgls_in_a_build_of_the_sources(with_matrices: Path) -> None:
    (with_matrices / "dgl" / "libdgl.so").unlink()
    ours = python("-c", f"import fastgraph; fastgraph.enable()\n{USE_SPARSE}", cwd=with_matrices)
    assert "FileNotFoundError: Cannot find DGL C++ sparse library" in ours.stderr


@pytest.mark.parametrize("use", ["import dgl.graphbolt.impl", "from dgl.graphbolt import impl"])
def test_modules_within_it_name_the_missing_library(project: Path, use: str) -> None:
    (project / "dgl" / "graphbolt" / "impl.py").touch()
    ours = python("-c", f"import fastgraph; fastgraph.enable()\n{use}", cwd=project)
    assert "ImportError: dgl.graphbolt.impl cannot be used: this DGL has no" in ours.stderr
    assert LIBRARY in ours.stderr


@pytest.mark.parametrize(
    "first",
    [
        "import fastgraph, torch",
        "import fastgraph; fastgraph.enable(); fastgraph.disable()",
        "import fastgraph\nwith fastgraph.enabled(): pass",
    ],
)
def test_nothing_changes_unasked(project: Path, first: str) -> None:
    ours = python("-c", f"{first}\n{USE}", cwd=project)
    assert "FileNotFoundError: Cannot find DGL C++ graphbolt library" in ours.stderr


def test_what_the_program_asked_for_stays_when_fastgraph_is_disabled(project: Path) -> None:
    first = "import fastgraph, fastgraph.dgl as d; d.fix_import(); fastgraph.enable()"
    ours = python("-c", f"{first}; fastgraph.disable()\n{USE}", cwd=project)
    assert ours.stdout == "dgl.graphbolt\n"


def test_dgl_is_never_imported_on_behalf_of_the_program(project: Path) -> None:
    code = "import fastgraph, sys; fastgraph.enable(); print('dgl' in sys.modules)"
    assert python("-c", code, cwd=project).stdout == "False\n"


def test_graphbolt_is_left_alone_where_its_library_exists(project: Path) -> None:
    (project / "dgl" / "graphbolt" / LIBRARY).touch()
    ours = python("-c", f"import fastgraph; fastgraph.enable()\n{USE}", cwd=project)
    assert (ours.stdout, ours.stderr) == ("dgl.graphbolt\n", "")


def test_it_is_left_alone_in_a_build_of_the_sources(project: Path) -> None:
    (project / "dgl" / "libdgl.so").unlink()
    ours = python("-c", f"import fastgraph; fastgraph.enable()\n{USE}", cwd=project)
    assert "FileNotFoundError" in ours.stderr


def test_a_module_that_is_missing_for_another_reason_stays_missing(project: Path) -> None:
    (project / "dgl" / "__init__.py").write_text("import dgl.nothing_of_this_name\n")
    ours = python("-c", f"import fastgraph; fastgraph.enable()\n{USE}", cwd=project)
    assert "No module named 'dgl.nothing_of_this_name'" in ours.stderr


def test_tools_may_look_at_it_like_at_any_module(project: Path) -> None:
    code = (
        "import fastgraph; fastgraph.enable(); import dgl, inspect, sys\n"
        "print(hasattr(dgl.graphbolt, '__wrapped__'), hasattr(dgl.graphbolt, '_lazy'))\n"
        "print(inspect.getmodule(inspect.getmodule), repr(dgl.graphbolt))"
    )
    ours = python("-c", code, cwd=project)
    assert ours.stdout.startswith("False False\n<module 'inspect'"), ours.stderr
    assert "dgl.graphbolt" in ours.stdout.splitlines()[1]


def test_the_runner_and_the_children_of_its_programs(project: Path) -> None:
    (project / "program.py").write_text(
        """\
import multiprocessing, subprocess, sys
def work():
    import dgl, fastgraph
    print("spawned", dgl.graphbolt.__name__, fastgraph.is_enabled(), flush=True)
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
    code = "import dgl, fastgraph; print('fresh', fastgraph.is_enabled())"
    subprocess.run([sys.executable, "-c", code], check=True)
    # The other package is looked for in vain before.
    first = "import sys; path = sys.path\\n"
    first += "sys.path = [entry for entry in path if 'site-packages' not in entry]\\n"
    first += "try: import torch_geometric\\n"
    first += "except ImportError: sys.path = path\\n"
    subprocess.run([sys.executable, "-c", first + code], check=True)
    import dgl
"""
    )
    ours = fastgraph("program.py", cwd=project)
    assert ours.stdout == "spawned dgl.graphbolt True\nfresh True\nfresh True\n", ours.stderr
    assert ours.returncode == 0


def test_info_says_so(project: Path) -> None:
    ours = forks.fastgraph("info", cwd=project, PYTHONPATH=str(project))
    assert f"This DGL has no GraphBolt library for torch {LIBRARY[21:-3]}" in ours.stdout
    assert "is broken" not in ours.stdout
    (project / "dgl" / "graphbolt" / LIBRARY).touch()
    assert "GraphBolt" not in forks.fastgraph("info", cwd=project, PYTHONPATH=str(project)).stdout


def test_children_wait_for_every_package() -> None:
    text = (ROOT / "fastgraph/cli/startup/sitecustomize.py").read_text()
    assert f"\n_PACKAGES = {PACKAGES!r}\n".replace("'", '"') in text
