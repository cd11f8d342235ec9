"""Programs that ask whether torch-sparse is there: who is told so, and that PyG is not."""

from __future__ import annotations

import pickle
from types import ModuleType
from typing import Any

import pytest
import torch
import torch_geometric.typing
from torch_geometric.data import Data
from torch_geometric.transforms import ToSparseTensor

import fastgraph
from fastgraph.pyg.sparse_flag import needs_loaders_alone
from tests.pyg.mini_batches import WITHOUT_SAMPLER

pytestmark = WITHOUT_SAMPLER

ASKS = "from torch_geometric.typing import WITH_TORCH_SPARSE\n"
SAINT = "from torch_geometric.loader import GraphSAINTRandomWalkSampler\n"
NAMES_MATRICES = (
    "import torch_geometric.transforms as T\nmade = lambda: T.ToSparseTensor()\n",
    "from torch_geometric.typing import SparseTensor\n",
    "def forward(data):\n    return data.adj_t\n",
    "from torch_geometric import EdgeIndex\n",
)


def told(program: str, name: str = "__main__") -> bool:
    """The answer that code gets which runs under a name."""
    found = {"__name__": name}
    exec(compile(program, "program.py", "exec"), found)
    return bool(found["WITH_TORCH_SPARSE"])


@pytest.mark.parametrize("name", ["__main__", "__mp_main__"])
def test_a_program_of_loaders_is_told_that_it_is_there(name: str) -> None:
    with fastgraph.enabled():
        assert told(SAINT + ASKS, name)
        asks_later = "import torch_geometric.typing as t\nWITH_TORCH_SPARSE = t.WITH_TORCH_SPARSE\n"
        assert told(SAINT + asks_later, name)
    assert not told(SAINT + ASKS, name)


@pytest.mark.parametrize("matrices", NAMES_MATRICES)
def test_a_program_of_matrices_is_told_that_it_is_missing(matrices: str) -> None:
    with fastgraph.enabled():
        assert not told(SAINT + matrices + ASKS)
        assert not told(ASKS)
        assert not told(SAINT + ASKS, "module_of_the_program")
        assert told(SAINT + ASKS)


def test_functions_and_pyg_itself_are_told_that_it_is_missing() -> None:
    program = f"{SAINT}def asks():\n    {ASKS}    return WITH_TORCH_SPARSE\n"
    data = Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    with fastgraph.enabled():
        found = {"__name__": "__main__"}
        exec(program, found)
        assert found["asks"]() is False  # type: ignore[operator]
        assert ToSparseTensor()(data).adj_t.layout == torch.sparse_csr


def test_the_module_is_put_back_and_may_be_set() -> None:
    typing = torch_geometric.typing
    with fastgraph.enabled():
        assert isinstance(typing, ModuleType)
        typing.WITH_TORCH_SPARSE = True
        assert ask() is True
        typing.WITH_TORCH_SPARSE = False
        assert ask() is False
    assert type(typing) is ModuleType
    assert vars(typing)["WITH_TORCH_SPARSE"] is False


def test_the_module_is_pickled_by_its_name() -> None:
    typing = torch_geometric.typing
    with fastgraph.enabled():
        assert pickle.loads(pickle.dumps(typing)) is typing


def test_functions_that_name_the_module_are_sent_to_other_processes() -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    program: dict[str, Any] = {"__name__": "__main__", "typing": torch_geometric.typing}
    exec("def asks():\n    return typing.WITH_TORCH_SPARSE\n", program)
    with fastgraph.enabled():
        sent = cloudpickle.dumps(program["asks"])
    assert pickle.loads(sent)() is False


def test_the_flag_may_be_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    with fastgraph.enabled():
        with monkeypatch.context() as deleting:
            deleting.delattr(torch_geometric.typing, "WITH_TORCH_SPARSE")
            assert not hasattr(torch_geometric.typing, "WITH_TORCH_SPARSE")
            with pytest.raises(AttributeError):
                del torch_geometric.typing.WITH_TORCH_SPARSE
        assert ask() is False


def ask() -> bool:
    return torch_geometric.typing.WITH_TORCH_SPARSE


def test_names_within_functions_and_classes_count() -> None:
    program = f"{SAINT}class Net:\n    def forward(self, data):\n        return data.adj_t\n"
    assert not needs_loaders_alone(compile(program, "program.py", "exec"))
    assert needs_loaders_alone(
        compile("import torch_geometric.loader as l\nl.NeighborLoader", "", "exec")
    )
