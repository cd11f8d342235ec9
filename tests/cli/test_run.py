"""``python -m fastgraph`` against plain python: same output, traceback and exit status.

Most cases run with ``FASTGRAPH=0``, which takes the same path but for importing torch.
"""

from __future__ import annotations

import os
import py_compile
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from fastgraph.cli.main import main
from fastgraph.interpreter import module_to_run
from tests import forks
from tests.cli.commands import assert_same, environment, fastgraph, python

SHOW = """\
import sys
print(sys.argv, repr(sys.path[0]), __name__, __package__, __doc__)
print(globals().get("__file__"), globals().get("__cached__"), __spec__ and __spec__.name)
print(sorted(globals()), type(__loader__), sys.modules["__main__"].__dict__ is globals())
def annotated(x: int): pass
print(annotated.__annotations__)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "sub" / "show.py").write_text(SHOW)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "__main__.py").write_text(SHOW)
    (tmp_path / "package" / "member.py").write_text(SHOW)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ("show.py",),
        ("./show.py", "a", "b c"),
        ("sub/../show.py",),
        ("sub/show.py", "--report", "--backend", "x", "-m", "--help", "--"),
        ("--", "show.py", "--strict"),
        ("-m", "package", "--report"),
        ("-m", "package.member", "-c", "x"),
        ("-mpackage",),
        ("-c", SHOW, "-", "--report"),
        ("-c" + SHOW, "x"),
        ("package",),
    ],
    ids=lambda words: " ".join(words[:2]).replace(SHOW, "CODE"),
)
def test_program_sees_what_it_sees_under_plain_python(
    project: Path, words: tuple[str, ...]
) -> None:
    assert assert_same(project, *words).returncode == 0


def test_run_takes_the_same_forms(project: Path) -> None:
    plain = python("show.py", "run", cwd=project)
    ours = fastgraph("run", "show.py", "run", cwd=project, FASTGRAPH="0")
    assert (ours.stdout, ours.returncode) == (plain.stdout, 0)


def test_stdin_archive_symlink_bytecode_and_safe_path(project: Path) -> None:
    assert_same(project, "-", "a", "--strict", stdin=SHOW)
    assert_same(project, stdin=SHOW)
    assert fastgraph("--report", cwd=project, stdin="print(3)", FASTGRAPH="0").stdout == "3\n"
    with zipfile.ZipFile(project / "app.zip", "w") as archive:
        archive.writestr("__main__.py", SHOW)
    assert_same(project, "app.zip", "a")
    (project / "link.py").symlink_to("sub/show.py")
    assert_same(project, "link.py")
    py_compile.compile(str(project / "show.py"), cfile=str(project / "show.pyc"))
    assert_same(project, "show.pyc")
    assert_same(project, "show.py", PYTHONSAFEPATH="1")


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit()",
        "import sys; sys.exit(3)",
        "import sys; sys.exit('words')",
        "import sys; sys.exit((1, 2))",
        "raise SystemExit(None)",
        "import os; os._exit(7)",
        "def f():\n    1 / 0\nf()",
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('x') from e",
        "def f(:",
        "import nothing_of_this_name",
        "raise ExceptionGroup('many', [ValueError(1), TypeError(2)])",
        "import sys\nsys.excepthook = lambda t, v, tb: print('hook', t, v, tb.tb_lineno)\nx",
        "import atexit; atexit.register(print, 'bye'); raise RuntimeError('end')",
        "import warnings; warnings.warn('old', DeprecationWarning)",
        "import threading\nthreading.Timer(0.1, print, ['late']).start()",
    ],
)
def test_endings(tmp_path: Path, code: str) -> None:
    (tmp_path / "program.py").write_text(code)
    assert_same(tmp_path, "program.py")


def test_endings_of_other_forms(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text("def f():\n    raise OSError(5, 'words')\nf()\n")
    assert "runpy" in assert_same(tmp_path, "-m", "failing").stderr
    if sys.version_info < (3, 13):  # later ones show lines of code given with -c, we do not
        assert_same(tmp_path, "-c", "def f(): return 1 / 0\nf()")
    assert_same(tmp_path, "-", stdin="def f(): return 1 / 0\nf()")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("missing.py", "--report"), 2),
        (("sub/nothing",), 2),
        (("nothing",), 2),
        (("empty",), 1),
        (("-m", "nothing_of_this_name"), 1),
        (("-m", "package.nothing"), 1),
    ],
)
def test_missing_programs(project: Path, words: tuple[str, ...], code: int) -> None:
    (project / "empty").mkdir()
    assert assert_same(project, *words).returncode == code


def test_file_whose_name_has_no_suffix(project: Path) -> None:
    for name in ("program", "compare", "info"):
        (project / name).write_text(SHOW)
    assert_same(project, "program", "x")
    assert_same(project, "./compare", "x")
    assert_same(project, "./info", "x")


def test_classes_of_main_pickle_and_spawned_children_work(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        """\
import multiprocessing, pickle
class Point:
    def __init__(self, x): self.x = x
