"""``dgl.graphbolt`` over our operators, where its library is missing."""

from __future__ import annotations

import io
import os
import pickle
import signal
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fastgraph.dgl
from fastgraph.dgl import graphbolt_randomness
from tests import forks
from tests.dgl.graphs import dgl, graph
from tests.graphs import random_edges
from tests.sampling.test_layers import chi_square, limit

if fastgraph.dgl.why_incomplete() is None:
    pytest.skip("this DGL has no GraphBolt, or its library", allow_module_level=True)
if (reason := fastgraph.dgl.why_no_graphbolt()) is not None:
    pytest.skip(reason, allow_module_level=True)

import dgl.graphbolt as gb

TYPES = {"a": 0, "b": 1}
RELATIONS = {"a:to:a": 0, "a:to:b": 1, "b:never:b": 2, "b:of:a": 3}  # as DGL numbers them


def homogeneous(weights: bool = False) -> Any:
    made = graph(random_edges(200, 200, 3000), 200)
    if weights:
        made.edata["w"] = torch.randint(0, 3, (3000,)).float()
        made.edata["mask"] = torch.rand(3000) < 0.5
    return gb.from_dglgraph(made, is_homogeneous=True, include_original_edge_id=True)


def heterogeneous() -> tuple[Any, Any]:
    ends = {
        ("a", "to", "a"): random_edges(30, 30, 300),
        ("a", "to", "b"): random_edges(30, 20, 200),
        ("b", "of", "a"): random_edges(20, 30, 100),
        ("b", "never", "b"): torch.empty(2, 0, dtype=torch.int64),
    }
    made = dgl.heterograph({k: tuple(v) for k, v in ends.items()}, {"a": 30, "b": 20})
    return made, gb.from_dglgraph(made, include_original_edge_id=True)


@pytest.mark.parametrize("method", ["sample_neighbors", "sample_layer_neighbors"])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("probs", [None, "w", "mask"])
def test_edges_of_one_layer(method: str, replace: bool, probs: str | None) -> None:
    sampled_from = homogeneous(weights=True)
    edge_attributes = sampled_from.edge_attributes
    nodes = torch.tensor([3, 199, 0, 3])
    for fanout in (0, 4, -1):
        fanouts = torch.tensor([fanout])
        sample = getattr(sampled_from, method)(nodes, fanouts, replace, probs)
        indptr = sample.sampled_csc.indptr.tolist()
        place = {int(e): i for i, e in enumerate(edge_attributes[gb.ORIGINAL_EDGE_ID])}
        for i, node in enumerate(nodes.tolist()):
            begin, end = (int(x) for x in sampled_from.csc_indptr[node : node + 2])
            may = set(range(begin, end))
            if probs is not None:
                may = {e for e in may if edge_attributes[probs][e] > 0}
            at = slice(indptr[i], indptr[i + 1])
            drawn = [place[int(e)] for e in sample.original_edge_ids[at]]
            assert set(drawn) <= may
            assert sampled_from.indices[drawn].tolist() == sample.sampled_csc.indices[at].tolist()
            if fanout < 0:
                assert sorted(drawn) == sorted(may)
            elif replace:
                assert len(drawn) == (fanout if may else 0)
            else:
                assert len(set(drawn)) == len(drawn) == min(fanout, len(may))


@pytest.mark.parametrize("method", ["sample_neighbors", "sample_layer_neighbors"])
@pytest.mark.parametrize("fanouts", [[3], [2, -1, 1, 5]])
def test_types_of_edges(method: str, fanouts: list[int]) -> None:
    original, sampled_from = heterogeneous()
    nodes = {"b": torch.tensor([0, 7, 19]), "a": torch.tensor([5, 29])}
    sample = getattr(sampled_from, method)(nodes, torch.tensor(fanouts))
    totals = {key: torch.zeros(len(value)) for key, value in nodes.items()}
    for name, columns in sample.sampled_csc.items():
        relation = tuple(name.split(":"))
        seeds = nodes[relation[2]]
        counts = columns.indptr.diff()
        edges = sample.original_edge_ids[name]
        src, dst = original.find_edges(edges, etype=relation)
        assert torch.equal(src, columns.indices)
        assert torch.equal(dst, seeds.repeat_interleave(counts))
        totals[relation[2]] += counts
        if len(fanouts) > 1:
            most = fanouts[RELATIONS[name]]
            degrees = original.in_degrees(seeds, etype=relation)
            assert torch.equal(counts, degrees if most < 0 else degrees.clamp(max=most))
    if len(fanouts) == 1:
        for key, total in totals.items():
            degrees: Any = sum(
                original.in_degrees(nodes[key], etype=tuple(name.split(":")))
                for name in RELATIONS
                if name.endswith(f":{key}")
            )
            assert torch.equal(total, degrees.clamp(max=3).float())


