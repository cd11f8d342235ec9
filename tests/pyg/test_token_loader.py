"""Loaders of tokens, of graphs in memory and of files, beside indexing by torch."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import NeighborLoader

import fastgraph
from fastgraph import ops
from fastgraph.pyg.local_tokens import LocalTokens
from fastgraph.pyg.token_loader import TokenLoader
from fastgraph.tokens import HopFeatures, TokenStore, local_nodes, write_context, write_tokens

N, K, D = 90, 6, 5


def graph() -> Data:
    generator = torch.Generator().manual_seed(5)
    edge_index = torch.randint(0, N - 3, (2, 500), generator=generator)  # three are isolated
    return Data(
        x=torch.randn(N, D, generator=generator),
        y=torch.arange(N) % 7,
        edge_index=edge_index,
        edge_attr=torch.randn(500),
        train_mask=torch.arange(N) % 3 == 0,
        pos=torch.randn(N, 2, generator=generator),
        name="a graph",
    )


def expected_tokens(data: Data, nodes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Algorithm 2, line by line."""
    sampled = local_nodes(data.edge_index, K, seed=3, num_nodes=N)
    h = data.x.to(dtype)
    c0 = ops.gcn(h, data.edge_index)
    c1 = ops.gcn(c0, data.edge_index)
    out = torch.empty(len(nodes), 3 * K, D, dtype=dtype)
    for i, node in enumerate(nodes.tolist()):
        for j, local in enumerate(sampled[node].tolist()):
            out[i, 3 * j] = h[local]
            out[i, 3 * j + 1] = c0[local]
            out[i, 3 * j + 2] = c1[local]
    return out


@pytest.fixture
def transformed() -> Data:
    return LocalTokens(K, seed=3)(graph())


@pytest.fixture
def files(tmp_path: Path) -> tuple[TokenStore, dict[str, Any]]:
    """Local nodes of a few nodes, and mapped features and labels."""
    data = graph()
    order = data.edge_index[1].argsort(stable=True)
    ptr = torch.zeros(N + 1, dtype=torch.int64)
    ptr[1:] = torch.bincount(data.edge_index[1], minlength=N).cumsum(0)
    lists = ptr, data.edge_index[0][order]
    write_tokens(lists, tmp_path / "tokens", K, seed=3, nodes=torch.arange(0, N, 2))
    np.save(tmp_path / "y.npy", data.y.numpy())
    options = {
        "features": write_context(lists, data.x, tmp_path / "context"),
        "attributes": {"y": np.load(tmp_path / "y.npy", mmap_mode="c"), "pos": data.pos},
    }
    return TokenStore(tmp_path / "tokens"), options


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_tokens_are_those_of_algorithm_2(dtype: torch.dtype | None) -> None:
    data = LocalTokens(K, seed=3, dtype=dtype)(graph())
    loader = TokenLoader(data, input_nodes=data.train_mask, batch_size=13)
    nodes = data.train_mask.nonzero().squeeze(1)
    expected = expected_tokens(data, nodes, dtype or torch.float32)
    batches = list(loader)
    assert len(batches) == len(loader) == 3
    assert torch.equal(torch.cat([batch.tokens for batch in batches]), expected)
    assert [batch.batch_size for batch in batches] == [13, 13, 4]
    for batch in batches:
        assert torch.equal(batch.tokens[:, 0], batch.x.to(batch.tokens.dtype))


def test_batches_are_those_of_node_loaders(transformed: Data) -> None:
    """But for edges: all that a ``NeighborLoader`` of no hops says of its nodes."""
    ids = torch.tensor([5, 3, 88, 3, 40])
    for nodes in (ids, transformed.train_mask, None):
        ours = TokenLoader(transformed, input_nodes=nodes, batch_size=4)
        with fastgraph.enabled():
            theirs = list(NeighborLoader(graph(), [0], input_nodes=nodes, batch_size=4))
        for own, other in zip(ours, theirs, strict=True):
            assert own.batch_size == other.batch_size
            assert torch.equal(own.input_id, other.input_id)
            if own.num_nodes == other.num_nodes:  # NeighborLoader lists a node once
                for key in ("x", "y", "n_id", "train_mask"):
                    assert torch.equal(own[key], other[key]), key
            assert own.num_nodes == own.batch_size
            assert own.name == "a graph"
            for gone in ("edge_index", "edge_attr", "local_nodes", "hop_features"):
                assert gone not in own


