"""Scripts as users write them, unmodified, beside one process: what they print is the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forks
from tests.dist.test_scripts import LAUNCHED

FOLDER = Path(__file__).parent / "user_scripts"

IN_FLOAT64 = "import torch; torch.set_default_dtype(torch.float64)\n"

SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_prints_what_it_prints_on_one_process(
    tmp_path: Path, world_size: int, name: str
) -> None:
    text = IN_FLOAT64 + (FOLDER / f"{name}.py").read_text()
    folders = tmp_path / "plain", tmp_path / "ranks"
    for folder in folders:
        folder.mkdir()
        (folder / "script.py").write_text(text)
    plain = forks.python("script.py", cwd=folders[0])
    assert plain.returncode == 0, plain.stderr
    found = forks.launched(world_size, *LAUNCHED, "script.py", cwd=folders[1])
    expected = plain.stdout.splitlines()
    assert expected
    # Other lines are warnings.
    assert [line for line in found.splitlines() if line in expected] == expected, found
