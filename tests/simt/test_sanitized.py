from __future__ import annotations

import subprocess
import sys

import pytest

from tests.native.sanitize import sanitizer_environment
from tests.simt import library
from tests.simt.sanitized import CALLS


@pytest.mark.parametrize("call", CALLS)
def test_kernels_under_sanitizers(call: str, request: pytest.FixtureRequest) -> None:
    why_not = library.why_unavailable()
    if why_not is not None:
        pytest.skip(why_not)
    try:
        environ = sanitizer_environment("baseline")
    except SystemExit as error:
        pytest.skip(str(error))
    repeats = ["--repeats"] if request.config.getoption("--repeats") else []
    process = subprocess.run(
        [sys.executable, "-m", "tests.simt.sanitized", library.build("asan"), call, *repeats],
        cwd=library.ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "no error found" in process.stdout
