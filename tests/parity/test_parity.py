"""The comparison of suites: that it finds what differs, survives what dies, and goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parity import __main__ as command
from tests.parity import page
from tests.parity.comparing import Known, counted, differences, exceptions, installed_versions
from tests.parity.records import Event, finished, read, under_way, write
from tests.parity.running import run_examples, run_tests, without_times
from tests.parity.suites import SUITES, Suite, tag_for, unpacked

SUITE = Suite("any", "Any", "torch", "", ("test",), ("test",), ("examples",))
CASES = """\
import os
import random
import sys
import time

import pytest


def test_random():
    assert random.random() == random.Random(0).random()


@pytest.mark.parametrize("hangs", [False, True])
def test_hangs(hangs):
    if hangs:
        time.sleep(600)


def test_dies():
    os.abort()


@pytest.mark.skip(reason="not here")
def test_skips():
    pass


@pytest.mark.xfail(strict=True)
def test_is_expected():
    assert False


def test_fails_at_its_end(end):
    pass


@pytest.fixture
def end():
    yield
    raise ValueError("at the end")
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "test").mkdir(parents=True)
    (folder / "test" / "test_any.py").write_text(CASES)
    (folder / "test" / "test_broken.py").write_text("import nowhere\n")
    (folder / "examples").mkdir()
    return folder


def ends(record: Path) -> dict[str, str]:
    found = finished(read(record)).values()
    return {event.case.partition("::")[2]: event.outcome for event in found}


def test_cases_that_fail_hang_and_die_are_outcomes(source: Path, tmp_path: Path) -> None:
    record = tmp_path / "plain.jsonl"
    run_tests(SUITE, source, "plain", ["test"], record, 2.0)
    assert ends(record) == {
        "": "collection failed",
        "test_random": "passed",
        "test_hangs[False]": "passed",
        "test_hangs[True]": "timed out",
        "test_dies": "crashed",
        "test_skips": "skipped",
        "test_is_expected": "failed as expected",
        "test_fails_at_its_end": "failed",
    }
    begun = [event.case for event in read(record) if event.outcome == "begun"]
    assert len(begun) == len(set(begun))  # nothing ran twice
    why = {case.partition("::")[2]: e.why for case, e in finished(read(record)).items()}
    assert why["test_dies"] == "SIGABRT" and why["test_hangs[True]"] == "after 2 s"
    assert "not here" in why["test_skips"] and "at the end" in why["test_fails_at_its_end"]
    size = record.stat().st_size
    run_tests(SUITE, source, "plain", ["test/test_any.py"], record, 2.0)
    assert record.stat().st_size == size  # all is there


def test_one_of_both_runs_is_with_fastgraph(source: Path, tmp_path: Path) -> None:
    (source / "test" / "test_enabled.py").write_text(
        "import sys\ndef test_enabled():\n    assert 'fastgraph.enabling' not in sys.modules\n"
    )
    for way, outcome in (("plain", "passed"), ("fastgraph", "failed")):
        record = tmp_path / f"{way}.jsonl"
        run_tests(SUITE, source, way, ["test/test_enabled.py"], record, 60.0)
        assert ends(record) == {"test_enabled": outcome}