def test_files_give_what_memory_does(files: tuple[TokenStore, dict[str, Any]]) -> None:
    store, options = files
    loader = TokenLoader(store, batch_size=7, **options)  # all that have local nodes
    found = list(loader)
    nodes = torch.cat([batch.n_id for batch in found])
    assert torch.equal(nodes, torch.arange(0, N, 2))
    expected = expected_tokens(graph(), nodes, torch.bfloat16)
    assert torch.equal(torch.cat([batch.tokens for batch in found]), expected)
    assert torch.equal(torch.cat([batch.x for batch in found]), expected[:, 0])
    assert torch.equal(torch.cat([torch.as_tensor(b.y) for b in found]), graph().y[nodes])
    assert torch.equal(torch.cat([batch.pos for batch in found]), graph().pos[nodes])


@pytest.mark.parametrize("cache", [None, "1KiB"])
def test_files_larger_than_memory(
    files: tuple[TokenStore, dict[str, Any]], cache: str | None
) -> None:
    store, options = files
    assert not options["features"].is_elsewhere
    plain = list(TokenLoader(store, batch_size=20, **options))
    options["features"] = HopFeatures(options["features"].folder, is_elsewhere=True)
    assert pickle.loads(pickle.dumps(options["features"])).is_elsewhere
    for one, other in zip(
        plain, TokenLoader(store, batch_size=20, cache=cache, **options), strict=True
    ):
        assert torch.equal(one.tokens, other.tokens)


@pytest.mark.parametrize("cache", [None, "1KiB", "1MiB"])
def test_workers_and_caches_change_no_bit(
    files: tuple[TokenStore, dict[str, Any]], cache: str | None
) -> None:
    store, options = files
    plain = list(TokenLoader(store, batch_size=20, **options))
    loader = TokenLoader(store, batch_size=20, num_workers=2, cache=cache, **options)
    for one, other in zip(plain, loader, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.n_id, other.n_id)
    info = loader.cache_info()
    assert info.reads == K * len(range(0, N, 2))  # those of workers are counted
    if cache is None:
        assert info == (0, info.reads, 0, 0)
    elif cache == "1KiB":
        assert 0 < info.hits < info.reads
        assert info.nbytes <= 1024
        sampled = store.lookup(torch.arange(0, N, 2)).flatten().long()
        most = torch.bincount(sampled).sort(descending=True).values[: info.rows]
        assert info.hits == int(most.sum())  # none were better
    else:
        assert info.hits == info.reads


def test_spawned_workers(files: tuple[TokenStore, dict[str, Any]]) -> None:
    """The loader is pickled: what is mapped goes as its path."""
    store, options = files
    loader = TokenLoader(store, batch_size=45, cache="1KiB", **options)
    assert len(pickle.dumps(loader.features)) < 1000
    again = pickle.loads(pickle.dumps(loader.local))
    nodes = torch.tensor([4, 2])
    assert torch.equal(again.lookup(nodes), store.lookup(nodes))


def test_usual_options(transformed: Data) -> None:
    order = [7, 1, 5]

    def transform(batch: Data) -> tuple[int, tuple[int, ...]]:
        return batch.batch_size, tuple(batch.tokens.shape)

    loader = TokenLoader(
        transformed, torch.arange(10, 20), batch_size=2, sampler=order, transform=transform
    )
    assert list(loader) == [(2, (2, 3 * K, D)), (1, (1, 3 * K, D))]  # a last batch of one
    loader = TokenLoader(transformed, torch.arange(10, 20), batch_size=2, sampler=order)
    assert torch.cat([batch.n_id for batch in loader]).tolist() == [17, 11, 15]
    assert loader([0, 9]).n_id.tolist() == [10, 19]
    torch.manual_seed(0)
    shuffled = TokenLoader(transformed, batch_size=32, shuffle=True, drop_last=True)
    seen = torch.cat([batch.n_id for batch in shuffled])
    assert len(seen) == 64
    assert len(seen.unique()) == 64
    assert seen.tolist() != sorted(seen.tolist())
    for kind in ([3, 4], np.array([3, 4]), torch.tensor([3, 4], dtype=torch.int32)):
        assert next(iter(TokenLoader(transformed, kind, batch_size=9))).n_id.tolist() == [3, 4]