def double(point): return Point(2 * point.x)
if __name__ == "__main__":
    print(pickle.loads(pickle.dumps(Point(1))).x, pickle.dumps(Point))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [Point(3)])[0].x)
"""
    )
    assert assert_same(tmp_path, "program.py").stdout.endswith("6\n")
    assert assert_same(tmp_path, "-m", "program").returncode == 0
    assert fastgraph("program.py", cwd=tmp_path).stdout.endswith("6\n")


@pytest.mark.parametrize("words", [("wait.py",), ("-m", "wait")])
def test_interrupt(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "wait.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    results = []
    for prefix in ((), ("-m", "fastgraph")):
        with subprocess.Popen(
            [sys.executable, *prefix, *words],
            cwd=tmp_path,
            env=environment(FASTGRAPH="0"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A test run in the background ignores the signal, and its children would too.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            results.append((process.communicate(timeout=30)[1], process.returncode))
    assert results[0] == results[1]
    assert results[0][0].endswith("KeyboardInterrupt\n")


def test_closed_pipe(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text("print('word\\n' * 100_000)\n")
    codes = []
    for prefix in ((), ("-m", "fastgraph")):
        with subprocess.Popen(
            [sys.executable, *prefix, "talk.py"],
            cwd=tmp_path,
            env=environment(FASTGRAPH="0"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            process.stdout.close()
            assert process.stderr is not None
            assert b"BrokenPipeError" in process.stderr.read()
            codes.append(process.wait(timeout=30))
    assert codes[0] == codes[1]


def test_enabled_with_options_before_the_program(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        """\
import sys, fastgraph
from fastgraph import settings
print(sys.argv[1:], fastgraph.is_enabled(), settings.current().backend,
      settings.current().strict, settings.current().min_edges)
sys.exit(4)
"""
    )
    words = ("--report", "--backend", "reference", "--min-edges=7", "program.py", "--strict")
    ours = forks.fastgraph(*words, cwd=tmp_path, FASTGRAPH_STRICT="1")
    assert ours.stdout == "['--strict'] True reference True 7\n"
    assert "fastgraph status" in ours.stderr
    assert ours.returncode == 4


def test_report_counts_layers_and_follows_the_traceback(tmp_path: Path) -> None:
    pytest.importorskip("torch_geometric")
    (tmp_path / "train.py").write_text(
        """\
import torch
from torch_geometric.nn import GCNConv
GCNConv(3, 4)(torch.randn(5, 3), torch.tensor([[0, 1], [1, 2]]))
raise RuntimeError("after")
"""
    )
    ours = forks.fastgraph("--report", "train.py", cwd=tmp_path)
    traceback, _, table = ours.stderr.partition("RuntimeError: after\n")
    assert traceback.count("File ") == 1
    assert "GCNConv" in table
    assert ours.returncode == 1


def test_kill_switch(tmp_path: Path) -> None:
    code = "import sys; print('torch' in sys.modules)"
    ours = fastgraph("--report", "--strict", "-c", code, cwd=tmp_path, FASTGRAPH="0")
    assert ours.stdout == "False\n"
    assert ours.stderr == "fastgraph was not enabled: FASTGRAPH=0\n"


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        (("--backnd", "x", "a.py"), {}, "No such option"),
        (("--min-edges", "-1", "a.py"), {}, "-1 is not in the range"),
        (("-m",), {}, "Argument expected for the -m option"),
        (("-c", "1"), {"FASTGRAPH_STRCT": "1"}, "did you mean 'FASTGRAPH_STRICT'"),
        (("-c", "1"), {"FASTGRAPH": "2"}, "FASTGRAPH must be 1, 0 or compare, got '2'"),
        (("--backend", "cpv", "-c", "1"), {}, "did you mean 'cpu'"),
    ],
)
def test_usage_errors(
    tmp_path: Path, words: tuple[str, ...], variables: dict[str, str], message: str
) -> None:
    ours = fastgraph(*words, cwd=tmp_path, **variables)
    assert message in ours.stderr
    assert "Traceback" not in ours.stderr
    assert ours.returncode == 2


def test_a_terminal_is_not_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for words, said in ((["--report"], "Missing a script"), ([], "Commands:")):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "module"),
    [
        (["python", "-m", "fastgraph", "-m", "x"], "fastgraph"),
        (["python", "-mfastgraph", "x.py"], "fastgraph"),
        (["python", "-B", "-Wignore", "-X", "dev", "-m", "fastgraph"], "fastgraph"),
        (["python", "-W", "-m", "-IBm", "fastgraph"], "fastgraph"),
        (["python", "--check-hash-based-pycs", "never", "-m", "fastgraph"], "fastgraph"),
        (["python", "en.py", "-m", "fastgraph"], None),
        (["python", "--", "en.py", "-m", "fastgraph"], None),
        (["python", "-", "-m", "fastgraph"], None),
        (["python", "-c", "1", "-m", "fastgraph"], None),
        (["python", "-Bc1", "-m", "fastgraph"], None),
        (["python", "-m", "pytest", "-m", "fastgraph"], "pytest"),
        (["python", "-X"], None),
        (["python"], None),
        ([], None),
    ],
)
def test_module_to_run(words: list[str], module: str | None) -> None:
    assert module_to_run(words) == module


def test_a_programs_own_arguments_do_not_switch_fastgraph_off(tmp_path: Path) -> None:
    (tmp_path / "en.py").write_text("import fastgraph; print(fastgraph.is_enabled())")
    done = python("en.py", "-m", "fastgraph", cwd=tmp_path, FASTGRAPH="1")
    assert done.stdout == "True\n", done.stderr


def test_invalid_variable_where_the_module_follows_its_option(tmp_path: Path) -> None:
    done = python("-mfastgraph", "-c", "1", cwd=tmp_path, FASTGRAPH="2")
    assert done.stderr == "fastgraph: FASTGRAPH must be 1, 0 or compare, got '2'\n"
    assert done.returncode == 2


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_are_enabled_with_the_same_options(tmp_path: Path, method: str) -> None:
    (tmp_path / "torch_geometric.py").touch()  # what children wait for
    (tmp_path / "program.py").write_text(
        """\