def test_examples_by_what_they_print(source: Path, tmp_path: Path) -> None:
    texts = {
        "same.py": "import sys; print(sys.argv[1:], 'Median time per epoch: 0.1234s')",
        "other.py": "import sys; print(1, 'fastgraph.enabling' in sys.modules)",
        "fails.py": "raise ValueError('no data')",
        "hangs.py": "import time; time.sleep(600)",
        "dies.py": "import os; os.abort()",
    }
    for name, text in texts.items():
        (source / "examples" / name).write_text(text)
    scripts = ["examples/same.py --epochs 3", *(f"examples/{n}" for n in list(texts)[1:])]
    records = {way: tmp_path / f"{way}.jsonl" for way in ("plain", "fastgraph")}
    run_examples(SUITE, source, "plain", scripts[:3], records["plain"], 60.0)
    run_examples(SUITE, source, "plain", scripts, records["plain"], 2.0)
    run_examples(SUITE, source, "fastgraph", scripts[:2], records["fastgraph"], 60.0)
    plain, ours = (finished(read(record)) for record in records.values())
    outcomes = [(event.outcome, event.why) for event in plain.values()]
    assert outcomes == [
        ("passed", ""),
        ("passed", ""),
        ("failed", "ValueError: no data"),
        ("timed out", "after 2 s"),
        ("crashed", "SIGABRT"),
    ]
    assert plain[scripts[0]].output == "['--epochs', '3'] Median time per epoch: ...\n"
    (other,) = differences("any", {case: plain[case] for case in scripts[:2]}, ours, [], {})
    assert (other.case, other.is_worse) == ("examples/other.py", True)
    assert other.fastgraph == ("prints something else", "1 False | 1 True")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Epoch: 1, Loss: 0.51, Time: 0.02s", "Epoch: 1, Loss: 0.51, Time: ..."),
        ("took 12.3 s, 45it/s", "took ..., ..."),
        ("Accuracy: 0.815", "Accuracy: 0.815"),
        ("5 steps", "5 steps"),
    ],
)
def test_seconds_are_left_out(text: str, expected: str) -> None:
    assert without_times(text) == expected


@pytest.mark.parametrize(
    ("plain", "ours", "is_worse"),
    [
        ("passed", "failed", True),
        ("passed", "skipped", True),
        ("passed", "crashed", True),
        ("passed", "timed out", True),
        ("skipped", "failed", True),
        ("failed as expected", "failed", True),
        ("skipped", "passed", False),
        ("failed", "passed", False),
        ("failed", "skipped", False),
        ("failed", "crashed", False),
    ],
)
def test_what_is_worse(plain: str, ours: str, is_worse: bool) -> None:
    (found,) = differences("any", {"a": Event("a", plain)}, {"a": Event("a", ours)}, [], {})
    assert found.is_worse is is_worse


def test_a_case_that_is_there_once_only_differs() -> None:
    (found,) = differences("any", {"a": Event("a", "passed")}, {}, [], {})
    assert found.is_worse and found.fastgraph == ("no such case", "")
    assert not differences("any", {"a": Event("a", "failed")}, {"a": Event("a", "failed")}, [], {})


def test_an_exception_is_bound_to_its_case_and_versions() -> None:
    known = Known("pyg", "t.py::test_a", ("torch>=2.12,<2.14", "dgl>=2"), "rounding")
    installed = {"torch": "2.13.0+cpu", "dgl": "2.1.0"}
    assert known.covers("pyg", "t.py::test_a", installed)
    assert known.covers("pyg", "t.py::test_a[1]", installed)
    assert not known.covers("pyg", "t.py::test_ab", installed)
    assert not known.covers("dgl", "t.py::test_a", installed)
    assert not known.covers("pyg", "t.py::test_a", {**installed, "torch": "2.14.0"})
    assert not known.covers("pyg", "t.py::test_a", {"torch": "2.13.0"})
    events = {"t.py::test_a": Event("", "passed")}, {"t.py::test_a": Event("", "failed")}
    assert differences("pyg", *events, [known], installed)[0].reason == "rounding"


@pytest.mark.parametrize("versions", ["[]", '["torch"]'])
def test_an_exception_must_name_versions(versions: str, tmp_path: Path) -> None:
    path = tmp_path / "exceptions.toml"
    path.write_text(
        f'[[exception]]\nsuite = "pyg"\ncase = "a"\nversions = {versions}\nreason = "r"\n'
    )
    with pytest.raises(ValueError, match="version"):
        exceptions(path)


def test_the_table_of_exceptions_can_be_read() -> None:
    assert all(known.suite in SUITES for known in exceptions())


def test_cases_count_in_the_nearest_part() -> None:
    events = {c: Event(c, o) for c, o in (("t/a.py::x", "passed"), ("t/n/b.py::y", "failed"))}
    parts = {part.name: part.plain for part in counted(["t", "t/n"], events, {})}
    assert parts == {"t": {"passed": 1}, "t/n": {"failed": 1}}