def test_batches_do_not_share_memory(transformed: Data) -> None:
    kept = [batch.tokens for batch in TokenLoader(transformed, batch_size=45)]
    expected = expected_tokens(graph(), torch.arange(N))
    assert torch.equal(torch.cat(kept), expected)


def test_hops_and_one_local_node() -> None:
    for hops, k in ((0, 4), (1, 1), (3, 2)):
        data = LocalTokens(k, hops=hops)(graph())
        assert data.hop_features.shape == (N, hops + 1, D)
        batch = next(iter(TokenLoader(data, batch_size=8)))
        assert batch.tokens.shape == (8, k * (hops + 1), D)
        assert torch.equal(batch.tokens[:, : hops + 1], data.hop_features[:8])


def test_transform_of_a_graph() -> None:
    data = graph()
    made = LocalTokens(K, seed=3)(data)
    assert "local_nodes" not in data  # PyG copies what it transforms
    assert torch.equal(made.local_nodes, local_nodes(data.edge_index, K, seed=3, num_nodes=N))
    assert torch.equal(made.edge_index, data.edge_index)
    other = LocalTokens(K, seed=4)(data)
    assert not torch.equal(other.local_nodes, made.local_nodes)
    assert repr(LocalTokens(K, seed=3)) == "LocalTokens(k=6, hops=2, seed=3)"
    data.x[3, 2] = torch.nan
    with pytest.warns(UserWarning, match="holds 1 NaN"):
        found = LocalTokens(K)(data)
    assert bool(found.hop_features.isnan().any())
    for field, value in (
        ("edge_index", None),
        ("x", None),
        ("x", torch.randn(N)),
        ("x", data.x[1:]),
    ):
        wrong = graph()
        wrong.num_nodes = N
        wrong[field] = value
        with pytest.raises(ValueError, match=f"data.*{field}"):
            LocalTokens(K)(wrong)
    with pytest.raises(ValueError, match="hops must be an int of at least 0"):
        LocalTokens(K, hops=-1)


def input_nodes_that_are_refused() -> Iterator[tuple[Any, type[Exception], str]]:
    for none in ([], torch.zeros(N, dtype=torch.bool), torch.empty(0, dtype=torch.int64)):
        yield none, ValueError, "input_nodes must hold at least one node"
    yield torch.ones(N - 1, dtype=torch.bool), ValueError, r"a mask of shape \[90\], got \[89\]"
    yield torch.tensor([1.0]), TypeError, "input_nodes must be integers or a mask, got torch.float"
    for other in ("nodes", {1, 2}, ("paper", None), slice(3)):
        yield (
            other,
            TypeError,
            f"input_nodes must be integers or a mask, got {type(other).__name__}",
        )
    yield torch.tensor([[1]]), ValueError, "input_nodes must have one dimension"
    yield torch.tensor([0, N]), IndexError, "input_nodes holds 90, expected 0 <= node < 90"
    yield torch.tensor([-1, 0]), IndexError, "input_nodes holds -1"


def test_wrong_input_nodes_are_named(
    transformed: Data, files: tuple[TokenStore, dict[str, Any]]
) -> None:
    store, options = files
    for nodes, error, message in input_nodes_that_are_refused():
        with pytest.raises(error, match=message):
            TokenLoader(transformed, nodes)
        with pytest.raises(error, match=message):
            TokenLoader(store, nodes, **options)
    with pytest.raises(ValueError, match="input_nodes holds 7, which has no local nodes"):
        TokenLoader(store, torch.tensor([4, 7, 9]), **options)


