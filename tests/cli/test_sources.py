"""Source that is hard to read, and standard input that is hard to read from, as plain python."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import assert_same, environment, fastgraph

SOURCES = {
    "nul": b"print(1)\nx = '\0'\n",
    "nul in a comment": b"# a\0b\nprint(1)\n",
    "unknown encoding": b"# coding: nonsense\nprint(1)\n",
    "no text encoding": b"# coding: rot13\nprint(1)\n",
    "invalid UTF-8": b"x = 1\nprint('\xff')\n",
    "invalid UTF-8 in a comment": b"# caf\xe9\nprint(1)\n",
    "latin-1": b"# coding: latin-1\nprint(ascii('\xe9'))\n1 / 0\n",
    "not ascii": b"# coding: ascii\nprint('\xe9')\n",
    "byte order mark": b"\xef\xbb\xbfprint(1)\n1 / 0\n",
    "byte order mark and another encoding": b"\xef\xbb\xbf# coding: latin-1\nprint(1)\n",
    "UTF-16": "print(1)\n".encode("utf-16"),
    "line ends of DOS": b"x = 1\r\nif x:\r\n    print('a\\\r\nb')\r\n1 / 0\r\n",
    "tabs and spaces": b"if 1:\n\tprint(1)\n        print(2)\n",
    "indentation": b"x = 1\n  y = 2\n",
    "syntax": "x = 'é' + f(:\n".encode(),
    "syntax without line end": b"f(:",
    "return outside": b"return 2\n",
    "invalid escape": b"x = '\\d'\n",
    "form feed": b"\x0cprint(1)\n1 / 0",
    "empty": b"",
}


@pytest.mark.parametrize("name", SOURCES)
def test_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "program.py").write_bytes(SOURCES[name])
    assert_same(tmp_path, "program.py")


@pytest.mark.parametrize("name", SOURCES)
def test_standard_input(tmp_path: Path, name: str) -> None:
    assert_same(tmp_path, "-", stdin=SOURCES[name])


@pytest.mark.parametrize("code", ["x = 'é' + f(:", "# coding: nonsense\nprint(1)", "'\udcff'", ""])
def test_code(tmp_path: Path, code: str) -> None:
    assert_same(tmp_path, "-c", code)


def test_bytecode_of_another_version(tmp_path: Path) -> None:
    (tmp_path / "program.pyc").write_bytes(b"\0" * 32)
    assert "Bad magic number" in assert_same(tmp_path, "program.pyc").stderr


@pytest.mark.parametrize(
    "line",
    [
        "PYTHON < /dev/null",
        "PYTHON <&-",
        "PYTHON - <&-",
        "PYTHON 0> written",
        ": | PYTHON",
        "echo 'import sys; print(sys.stdin.read())' | PYTHON - a",
        "PYTHON program.py <&-",
        "PYTHON program.py >&-",
        "PYTHON failing.py 2>&-",
        "PYTHON missing.py 2>&-",
        "mkfifo pipe; (cat program.py > pipe) & PYTHON pipe",
        "PYTHON <(cat program.py)",
        "cat failing.py | PYTHON /dev/stdin",
        "PYTHON .",
        "PYTHON ''",
        "PYTHON program.py/",
        "mkdir gone; cd gone; rmdir ../gone; PYTHON missing.py",
        'mkdir gone; cd gone; rmdir ../gone; PYTHON "$OLDPWD"/program.py',
        "mkdir gone; cd gone; rmdir ../gone; PYTHON -m json.tool --help",
        "PYTHON -c 'print(1)' <&- >&- 2>&-",
    ],
)
def test_shell(tmp_path: Path, line: str) -> None:
    results = []
    for side in ("plain", "ours"):
        folder = tmp_path / side / "folder"
        folder.mkdir(parents=True)
        (folder / "program.py").write_text("import sys\nprint(sys.argv, sys.path[0])\n")
        (folder / "failing.py").write_text("def f(): 1 / 0\nf()\n")
        (folder / "__main__.py").write_text("import sys\nprint(sys.argv, __file__, sys.path[0])\n")
        command = shlex.quote(sys.executable) + (" -m fastgraph" if side == "ours" else "")
        done = subprocess.run(
            ["bash", "-c", line.replace("PYTHON", command)],
            cwd=folder,
            env=environment(FASTGRAPH="0"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        out, err = (text.replace(str(folder), "") for text in (done.stdout, done.stderr))
        results.append((out, err, done.returncode))
    assert results[0] == results[1]


def test_what_exit_handlers_see_after_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        """\
import atexit, sys
def at_end():
    trace = sys.last_traceback
    print(globals().get("__file__"), sys.excepthook is sys.__excepthook__, trace.tb_lineno)
atexit.register(at_end)
1 / 0
"""
    )
    assert assert_same(tmp_path, "program.py").stdout == "None True 6\n"


@pytest.mark.parametrize(
    "hook", ["def hook(*_): raise OSError(1)\nsys.excepthook = hook", "del sys.excepthook"]
)
def test_broken_hook_for_exceptions(tmp_path: Path, hook: str) -> None:
    (tmp_path / "program.py").write_text(f"import sys\n{hook}\n1 / 0\n")
    assert_same(tmp_path, "program.py")


def test_modules_of_the_program_that_have_the_name_of_one_that_fastgraph_uses(
    tmp_path: Path,
) -> None:
    for name in ("click", "random", "attr", "encodings", "statistics"):
        (tmp_path / f"{name}.py").write_text("print('imported', __name__)\n")
    (tmp_path / "program.py").write_text(
        "import attr, click, random, encodings, statistics\n"
        "print(click.__file__, encodings.__file__, sorted(vars(random)))\n"
    )
    assert assert_same(tmp_path, "program.py").returncode == 0
    assert assert_same(tmp_path, "-m", "program").returncode == 0
    assert assert_same(tmp_path, "random.py").returncode == 0
    assert assert_same(tmp_path, "-m", "click").returncode == 0


def test_a_directory_is_no_module_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "click").mkdir()
    (tmp_path / "program.py").write_text("import click; print(click.__file__)\n")
    assert assert_same(tmp_path, "program.py").returncode == 0


def test_prompt_after_the_program(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("x = 5\n1 / 0\n")
    results = [
        subprocess.run(
            [sys.executable, "-i", *prefix, "program.py"],
            cwd=tmp_path,
            env=environment(FASTGRAPH="0"),
            input="print(x, __name__)\n",
            capture_output=True,
            text=True,
            timeout=60,
        )
        for prefix in ((), ("-m", "fastgraph"))
    ]
    assert results[0].stdout == results[1].stdout == "5 __main__\n"
    assert (results[0].stderr, results[0].returncode) == (results[1].stderr, results[1].returncode)


def test_nothing_is_imported_from_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise RuntimeError('not for fastgraph')\n")
    assert fastgraph("--version", cwd=tmp_path).stdout.startswith("fastgraph ")