def test_a_record_that_was_cut_short_is_read(tmp_path: Path) -> None:
    path = tmp_path / "record"
    write(path, Event("a", "passed"))
    write(path, Event("b", "begun"))
    with path.open("a") as file:
        file.write('{"case": "b", "outc')
    assert under_way(read(path)) == "b"
    write(path, Event("b", "crashed", "SIGKILL"))
    assert {e.case: e.outcome for e in finished(read(path)).values()} == {
        "a": "passed",
        "b": "crashed",
    }


@pytest.mark.parametrize(
    ("installed", "tag"),
    [
        ("2.8.1", "2.8.0.post1"),
        ("2.8.0", "2.8.0"),
        ("2.1.0+cpu", "v2.1.0"),
        ("2.9.0", "2.8.0.post1"),
    ],
)
def test_which_tag_belongs_to_a_version(installed: str, tag: str) -> None:
    tags = ["v2.1.0", "2.7.0", "2.8.0", "2.8.0.post1", "3.0.0rc1", "nightly", "2.10.0"]
    assert tag_for(installed, tags) == tag


def test_sources_of_a_tag_are_unpacked_once(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    (origin / "test").mkdir(parents=True)
    (origin / "test" / "test_a.py").write_text("old")
    git = ["git", "-C", str(origin), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q", str(origin)], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    subprocess.run([*git, "tag", "0.1"], check=True)
    (origin / "test" / "test_a.py").write_text("new")
    subprocess.run([*git, "commit", "-qam", "two"], check=True)
    for source in (origin, origin / ".git"):
        folder, tag = unpacked(SUITE, str(source), tmp_path)
        assert (folder / "test" / "test_a.py").read_text() == "old"
        assert tag == "0.1"
    with pytest.raises(ValueError, match="must be a git directory of upstream"):
        unpacked(SUITE, str(tmp_path / "nowhere"), tmp_path)


def test_loops_over_epochs_end_early(source: Path, tmp_path: Path) -> None:
    (source / "examples" / "trains.py").write_text(
        "print([*range(1, 9)], [*range(9)][-1], [*range(1, 2)], [*range(1, 9, 2)])"
    )
    record = tmp_path / "plain.jsonl"
    run_examples(SUITE, source, "plain", ["examples/trains.py"], record, 60.0, ["--epochs=3"])
    (event,) = finished(read(record)).values()
    assert event.output == "[1, 2, 3] 8 [1] [1, 3, 5, 7]\n"


def test_what_is_not_run_keeps_what_was_found(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "examples" / "prints.py").write_text("print(1)")
    found = tmp_path / "found.json"
    monkeypatch.setattr(command, "FOUND", found)
    monkeypatch.setattr(command, "SUITES", {"pyg": SUITE})
    monkeypatch.setattr(command, "unpacked", lambda *_: (source, "0.1"))
    kept = {"parts": [{"name": "test", "plain": {}, "fastgraph": {}}], "differences": []}
    before = {"versions": installed_versions(), "tag": "0.1", "folders": ["test"], "tests": kept}
    words = ["run", "pyg", "--folder", str(tmp_path), "--parts", "--examples", "examples/prints.py"]
    for tag in ("0.1", "0.2"):
        found.write_text(json.dumps({"any": {**before, "tag": tag, "examples": kept}}))
        assert command.main([*words, "--epochs", "2"]) == 0
        entry = json.loads(found.read_text())["any"]
        assert (entry["tests"] == kept) is (tag == "0.1")
        assert entry["folders"] == (["test"] if tag == "0.1" else [])
        assert entry["examples"]["parts"][0]["fastgraph"] == {"passed": 1}
        assert entry["examples"]["options"] == ["--epochs=2"]


def test_the_page_is_that_of_what_was_found() -> None:
    found = json.loads(page.FOUND.read_text())
    assert page.PAGE.read_text() == page.rendered(found)


def test_the_command_says_what_is_wrong_with_a_source(tmp_path: Path) -> None:
    words = ["run", "pyg", "--source", str(tmp_path), "--folder", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.parity", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--source:" in done.stderr and "must be a git directory of upstream" in done.stderr