def test_inclusion_is_uniform() -> None:
    sampled_from = gb.fused_csc_sampling_graph(torch.tensor([0, 40]), torch.arange(40) % 1)
    counts = torch.zeros(40, dtype=torch.float64)
    sampled_from.edge_attributes = {gb.ORIGINAL_EDGE_ID: torch.arange(40)}
    for _ in range(3000):
        sample = sampled_from.sample_neighbors(torch.tensor([0]), torch.tensor([4]))
        counts[sample.original_edge_ids] += 1
    assert chi_square(counts, torch.full_like(counts, 300.0)) < limit(39)


def test_only_what_is_earlier() -> None:
    sampled_from = homogeneous()
    times, edge_times = torch.randint(0, 5, (200,)), torch.randint(0, 5, (3000,))
    sampled_from.node_attributes = {"t": times}
    sampled_from.edge_attributes = sampled_from.edge_attributes | {"s": edge_times}
    nodes, until = torch.arange(200), torch.full((200,), 3)
    sample = sampled_from.temporal_sample_neighbors(
        *(nodes, until, torch.tensor([-1])),
        node_timestamp_attr_name="t",
        edge_timestamp_attr_name="s",
    )
    good = (times[sampled_from.indices] < 3) & (edge_times < 3)
    expected = sampled_from.edge_attributes[gb.ORIGINAL_EDGE_ID][good]
    assert torch.equal(sample.original_edge_ids, expected)
    few = sampled_from.temporal_sample_neighbors(
        *(nodes, until, torch.tensor([1])), node_timestamp_attr_name="t"
    )
    assert (times[few.sampled_csc.indices] < 3).all()
    assert int(few.sampled_csc.indptr.diff().max()) == 1


def test_all_edges_of_nodes() -> None:
    original, sampled_from = heterogeneous()
    nodes = {"a": torch.tensor([4, 1]), "b": torch.tensor([9])}
    for name, columns in sampled_from.in_subgraph(nodes).sampled_csc.items():
        relation = tuple(name.split(":"))
        seeds = nodes[relation[2]]
        src, dst = original.in_edges(seeds, etype=relation)
        assert sorted(zip(src.tolist(), dst.tolist(), strict=True)) == sorted(
            zip(
                columns.indices.tolist(),
                seeds.repeat_interleave(columns.indptr.diff()).tolist(),
                strict=True,
            )
        )


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16], ids=str)
def test_positions_among_distinct_nodes(dtype: torch.dtype) -> None:
    given = [torch.tensor(x, dtype=dtype) for x in ([7, 2, 7, 9], [9, 2], [4, 2])]
    src, dst, first = given
    unique, at_src, at_dst = torch.ops.graphbolt.unique_and_compact(src, dst, first)
    assert unique.tolist() == [4, 2, 7, 9]
    assert torch.equal(unique[at_src.long()], src) and torch.equal(unique[at_dst.long()], dst)
    assert unique.dtype == at_src.dtype == dtype
    with pytest.raises(RuntimeError, match="Id not found: 5"):
        torch.ops.graphbolt.unique_and_compact(src, dst.new_tensor([5]), first)
    # Destinations that come twice keep both places.
    unique, at_src, _ = torch.ops.graphbolt.unique_and_compact(src, dst[:0], src[[1, 1, 0]])
    assert unique.tolist() == [2, 2, 7, 9]
    assert torch.equal(unique[at_src.long()], src)
    unique, lists = gb.unique_and_compact([src, dst])
    assert unique.tolist() == [7, 2, 9] and [x.tolist() for x in lists] == [[0, 1, 0, 2], [2, 1]]


