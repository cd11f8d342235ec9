"""Scripts on ranks whose tensors are on a device: they print what they print on the CPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import forks
from tests.dist import naming_device, on_device
from tests.dist.test_scripts import LAUNCHED
from tests.dist.test_user_scripts import FOLDER, IN_FLOAT64, SCRIPTS

EXAMPLES = Path(__file__).parents[2] / "examples"

ON_DEVICE = "from tests.dist import on_device; on_device.install()\n"

NAMED = "from tests.dist import on_device; on_device.install(lambda author: False)\n"
"""Before scripts that name the device themselves."""

NOT_ON_STAND_IN = {
    "content_and_cites": "its labels are a LongTensor, which torch has for the CPU and CUDA alone",
    "graph_transformer": "graphs are brought into another order on the CPU",
    "node2vec": "torch has no sparse gradients for its spare device",
}

KNOWN_EDGES = ("early_stopping", "gradient_penalty")
"""Scripts along the same edges in each step, which have the host wait for nothing of ours."""

FIRST = ("autoencoder", "heterogeneous", "link_prediction", *KNOWN_EDGES)

QUIET = ("gat", "gatv2", "gcn", "sage", "transformer")
"""Examples that read nothing but losses and accuracies, along the same edges in each step."""

EPOCHS = "18"
"""Steps 4, 8 and 16, in which ranks compare again, and those in which they learn the outcome."""

LOADING = """
import sys, types
import torch
from torch_geometric.data import Data

def load(*_):
    n = 60
    kind = torch.randint(0, 3, (n,))
    masks = {f"{name}_mask": kind == i for i, name in enumerate(("train", "val", "test"))}
    x, y, edges = torch.randn(n, 6), torch.randint(0, 4, (n,)), torch.randint(0, n, (2, 300))
    return Data(x=x, y=y, edge_index=edges, **masks), 4

module = sys.modules["data_loading"] = types.ModuleType("data_loading")
module.load, module.add_arguments = load, lambda parser: parser.set_defaults(dataset="", root="")
"""


def printed(
    folder: Path, world_size: int, text: str, *words: str, on_ranks: str | None = None
) -> tuple[list[str], list[str]]:
    """The output of a script in one process on the CPU, and on ranks with a device.

    Args:
        folder: in which it works.
        world_size: the number of ranks.
        text: the script.
        words: its command line.
        on_ranks: what ranks run; default: the script, whose tensors are made on the device.
    """
    folders = folder / "plain", folder / "ranks"
    texts = text, ON_DEVICE + text if on_ranks is None else on_ranks
    for path, of_script in zip(folders, texts, strict=True):
        path.mkdir()
        (path / "script.py").write_text(IN_FLOAT64 + of_script)
    plain = forks.python("script.py", *words, cwd=folders[0])
    assert plain.returncode == 0, plain.stderr
    found = forks.launched(world_size, *LAUNCHED, "script.py", *words, cwd=folders[1])
    return plain.stdout.splitlines(), found.splitlines()


@pytest.mark.parametrize(
    "name",
    [
        name if name in FIRST else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in SCRIPTS
        if name not in NOT_ON_STAND_IN
    ],
)
def test_user_scripts_print_what_they_print_on_one_process(
    tmp_path: Path, world_size: int, name: str
) -> None:
    # An array of a tensor on a GPU is not to be had.
    text = (FOLDER / f"{name}.py").read_text().replace(".numpy()", ".cpu().numpy()")
    expected, found = printed(tmp_path, world_size, text)
    assert expected
    assert [line for line in found if line in expected] == expected, found
    if name in KNOWN_EDGES:
        assert not [line for line in found if line.startswith(on_device.SAID)]


@pytest.mark.parametrize("name", QUIET)
def test_examples_do_so_and_have_the_host_wait_for_nothing_of_ours(
    tmp_path: Path, world_size: int, name: str
) -> None:
    text = LOADING + (EXAMPLES / f"{name}.py").read_text()
    expected, found = ([re.sub(r"[Tt]ime: \S+", "", line) for line in lines] for lines in printed(
        tmp_path, world_size, text, "--epochs", EPOCHS
    ))  # fmt: skip
    assert len(expected) == int(EPOCHS) + 1
    assert [line for line in found if line in expected] == expected, found
    assert not [line for line in found if line.startswith(on_device.SAID)]


def test_a_script_that_names_its_device_has_the_losses_of_one_process(
    tmp_path: Path, world_size: int
) -> None:
    expected = naming_device.losses(tmp_path / "plain", "cpu", 0, IN_FLOAT64)
    preamble = IN_FLOAT64 + NAMED
    found = naming_device.losses(tmp_path / "ranks", "standin", world_size, preamble)
    assert len(expected) == 3 * 12
    assert found == pytest.approx(expected, rel=1e-8)
