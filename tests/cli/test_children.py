"""Python processes that a program under the runner starts by a fresh interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastgraph.cli.children import STARTUP
from tests.cli.commands import ROOT, fastgraph, python

SHOW = """\
import json, sys
import torch_geometric, fastgraph
from fastgraph import settings
chosen = settings.current()
print(json.dumps([sys.argv[1:], fastgraph.is_enabled(), chosen.backend, chosen.strict,
                  chosen.min_edges, "startup" in "".join(sys.path), __name__]), flush=True)
"""


def enabled(*arguments: str) -> str:
    """The line that ``SHOW`` prints under the runner with the options of the test below."""
    words = ", ".join(f'"{word}"' for word in arguments)
    return f'[[{words}], true, "reference", true, 7, false, "__main__"]'


@pytest.fixture
def project(tmp_path: Path) -> Path:
    # Children wait for a module of this name; PyG itself takes long to import.
    (tmp_path / "torch_geometric.py").touch()
    return tmp_path


def test_children_inherit_the_options_however_they_are_started(project: Path) -> None:
    (project / "show.py").write_text(SHOW)
    (project / "train.py").write_text(
        """\
import os, subprocess, sys
if "LOCAL_RANK" in os.environ:
    exec(open("show.py").read())
    subprocess.run([sys.executable, "show.py", "grandchild"], check=True)
else:
    rank = {**os.environ, "LOCAL_RANK": "1"}
    subprocess.run([sys.executable, os.path.abspath(sys.argv[0]), "rank"], env=rank, check=True)
    subprocess.run(f"cd . && {sys.executable} show.py shell", shell=True, check=True)
    os.execv(sys.executable, [sys.executable, "show.py", "exec"])
"""
    )
    options = ("--backend", "reference", "--strict", "--min-edges", "7")
    ours = fastgraph(*options, "train.py", cwd=project)
    assert ours.stderr == ""
    assert ours.stdout.splitlines() == [
        enabled("rank"),
        enabled("grandchild"),
        enabled("shell"),
        enabled("exec"),
    ]


def test_children_that_are_kept_from_it(project: Path) -> None:
    (project / "program.py").write_text(
        """\
import os, subprocess, sys
code = "import torch_geometric, fastgraph; print(fastgraph.is_enabled())"
path = {"PYTHONPATH": os.environ["PYTHONPATH"].partition(os.pathsep)[2]}
for variables in (path, {**os.environ, "FASTGRAPH": "0"}):
    subprocess.run([sys.executable, "-c", code], env=variables, check=True)
"""
    )
    assert fastgraph("program.py", cwd=project).stdout == "False\nFalse\n"


def test_the_path_is_named_once_by_nested_runners(project: Path) -> None:
    code = "import os; print(os.environ['PYTHONPATH'].count('startup'))"
    again = f"[sys.executable, '-m', 'fastgraph', '-c', {code!r}]"
    ours = fastgraph("-c", f"import os, sys; os.execv(sys.executable, {again})", cwd=project)
    assert ours.stdout == "1\n", ours.stderr


@pytest.mark.parametrize("flag", ["-B", "-I", "-E", "-P", "-s"])
def test_tools_start_as_they_would_without_us(tmp_path: Path, flag: str) -> None:
    code = "import sys; print(sys.path, sorted(sys.modules), sorted(sys.path_importer_cache))"
    plain = python(flag, "-c", code, cwd=tmp_path)
    ours = python(flag, "-c", code, cwd=tmp_path, PYTHONPATH=STARTUP)
    assert (ours.stdout, ours.stderr) == (plain.stdout, "")


@pytest.mark.parametrize(
    "source", ["print('theirs', __name__, __file__)", "1 / 0", "import nothing_of_this_name", "f(:"]
)
def test_a_sitecustomize_that_was_there_runs_as_it_would(tmp_path: Path, source: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(source)
    code = "import sys; print('sitecustomize' in sys.modules)"
    plain = python("-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    ours = python("-c", code, cwd=tmp_path, PYTHONPATH=f"{STARTUP}:{tmp_path}")
    assert (ours.stdout, ours.stderr) == (plain.stdout, plain.stderr)


def test_an_environment_without_fastgraph_says_so(tmp_path: Path) -> None:
    (tmp_path / "torch_geometric.py").write_text("print('PyG')\n")
    code = """\
import sys
class Missing:  # before the finder of an editable installation
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "fastgraph":
            raise ImportError("not installed")
sys.meta_path.insert(0, Missing())
import torch_geometric
"""
    ours = python("-c", code, cwd=tmp_path, PYTHONPATH=f"{STARTUP}:{tmp_path}")
    assert ours.stdout == "PyG\n"
    assert "runs without fastgraph, with which it was started: not installed" in ours.stderr
    assert ours.stderr.count("RuntimeWarning") == 1


def test_children_of_children_that_do_not_use_pyg(project: Path) -> None:
    (project / "program.py").write_text(
        """\
import multiprocessing, os
def start(target):
    process = multiprocessing.get_context("spawn").Process(target=target)
    process.start()
    process.join()
def work():
    import torch_geometric, fastgraph
    print(fastgraph.is_enabled())
def between():
    start(work)
if __name__ == "__main__":
    os.environ["PYTHONPATH"] = ROOT  # not ours
    start(between)
""".replace("ROOT", repr(str(ROOT)))
    )
    assert fastgraph("program.py", cwd=project).stdout == "True\n"


@pytest.mark.parametrize(
    ("first", "min_edges"), [("fastgraph.enable(min_edges=3)", 3), ("fastgraph.Graph", 7)]
)
def test_spawned_children_of_programs_that_use_fastgraph_themselves(
    project: Path, first: str, min_edges: int
) -> None:
    (project / "program.py").write_text(
        f"""\
import fastgraph
{first}
import multiprocessing
import torch_geometric
from fastgraph import settings
def work():
    print(fastgraph.is_enabled(), settings.current().min_edges)
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
"""
    )
    ours = fastgraph("--min-edges", "7", "program.py", cwd=project)
    assert (ours.stdout, ours.stderr) == (f"True {min_edges}\n", "")
