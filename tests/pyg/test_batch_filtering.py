"""Attributes of a batch's edges, and their numbers, beside those that upstream finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader, NodeLoader

from tests.pyg.mini_batches import WITHOUT_SAMPLER, graph, hetero

pytestmark = [WITHOUT_SAMPLER, pytest.mark.usefixtures("sampling_enabled")]


def with_attributes() -> Any:
    data = hetero()
    for kind in data.edge_types:
        data[kind].edge_attr = torch.arange(150.0)
    return data


def in_order() -> Any:
    data = graph()
    data.edge_index = data.edge_index[:, data.edge_index[1].argsort()]
    return data


MAKERS: dict[str, Any] = {
    "nodes": lambda: NeighborLoader(graph(), [3, 2], batch_size=7),
    "types": lambda: NeighborLoader(with_attributes(), [3, 2], input_nodes="paper"),
    "sorted": lambda: NeighborLoader(in_order(), [3, 2], batch_size=7, is_sorted=True),
    "links": lambda: LinkNeighborLoader(
        graph(), [3, 2], edge_label_index=graph().edge_index, batch_size=64
    ),
    "workers": lambda: NeighborLoader(graph(), [3, 2], batch_size=30, num_workers=1),
    "later": lambda: NeighborLoader(graph(), [3, 2], batch_size=30, filter_per_worker=False),
    "ours to see": lambda: NeighborLoader(
        graph(), [3, 2], batch_size=30, transform_sampler_output=lambda out: out
    ),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_batches_are_those_of_upstream(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def batches() -> list[Any]:
        torch.manual_seed(0)
        return [
            {key: v.tolist() if isinstance(v, Tensor) else v for key, v in store.items()}
            for batch in make()
            for store in batch.stores
        ]

    found = batches()
    assert any("e_id" in store for store in found)
    for kind in (NodeLoader, LinkNeighborLoader.__mro__[1]):
        monkeypatch.setattr(kind, "filter_fn", kind.filter_fn.__wrapped__)
    assert found == batches()


def test_who_looks_at_a_sample_sees_places_of_the_sampler() -> None:
    seen: list[Any] = []

    def see(out: Any) -> Any:
        seen.append(out.edge.clone())
        return out

    loader = NeighborLoader(graph(), [3], batch_size=60, transform_sampler_output=see)
    (batch,) = loader
    assert torch.equal(loader.node_sampler.edge_permutation[seen[0]], batch.e_id)
