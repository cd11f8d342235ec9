"""``python -m tests.parity run SUITE`` and ``python -m tests.parity page``."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

from tests.parity.comparing import (
    as_json,
    counted,
    differences,
    exceptions,
    installed_versions,
)
from tests.parity.page import FOUND, PAGE, rendered
from tests.parity.records import finished, read
from tests.parity.running import ROOT, WAYS, run_examples, run_tests
from tests.parity.suites import SUITES, unpacked


def main(words: list[str] | None = None) -> int:
    """Run one of both commands; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="run a suite without and with fastgraph, and compare")
    run.set_defaults(command=_run)
    run.add_argument("suite", choices=SUITES)
    run.add_argument("--source", help="a git directory of upstream; default: a clone is made")
    run.add_argument("--parts", nargs="*", help="files and folders of tests; default: all")
    run.add_argument("--examples", nargs="*", help="scripts, with arguments; default: all")
    run.add_argument("--data", type=Path, help="a folder of data sets, as the examples expect it")
    run.add_argument(
        "--stand-ins", action="store_true", help="random graphs for data sets of PyG's examples"
    )
    run.add_argument(
        "--sampler", action="store_true", help="have examples sample by ours without fastgraph, too"
    )
    run.add_argument("--epochs", type=int, help="of an example, at most; default: all")
    run.add_argument("--seconds", type=float, default=120.0, help="for a case (default: 120)")
    run.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "parity", help="for sources and records"
    )
    page = commands.add_parser("page", help="write the page from what was found last")
    page.set_defaults(command=_write_page)
    options = parser.parse_args(words)
    return int(options.command(options))


def _run(options: argparse.Namespace) -> int:
    suite = SUITES[options.suite]
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        source, tag = unpacked(suite, options.source, options.folder)
    except ValueError as error:
        print(f"--source: {error}", file=sys.stderr)
        return 2
    if options.data is not None and not (source / "data").exists():
        shutil.copytree(options.data, source / "data")  # a copy, as data sets write into theirs
    parts = list(suite.parts) if options.parts is None else options.parts
    scripts = options.examples
    if scripts is None:
        paths = (
            path for folder in suite.examples for path in sorted((source / folder).glob("*.py"))
        )
        scripts = [str(path.relative_to(source)) for path in paths]
    tests, examples = {}, {}
    seeded = ["--stand-ins"] * options.stand_ins + ["--sampler"] * options.sampler
    seeded += [] if options.epochs is None else [f"--epochs={options.epochs}"]
    for way in WAYS:
        files = [
            options.folder / f"{suite.name}-{kind}-{way}.jsonl" for kind in ("tests", "examples")
        ]
        started = time.monotonic()
        if parts:
            run_tests(suite, source, way, parts, files[0], options.seconds)
        if scripts:
            run_examples(suite, source, way, scripts, files[1], options.seconds, seeded)
        tests[way], examples[way] = (finished(read(file)) for file in files)
        print(f"{suite.title}, {way}: {time.monotonic() - started:.0f} s")
    known, versions = exceptions(), installed_versions()
    found = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    named = (suite.name, [{w: e[w] for w in WAYS} for e in (tests, examples)])
    worse = 0
    before = found.get(suite.name, {})
    entry = {"versions": versions, "tag": tag, "folders": list(parts)}
    is_same = all(before.get(key) == entry[key] for key in ("versions", "tag"))
    if not parts and is_same:
        entry["folders"] = before["folders"]
    for kind, events in zip(("tests", "examples"), named[1], strict=True):
        of = parts if kind == "tests" else scripts
        if not of and is_same:  # what was found of them holds
            entry[kind] = before[kind]
            continue
        chosen = {
            way: {c: e for c, e in events[way].items() if c.startswith(tuple(of))} for way in WAYS
        }
        other = differences(suite.name, *chosen.values(), known, versions)
        groups = of if kind == "tests" else sorted({str(Path(s).parent) for s in scripts})
        entry[kind] = as_json(counted(groups, *chosen.values()), other)
        if kind == "examples" and of:
            entry[kind]["options"] = seeded
        worse += sum(d.is_worse and not d.reason for d in other)
        for difference in other:
            if difference.is_worse and not difference.reason:
                print(f"{difference.case}: {difference.plain} -> {difference.fastgraph}")
    found[suite.name] = entry
    FOUND.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{suite.title}: {worse} cases differ for the worse without a reason")
    return int(worse > 0)


def _write_page(_: argparse.Namespace) -> int:
    PAGE.write_text(rendered(json.loads(FOUND.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