def test_operators_on_tensors() -> None:
    assert gb.isin(torch.arange(4), torch.tensor([2, 3])).tolist() == [False, False, True, True]
    indptr = torch.tensor([0, 2, 2, 3])
    assert gb.expand_indptr(indptr, dtype=torch.int32).tolist() == [0, 0, 2]
    assert gb.expand_indptr(indptr, node_ids=torch.tensor([5, 6, 7])).tolist() == [5, 5, 7]
    rows = torch.arange(6).view(3, 2)
    assert torch.equal(gb.index_select(rows, torch.tensor([2, 0, -1])), rows[[2, 0, 2]])
    select = torch.ops.graphbolt.index_select_csc
    starts, values = select(indptr, torch.tensor([8, 9, 7]), torch.tensor([2, 0]), None)
    assert starts.tolist() == [0, 1, 3] and values.tolist() == [7, 8, 9]
    with pytest.raises(RuntimeError, match="noninteger"):
        select(indptr, torch.ones(3), torch.tensor([0]), None)


def loader(sampled_from: Any, workers: int, layer: bool, negatives: bool) -> Any:
    features = gb.BasicFeatureStore(
        {("node", None, "x"): gb.TorchBasedFeature(torch.arange(200.0)[:, None])}
    )
    if negatives:
        items = gb.ItemSet(torch.arange(200).view(-1, 2), names="node_pairs")
    else:
        items = gb.ItemSet((torch.arange(200), torch.arange(200) % 3), ("seed_nodes", "labels"))
    pipe = gb.ItemSampler(items, batch_size=30)
    if negatives:
        pipe = pipe.sample_uniform_negative(sampled_from, 2)
    sample = pipe.sample_layer_neighbor if layer else pipe.sample_neighbor
    pipe = sample(sampled_from, [4, 3])
    if negatives:
        pipe = pipe.transform(partial(gb.exclude_seed_edges, include_reverse_edges=False))
    pipe = pipe.fetch_feature(features, node_feature_keys=["x"])
    return gb.DataLoader(pipe, num_workers=workers, persistent_workers=workers == 3)


def as_lists(batches: Iterable[Any]) -> list[Any]:
    """All batches, by their first item: with workers they come in another order."""
    made = []
    for batch in batches:
        assert torch.equal(batch.node_features["x"][:, 0].long(), batch.input_nodes)
        seeds = batch.seed_nodes if batch.node_pairs is None else batch.node_pairs[0]
        made.append((seeds.tolist(), batch.input_nodes.tolist()))
    return sorted(made)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("layer", "negatives"), [(False, True), (True, False)])
def test_batches_are_the_same_for_any_number_of_workers_and_threads(
    layer: bool, negatives: bool
) -> None:
    sampled_from = homogeneous()
    results = []
    for workers, threads in ((0, 1), (0, 4), (1, 1), (3, 2)):
        batches = loader(sampled_from, workers, layer, negatives)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            torch.manual_seed(3)
            epochs = [as_lists(batches) for _ in range(2)]
        finally:
            torch.set_num_threads(before)
        assert epochs[0] != epochs[1]
        results.append(epochs)
    assert all(result == results[0] for result in results[1:])
    assert len(results[0][0]) == (4 if negatives else 7)


SPAWNED = """\
import os
from functools import partial

import dgl
import dgl.graphbolt as gb
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def drawn(graph, features, sampler, workers):
    items = gb.ItemSet(torch.arange(40), names="seed_nodes")
    batches = sampler(items, batch_size=10).sample_neighbor(graph, [4, 3])
    batches = batches.fetch_feature(features, node_feature_keys=["x"])
    torch.manual_seed(3)
    found = []
    for batch in gb.DataLoader(batches, num_workers=workers):
        assert torch.equal(batch.node_features["x"][:, 0].long(), 2 * batch.input_nodes)
        found.append((batch.seed_nodes.tolist(), batch.input_nodes.tolist()))
    return sorted(found)


def work(rank, store, graph, features):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found = drawn(graph, features, partial(gb.DistributedItemSampler, drop_last=False), 0)
    everywhere = [None, None]
    dist.all_gather_object(everywhere, found)
    seeds = [seed for each in everywhere for seeds, _ in each for seed in seeds]
    assert sorted(seeds) == list(range(40)), seeds
    dist.destroy_process_group()


if __name__ == "__main__":
    whole = dgl.graph(tuple(torch.randint(60, (2, 900))), num_nodes=60)
    graph = gb.from_dglgraph(whole, is_homogeneous=True)
    feature = gb.TorchBasedFeature(2.0 * torch.arange(60).view(60, 1))
    features = gb.BasicFeatureStore({("node", None, "x"): feature})
    here = drawn(graph, features, gb.ItemSampler, 0)
    mp.set_start_method("spawn")
    assert drawn(graph, features, gb.ItemSampler, 1) == here
    mp.spawn(work, args=(os.path.abspath("store"), graph, features), nprocs=2)
    print("the same")
"""