def test_wrong_features_are_named(
    transformed: Data, files: tuple[TokenStore, dict[str, Any]]
) -> None:
    store, options = files
    rows = options["features"].rows
    for wrong in (None, rows[1:], rows[:, 0], "features", rows.transpose(0, 1)):
        with pytest.raises(ValueError, match="features must be HopFeatures or a tensor"):
            TokenLoader(store, features=wrong)
    with pytest.raises(ValueError, match="features must be contiguous"):
        TokenLoader(store, features=rows.transpose(1, 2))
    for value in (torch.zeros(N - 1), "y", None):
        with pytest.raises(ValueError, match=r"attributes\['y'\] must be a tensor or an array"):
            TokenLoader(store, features=rows, attributes={"y": value})
    for name in ("tokens", "n_id", "num_nodes", "edge_attr", "adj_t", 1):
        with pytest.raises(ValueError, match=f"attributes must be of nodes, .* got {name!r}"):
            TokenLoader(store, features=rows, attributes={name: torch.zeros(N)})
    with pytest.raises(ValueError, match="features and attributes must be those of data"):
        TokenLoader(transformed, features=rows)
    with pytest.raises(ValueError, match="data must have local_nodes and hop_features"):
        TokenLoader(graph())
    local = transformed.local_nodes
    for wrong in (local.long(), local[1:], local[:, :0], local[0], "rows"):
        transformed.local_nodes = wrong
        with pytest.raises(ValueError, match=r"local_nodes must be int32 \[90, k\]"):
            TokenLoader(transformed)
    for other in (HeteroData(), {"local_nodes": local}, None):
        with pytest.raises(TypeError, match="data must be a Data that LocalTokens"):
            TokenLoader(other)
    with pytest.raises(ValueError, match="cache must be as"):
        TokenLoader(store, features=rows, cache="1GB")


def test_local_nodes_that_are_none_are_errors(transformed: Data) -> None:
    transformed.local_nodes[4, 2] = N
    with pytest.raises(IndexError, match="nodes holds 90, expected 0 <= node < 90"):
        list(TokenLoader(transformed, batch_size=16))
    for wrong in (N, -1):
        transformed.local_nodes[4, 2] = wrong
        with pytest.raises(IndexError, match=f"local nodes hold {wrong}, expected 0 <= node < 90"):
            TokenLoader(transformed, cache="1MiB")


def test_stores_without_rows_have_no_input_nodes(
    tmp_path: Path, files: tuple[TokenStore, dict[str, Any]]
) -> None:
    write_tokens(graph().edge_index, tmp_path / "none", 3, nodes=torch.arange(0), num_nodes=N)
    store = TokenStore(tmp_path / "none")
    with pytest.raises(ValueError, match="input_nodes must hold at least one node"):
        TokenLoader(store, **files[1])
    with pytest.raises(ValueError, match="input_nodes holds 4, which has no local nodes"):
        TokenLoader(store, torch.tensor([4]), **files[1])


def test_a_cache_of_rows_without_channels(transformed: Data) -> None:
    transformed.hop_features = transformed.hop_features[:, :, :0].contiguous()
    loader = TokenLoader(transformed, batch_size=N, cache="1MiB")
    assert next(iter(loader)).tokens.shape[::2] == (N, 0)
    assert loader.cache_info().rows == 0


def test_dtypes_of_a_transform_are_named() -> None:
    for dtype in (torch.int32, "float32"):
        with pytest.raises(TypeError, match="dtype must be a floating-point dtype"):
            LocalTokens(3, dtype=dtype)  # type: ignore[arg-type]


def test_tokens_in_workers_of_another_loader(transformed: Data) -> None:
    loader = TokenLoader(transformed)
    others = DataLoader(
        [0, 1], num_workers=2, collate_fn=lambda ids: loader.tokens(torch.tensor(ids))
    )
    assert torch.equal(torch.cat(list(others)), loader.tokens(torch.arange(2)))