import multiprocessing, sys
import torch_geometric
def work(depth):
    import fastgraph
    from fastgraph import settings
    print(depth, fastgraph.is_enabled(), settings.current().min_edges, flush=True)
    if depth:
        start(depth - 1)
def start(depth):
    process = multiprocessing.get_context(sys.argv[1]).Process(target=work, args=(depth,))
    process.start()
    process.join()
if __name__ == "__main__":
    start(1)
    import fastgraph
    fastgraph.disable()
    start(0)
"""
    )
    ours = fastgraph("--min-edges", "7", "program.py", method, cwd=tmp_path)
    assert ours.stdout.splitlines()[:2] == ["1 True 7", "0 True 7"], ours.stderr
    assert ours.stdout.splitlines()[2].startswith("0 False"), ours.stderr
    assert (ours.stderr, ours.returncode) == ("", 0)


def test_spawned_children_that_do_not_use_torch_do_not_load_it(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        """\
import multiprocessing, sys
def work(): print("torch" in sys.modules)
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
"""
    )
    assert fastgraph("program.py", cwd=tmp_path).stdout == "False\n"


def test_missing_torch_is_said_and_the_kill_switch_still_runs(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libtorch.so: not found')\n")
    ours = fastgraph("-c", "print(1)", cwd=tmp_path)
    assert "fastgraph cannot be enabled: OSError: libtorch.so: not found" in ours.stderr
    assert (ours.stdout, ours.returncode) == ("", 1)
    assert fastgraph("-c", "print(1)", cwd=tmp_path, FASTGRAPH="0").stdout == "1\n"


def test_report_is_not_printed_by_forked_children(tmp_path: Path) -> None:
    code = "import os, sys\nif os.fork() == 0: sys.exit()\nos.wait()"
    ours = fastgraph("--report", "-c", code, cwd=tmp_path, FASTGRAPH="0")
    assert ours.stderr.count("fastgraph was not enabled") == 1


def test_help_and_version(tmp_path: Path) -> None:
    assert "SCRIPT [ARGS]" in fastgraph("--help", cwd=tmp_path).stdout
    run_help = fastgraph("run", "--help", cwd=tmp_path).stdout
    assert "--min-edges" in run_help
    assert fastgraph("--version", cwd=tmp_path).stdout.startswith("fastgraph ")
    assert os.linesep in run_help


@pytest.mark.parametrize(("given", "expected"), [(None, "1"), ("0", "0")])
def test_torch_is_asked_for_huge_pages_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str
) -> None:
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    variables = {} if given is None else {"THP_MEM_ALLOC_ENABLE": given}
    code = "import os; print(os.environ['THP_MEM_ALLOC_ENABLE'])"
    ours = forks.fastgraph("-c", code, cwd=tmp_path, **variables)
    assert (ours.stdout, ours.returncode) == (f"{expected}\n", 0), ours.stderr
