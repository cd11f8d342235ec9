"""DGL's examples on ranks whose graphs are on a device: they print what one process prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.dgl import graphs as graphs  # which skips these tests without DGL
from tests.dist.on_device import SAID
from tests.dist.test_device_scripts import EPOCHS, EXAMPLES, LOADING, printed

SCRIPTS = ("gcn", "gat", "gatv2", "rgcn", "transformer")
"""Those that train on the whole graph; DGL's C++ library samples for the other one."""

ON_DEVICE = """
from tests.dgl import on_device as of_dgl; of_dgl.install()
from tests.dist import on_device; on_device.install(lambda author: False)
"""

LOADED, MADE = "dgl_training.load(args)\n", r"^model = .*\)$"
"""The lines after which authors with a GPU move graph and model there."""


def on_device(text: str) -> str:
    """An example as its author would have it on a device."""
    assert LOADED in text
    moved, models = re.subn(MADE, r'\g<0>.to("standin")', text, flags=re.MULTILINE)
    assert models == 1
    return moved.replace(LOADED, f'{LOADED}graph = graph.to("standin")\n')


@pytest.mark.parametrize("name", SCRIPTS)
def test_examples_print_what_they_print_on_one_process_and_wait_for_nothing_of_ours(
    tmp_path: Path, world_size: int, name: str
) -> None:
    text = (EXAMPLES / f"dgl_{name}.py").read_text()
    first = f"import sys; sys.path.insert(0, {str(EXAMPLES)!r})\nimport fastgraph.dgl\n"
    first += f"fastgraph.dgl.fix_import()\n{LOADING}"
    words = ("--epochs", EPOCHS, "--hidden-channels", "16", "--heads", "2")
    script = ON_DEVICE + first + on_device(text)
    found = printed(tmp_path, world_size, first + text, *words, on_ranks=script)
    expected, of_ranks = ([re.sub(r"[Tt]ime: \S+", "", line) for line in lines] for lines in found)
    assert len(expected) == int(EPOCHS) + 1
    assert [line for line in of_ranks if line in expected] == expected, of_ranks
    assert not [line for line in of_ranks if line.startswith(SAID)]
