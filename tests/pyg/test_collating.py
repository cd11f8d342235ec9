"""Batches of many graphs beside PyG's: the same bits, dtypes, pieces and errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.loader import DataLoader

import fastgraph


class Pair(Data):
    def __inc__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        return 100 if key == "edge_index" else super().__inc__(key, value, *args, **kwargs)


def edges(nodes: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(max(nodes, 1), (2, 2 * nodes)).to(dtype)


def molecule(nodes: int) -> Data:
    return Data(
        x=torch.randn(nodes, 3),
        edge_index=edges(nodes),
        edge_attr=torch.rand(2 * nodes, 2),
        y=torch.randn(1),
        smiles="C" * nodes,
    )


def positions_first(nodes: int) -> Data:
    data = Data(pos=torch.rand(nodes + 1, 3), edge_index=edges(nodes))
    data.x = torch.rand(nodes)
    return data


def hetero(nodes: int) -> HeteroData:
    data = HeteroData()
    data["a"].x, data["b"].x = torch.rand(nodes, 2), torch.rand(2, 1)
    data["a", "to", "b"].edge_index = edges(2)
    return data


MADE: dict[str, Callable[[int], Any]] = {
    "molecules": molecule,
    "int32": lambda n: Data(x=torch.rand(n), edge_index=edges(n, torch.int32)),
    "num_nodes alone": lambda n: Data(edge_index=edges(n), num_nodes=n),
    "num_nodes beside features": lambda n: Data(
        x=torch.rand(n), edge_index=edges(n), num_nodes=n + 2
    ),
    "positions before features": positions_first,
    "nothing that tells nodes": lambda n: Data(edge_index=edges(n)),
    "positions": lambda n: Data(pos=torch.rand(n, 3), face=torch.randint(n + 1, (3, n))),
    "other indices": lambda n: Data(x=torch.rand(n), index=torch.rand(n), my_index=edges(n)[0]),
    "flags as indices": lambda n: Data(x=torch.rand(n), index=torch.rand(n) > 0.5),
    "an index of a graph": lambda n: Data(x=torch.rand(n), index=torch.tensor(n)),
    "numbers": lambda n: Data(x=torch.rand(n), y=n, z=1.5 * n, flag=n > 2, w=torch.tensor(2.0 * n)),
    "batches within": lambda n: Data(x=torch.rand(n), my_batch=torch.arange(n + 1) // 2),
    "sparse": lambda n: Data(x=torch.rand(n), adj=torch.eye(n).to_sparse(), s=torch.eye(3)),
    "transposed": lambda n: Data(x=torch.rand(3, n).t(), edge_index=edges(n).t().contiguous().t()),
    "EdgeIndex": lambda n: Data(
        x=torch.rand(n), edge_index=EdgeIndex(edges(n), sparse_size=(n, n))
    ),
    "nested": lambda n: Data(x=torch.rand(n), more={"a": torch.rand(n), "b": [torch.rand(n)]}),
    "attributes that need gradients": lambda n: Data(x=torch.rand(n, 2, requires_grad=True)),
    "a rule of its own": lambda n: Pair(x=torch.rand(n), edge_index=edges(n)),
    "types": hetero,
}


def assert_equal(ours: Any, plain: Any) -> None:
    assert type(ours) is type(plain)
    if isinstance(plain, Tensor):
        assert ours.dtype == plain.dtype and ours.layout == plain.layout
        assert ours.requires_grad == plain.requires_grad
        ours, plain = (x.to_dense() if x.is_sparse else x for x in (ours, plain))
        assert torch.equal(ours, plain)
    elif isinstance(plain, dict):
        assert list(ours) == list(plain)
        for key, value in plain.items():
            assert_equal(ours[key], value)
    elif isinstance(plain, list):
        for one, other in zip(ours, plain, strict=True):
            assert_equal(one, other)
    else:
        assert ours == plain


def parts(batch: Any) -> dict[str, Any]:
    return {**batch.to_dict(), "slices": batch._slice_dict, "increments": batch._inc_dict}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("sizes", [(3, 1, 4), (2, 0, 0, 5), (0, 0), (4,)], ids=str)
def test_a_batch_is_pygs(made: str, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    graphs = [MADE[made](size) for size in sizes]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = Batch.from_data_list(graphs, follow_batch=["x"])
        with fastgraph.enabled():
            ours = Batch.from_data_list(graphs, follow_batch=["x"])
        assert_equal(parts(ours), parts(plain))
        if made == "sparse":  # PyG cannot cut such a batch
            return
        for one, other in zip(ours.to_data_list(), plain.to_data_list(), strict=True):
            assert_equal(one.to_dict(), other.to_dict())


@pytest.mark.parametrize(
    "graphs",
    [
        [Data(x=torch.rand(2, 3)), Data(x=torch.rand(2, 4))],
        [Data(x=torch.rand(2)), Data(x=None)],
        [Data(x=torch.rand(2), index=torch.arange(2)), Data(x=torch.rand(1), index=torch.rand(1))],
        [Data(x=torch.rand(2), index=edges(2)), Data(x=torch.rand(1), index=torch.arange(1))],
        [Data(x=torch.rand(2)), Data(edge_index=edges(2))],
        [],
    ],
)
def test_graphs_that_do_not_fit_are_pygs_error(graphs: list[Data]) -> None:
    def outcome() -> Any:
        try:
            return parts(Batch.from_data_list(graphs))
        except Exception as error:
            return type(error), str(error)

    plain = outcome()
    with fastgraph.enabled():
        assert_equal(outcome(), plain)


def test_rules_that_a_program_changes_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = [molecule(3), molecule(2)]
    monkeypatch.setattr(Data, "__inc__", lambda self, key, value, *args: 7)
    plain = Batch.from_data_list(graphs)
    with fastgraph.enabled():
        assert_equal(parts(Batch.from_data_list(graphs)), parts(plain))


def test_another_count_of_nodes_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = [molecule(3), molecule(2)]
    monkeypatch.setattr(Data, "num_nodes", property(lambda self: 10))
    plain = Batch.from_data_list(graphs)
    with fastgraph.enabled():
        assert_equal(parts(Batch.from_data_list(graphs)), parts(plain))


def test_rules_that_a_program_has_changed_before_are_not_pygs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = find_spec("fastgraph.pyg.collating")
    assert spec is not None and spec.loader is not None
    for is_plain in (True, False):
        if not is_plain:
            monkeypatch.setattr(Data, "__inc__", lambda self, key, value, *args: 7)
        imported = module_from_spec(spec)
        spec.loader.exec_module(imported)
        data = molecule(2)
        assert imported._are_plain("x", [data.x], [data]) is is_plain


def test_workers_give_the_same_batches() -> None:
    graphs = [molecule(size) for size in (3, 1, 4, 2)]
    plain = [parts(batch) for batch in DataLoader(graphs, batch_size=2)]
    with fastgraph.enabled():
        ours = [parts(batch) for batch in DataLoader(graphs, batch_size=2, num_workers=1)]
    assert_equal(ours, plain)
