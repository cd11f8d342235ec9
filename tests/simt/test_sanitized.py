from __future__ import annotations

import subprocess
import sys

import pytest

from tests.native.sanitize import sanitizer_environment
from tests.simt import library
from tests.simt.sanitized import CALLS

# Each is a process, which loads torch under the sanitizers first.
GROUPS = {
    "sums": ("planted", "spmm", "mean", "max", "winner", "max_alone", "head_scores"),
    "gat": ("gat", "gat_edges"),
    "gatv2": ("gatv2", "gatv2_edges"),
    "attention": ("attention", "attention_edges"),
}


def test_groups_have_everything() -> None:
    grouped = [call for calls in GROUPS.values() for call in calls]
    assert sorted(grouped) == sorted(["planted", *CALLS])


@pytest.mark.parametrize("calls", GROUPS.values(), ids=GROUPS)
def test_kernels_under_sanitizers(calls: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    why_not = library.why_unavailable()
    if why_not is not None:
        pytest.skip(why_not)
    try:
        environ = sanitizer_environment("baseline")
    except SystemExit as error:
        pytest.skip(str(error))
    repeats = ["--repeats"] if request.config.getoption("--repeats") else []
    process = subprocess.run(
        [sys.executable, "-m", "tests.simt.sanitized", library.build("asan"), *calls, *repeats],
        cwd=library.ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.count("no error found") == len(set(calls) & CALLS.keys())
    assert ("all mistakes found" in process.stdout) == ("planted" in calls)