def test_processes_that_are_spawned(tmp_path: Path) -> None:
    """They get graphs and features, as in DGL's example with several processes."""
    (tmp_path / "program.py").write_text(SPAWNED)
    made = forks.fastgraph("program.py", cwd=tmp_path)
    assert made.stdout == "the same\n", made.stderr


def _killed(batch: Any) -> Any:
    assert torch.utils.data.get_worker_info() is not None
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.filterwarnings("ignore")
def test_a_killed_worker_is_an_error() -> None:
    items = gb.ItemSet(torch.arange(60), names="seed_nodes")
    batches = gb.ItemSampler(items, batch_size=30).sample_neighbor(homogeneous(), [2])
    batches = batches.transform(_killed).fetch_feature(gb.BasicFeatureStore({}))
    with pytest.raises(RuntimeError, match=r"DataLoader worker .*(killed|exited)"):
        list(gb.DataLoader(batches, num_workers=1))


def test_training_draws_as_if_there_were_no_samples() -> None:
    sampled_from = homogeneous()

    def drawn(workers: int) -> list[Tensor]:
        torch.manual_seed(1)
        return [torch.rand(2) for _ in loader(sampled_from, workers, False, True)]

    numbers = drawn(0)
    assert len(torch.cat(numbers).unique()) == 2 * len(numbers)
    assert all(torch.equal(a, b) for a, b in zip(numbers, drawn(0), strict=True))


def test_a_seed_of_graphbolts_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphbolt_randomness, "_SEEDED", [])
    sampled_from = gb.fused_csc_sampling_graph(torch.tensor([0, 1000]), torch.arange(1000))

    def draw() -> list[int]:
        sample = sampled_from.sample_neighbors(torch.tensor([0]), torch.tensor([5]))
        found: list[int] = sample.sampled_csc.indices.tolist()
        return found

    gb.seed(4)
    first = [draw(), draw()]
    assert first[0] != first[1]
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    gb.seed(4)
    assert [draw(), draw()] == first
    assert torch.equal(torch.rand(1), expected)  # torch's own numbers are left alone
    whole = homogeneous()
    epochs = []
    for seed in (4, 4, 5):
        gb.seed(seed)
        epochs.append(as_lists(loader(whole, 0, False, False)))
    assert epochs[0] == epochs[1] != epochs[2]


@pytest.mark.filterwarnings("ignore")
def test_a_model_on_its_blocks() -> None:
    """Messages along sampled blocks are those along the edges that they name."""
    sampled_from = homogeneous()
    for batch in loader(sampled_from, 0, False, False):
        block = batch.blocks[-1]
        subgraph = batch.sampled_subgraphs[-1]
        x = torch.randn(block.num_src_nodes(), 3, dtype=torch.float64)
        src = subgraph.sampled_csc.indices
        dst = torch.arange(block.num_dst_nodes()).repeat_interleave(
            subgraph.sampled_csc.indptr.diff()
        )
        expected = torch.zeros(block.num_dst_nodes(), 3, dtype=torch.float64)
        expected.index_add_(0, dst, x[src])
        torch.testing.assert_close(dgl.ops.copy_u_sum(block, x), expected)
        assert torch.equal(batch.labels, batch.seed_nodes % 3)


def test_pickles_and_files() -> None:
    _, sampled_from = heterogeneous()
    buffer = io.BytesIO()
    torch.save(sampled_from, buffer)
    buffer.seek(0)
    for copy in (pickle.loads(pickle.dumps(sampled_from)), torch.load(buffer)):
        assert torch.equal(copy.csc_indptr, sampled_from.csc_indptr)
        assert torch.equal(copy.type_per_edge, sampled_from.type_per_edge)
        assert copy.edge_type_to_id == sampled_from.edge_type_to_id == RELATIONS
        assert copy.num_nodes == {"a": 30, "b": 20}


