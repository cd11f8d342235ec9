"""Batches of PyG's loaders that a thread makes while the program computes on the last one."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, WeightedRandomSampler
from torch_geometric.data import Data
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader

import fastgraph
from fastgraph.pyg import prefetching
from fastgraph.pyg.prefetching import Prefetched, why_not
from tests.pyg.mini_batches import WITHOUT_SAMPLER, graph, hetero

pytestmark = WITHOUT_SAMPLER


@pytest.fixture(autouse=True)
def _prefetch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    with fastgraph.enabled(prefetch=True):
        yield


MAKERS: dict[str, Any] = {
    "nodes": lambda: NeighborLoader(graph(), [3, 2], batch_size=7, shuffle=True),
    "types": lambda: NeighborLoader(
        hetero(), [3, 2], input_nodes="paper", batch_size=7, shuffle=True
    ),
    "links": lambda: LinkNeighborLoader(
        graph(), [3, 2], edge_label_index=graph().edge_index, batch_size=64, shuffle=True
    ),
    "in order": lambda: NeighborLoader(graph(), [3], batch_size=7, drop_last=True),
}


def flat(batch: Any) -> list[Any]:
    values = [value for store in batch.stores for value in store.values()]
    return [value.tolist() if isinstance(value, Tensor) else value for value in values]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_batches_and_other_random_numbers_are_those_without(make: Any) -> None:
    def epochs() -> list[Any]:
        torch.manual_seed(0)
        loader = make()
        return [(flat(batch), torch.rand(3).tolist()) for _ in range(2) for batch in loader]

    found = epochs()
    assert isinstance(iter(make()), Prefetched)
    with fastgraph.enabled(prefetch=False):
        assert not isinstance(iter(make()), Prefetched)
        assert found == epochs()


def test_a_batch_is_made_while_the_program_has_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    monkeypatch.setattr(
        NeighborLoader, "filter_fn", lambda self, out: made.append(threading.get_ident())
    )
    batches = iter(MAKERS["nodes"]())
    next(batches)
    until = time.monotonic() + 30
    while len(made) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert len(made) == 2
    assert made[0] == threading.get_ident() != made[1]
    assert len(list(batches)) == 8
    assert len(set(made)) == 2


def test_batches_that_are_kept_stay_what_they_were() -> None:
    kept = [(batch, flat(batch)) for batch in MAKERS["nodes"]()]
    assert all(flat(batch) == was for batch, was in kept)


def test_an_error_of_the_thread_is_that_of_the_batch() -> None:
    data = graph()
    loader = NeighborLoader(data, [3], input_nodes=torch.tensor([1, 2, 99, 4]), batch_size=1)
    batches = iter(loader)
    assert next(batches).n_id[0] == 1
    assert next(batches).n_id[0] == 2
    with pytest.raises(IndexError, match="holds node 99"):
        next(batches)
    assert next(batches).n_id[0] == 4
    with pytest.raises(StopIteration):
        next(batches)


def test_a_loop_that_is_left_leaves_no_thread() -> None:
    before = threading.active_count()
    for _ in range(3):
        for _batch in MAKERS["nodes"]():
            break
    until = time.monotonic() + 30
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_an_iterator_in_a_forked_process_is_an_error() -> None:
    batches = iter(MAKERS["nodes"]())
    next(batches)
    child = os.fork()
    if child == 0:
        try:
            next(batches)
        except RuntimeError as error:
            os._exit(0 if "forked process" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


def replace_features(loader: Any, batch: Any) -> None:
    loader.data.x = loader.data.x + 1


def write_features(loader: Any, batch: Any) -> None:
    loader.data.x[batch.n_id] += 1


def change_fanouts(loader: Any, batch: Any) -> None:
    loader.node_sampler.num_neighbors = [int(batch.n_id[0]) % 3 + 1]


@pytest.mark.parametrize("per_worker", [True, False])
@pytest.mark.parametrize("edit", [replace_features, write_features, change_fanouts])
def test_edits_of_a_loop_are_in_the_next_batch(edit: Any, per_worker: bool) -> None:
    def epoch() -> list[Any]:
        torch.manual_seed(0)
        loader = NeighborLoader(
            graph(), [3], batch_size=20, shuffle=True, filter_per_worker=per_worker
        )
        found = []
        for batch in loader:
            time.sleep(0.02)  # the thread has begun with the next one
            found.append((flat(batch), torch.rand(1).item()))
            edit(loader, batch)
        return found

    found = epoch()
    with fastgraph.enabled(prefetch=False):
        assert found == epoch()


def test_one_who_interrupts_loses_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = iter(NeighborLoader(graph(), [3], batch_size=20))
    first = [int(next(batches).n_id[0])]

    def interrupt(futures: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prefetching, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
    assert first + [int(batch.n_id[0]) for batch in batches] == [0, 20, 40]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_batches_are_made_in_the_mode_of_the_program(mode: Any) -> None:
    loader = MAKERS["nodes"]()
    with mode():
        iterator = iter(loader)
        assert isinstance(iterator, Prefetched)
        batches = list(iterator)
        assert {batch.x.is_inference() for batch in batches} == {torch.is_inference_mode_enabled()}


def with_gradient() -> Data:
    data = graph()
    data.x.requires_grad_()
    return data


def of_inference() -> Data:
    with torch.inference_mode():
        return graph()


def with_object() -> Data:
    data = graph()
    data.what = object()
    return data


REFUSED: dict[str, tuple[str, Any]] = {
    "transform": ("transform", lambda: {"transform": lambda batch: batch}),
    "of a sample": ("transform", lambda: {"transform_sampler_output": lambda out: out}),
    "workers": ("workers", lambda: {"num_workers": 1}),
    "sampler": (
        "sampler",
        lambda: {"sampler": WeightedRandomSampler([1.0] * 60, 60)},
    ),
    "batches": (
        "sampler",
        lambda: {
            "batch_sampler": BatchSampler(WeightedRandomSampler([1.0] * 60, 60), 9, False),
            "batch_size": 1,
        },
    ),
    "generator": ("generator", lambda: {"shuffle": True, "generator": torch.Generator()}),
    "gradient": ("gradient", lambda: {"data": with_gradient()}),
    "inference": ("of inference", lambda: {"data": of_inference()}),
    "object": ("no tensor", lambda: {"data": with_object()}),
    "pinned": ("pinned", lambda: {"pin_memory": True}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("reason", "options"), REFUSED.values(), ids=REFUSED.keys())
def test_what_may_be_otherwise_in_a_thread_is_not_prefetched(reason: str, options: Any) -> None:
    loader = NeighborLoader(**{"data": graph(), "num_neighbors": [3], "batch_size": 9} | options())
    assert reason in str(why_not(loader))
    if loader.num_workers == 0:
        assert not isinstance(iter(loader), Prefetched)


def test_a_function_of_the_program_is_not_called_in_a_thread() -> None:
    loader = MAKERS["nodes"]()
    collate = loader.collate_fn
    loader.collate_fn = lambda nodes: collate(nodes)
    assert "a function of the loader" in str(why_not(loader))


def test_negative_samples_are_not_prefetched() -> None:
    loader = LinkNeighborLoader(
        graph(), [3], edge_label_index=graph().edge_index, neg_sampling="binary"
    )
    with pytest.warns(UserWarning, match="does not prefetch: negative samples"):
        iter(loader)


def test_without_a_core_that_is_free_nothing_is_prefetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert "leave no core" in str(why_not(MAKERS["nodes"]()))


def test_without_the_setting_nothing_is_said() -> None:
    with fastgraph.enabled(prefetch=False), warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = NeighborLoader(graph(), [3], batch_size=9, transform=lambda batch: batch)
        assert not isinstance(iter(loader), Prefetched)