@pytest.mark.filterwarnings("ignore")
def test_a_dataset_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("edges", "data", "set"):
        (tmp_path / folder).mkdir()
    np.save(tmp_path / "edges/e.npy", random_edges(50, 50, 400).numpy())
    np.save(tmp_path / "data/x.npy", np.arange(100, dtype=np.float32).reshape(50, 2))
    np.save(tmp_path / "set/ids.npy", np.arange(20))
    (tmp_path / "metadata.yaml").write_text(
        """\
dataset_name: one
graph: {nodes: [{num: 50}], edges: [{format: numpy, path: edges/e.npy}]}
feature_data: [{domain: node, name: x, format: numpy, path: data/x.npy}]
tasks:
  - name: nodes
    train_set: [{data: [{name: seed_nodes, format: numpy, path: set/ids.npy}]}]
"""
    )
    for _ in range(2):  # the second time from the files that the first has written
        dataset = gb.OnDiskDataset(str(tmp_path)).load()
        assert dataset.graph.total_num_edges == 400
        pipe = gb.ItemSampler(dataset.tasks[0].train_set, batch_size=8)
        pipe = pipe.sample_neighbor(dataset.graph, [3])
        batches = list(pipe.fetch_feature(dataset.feature, node_feature_keys=["x"]))
        assert [len(batch.seed_nodes) for batch in batches] == [8, 8, 4]
        for batch in batches:
            assert torch.equal(batch.node_features["x"][:, 0].long(), 2 * batch.input_nodes)


INDPTR, INDICES = torch.tensor([0, 2, 3]), torch.tensor([1, 0, 0])


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda g: g.sample_neighbors(torch.tensor([2]), torch.tensor([1])), RuntimeError, "range"),
        (
            lambda g: g.sample_neighbors(torch.tensor([-1]), torch.tensor([1])),
            RuntimeError,
            "range",
        ),
        (lambda g: g.in_subgraph(torch.tensor([2])), RuntimeError, "range of the graph's node IDs"),
        (
            lambda g: g.sample_neighbors(torch.tensor([0], dtype=torch.int32), torch.tensor([1])),
            AssertionError,
            "must be consistent with indices.dtype",
        ),
        (
            lambda g: g.sample_neighbors(torch.tensor([0]), torch.tensor([-2])),
            AssertionError,
            "Fanouts should consist of values",
        ),
        (
            lambda g: g.sample_neighbors(torch.tensor([0, 1]), torch.tensor([1, 1])),
            AssertionError,
            "Fanouts should have the same number",
        ),
        (lambda g: g.copy_to_shared_memory("x"), ImportError, "no GraphBolt library for torch"),
        (lambda g: gb.load_from_shared_memory("x"), ImportError, "no GraphBolt library"),
        (
            lambda g: torch.ops.graphbolt.gpu_cache([1], 2),
            ImportError,
            "gpu_cache cannot",
        ),
        (
            lambda g: gb.fused_csc_sampling_graph(INDPTR[None], INDICES),
            RuntimeError,
            "csc_indptr must be 1-D",
        ),
        (
            lambda g: gb.fused_csc_sampling_graph(
                INDPTR, INDICES, edge_attributes={"w": torch.ones(2)}
            ),
            RuntimeError,
            r"edge_attribute.size\(0\) was 2, and num_edges was 3",
        ),
    ],
)
def test_what_is_refused(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call(gb.fused_csc_sampling_graph(INDPTR, INDICES))


def test_a_type_without_a_fanout() -> None:
    sampled_from = gb.fused_csc_sampling_graph(
        *(INDPTR, INDICES, torch.tensor([0, 1, 2]), torch.tensor([0, 5, 1])),
        *(TYPES, RELATIONS),
    )
    nodes = {"a": torch.tensor([0]), "b": torch.tensor([0])}
    with pytest.raises(RuntimeError, match="Etype values exceed the number of fanouts"):
        sampled_from.sample_neighbors(nodes, torch.tensor([1, 1, 1, 1]))


def test_its_import_says_nothing(tmp_path: Path) -> None:
    code = "import fastgraph.dgl; fastgraph.dgl.fix_import(); import dgl.graphbolt"
    made = forks.python("-c", code, cwd=tmp_path)
    assert (made.returncode, made.stdout, made.stderr) == (0, "", "")
