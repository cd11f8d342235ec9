"""A valid call of each native sampler with random arguments, and a check of what it made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastgraph.sampling import HeteroNeighborSample
from tests.native.drawing import Draw, Library, Prepared, assert_equal
from tests.sampling.oracle import Call, Columns, check

TYPES = ("a", "b")


def columns(draw: Draw, num_src: int, num_dst: int, dtypes: tuple[torch.dtype, ...]) -> Columns:
    """Edges by destination, of which some have many."""
    degrees = draw.integers(0, draw.one_of(2, 5, 80), num_dst)
    if num_src == 0:
        degrees.zero_()
    colptr = torch.cat([degrees.new_zeros(1), degrees.cumsum(0)])
    row = draw.integers(0, max(num_src, 1), int(colptr[-1]))
    return Columns(colptr.to(dtypes[0]), row.to(dtypes[1]))


def sorted_times(draw: Draw, colptr: Tensor) -> Tensor:
    times = draw.integers(0, 6, int(colptr[-1]))
    parts = times.split(colptr.long().diff().tolist())
    return torch.cat([part.sort().values for part in parts]) if parts else times


def sample_neighbors(lib: Library, draw: Draw) -> Prepared:
    dtypes = draw.index_dtype(), draw.index_dtype()
    sizes = {kind: draw.number(1, draw.one_of(6, 200)) for kind in TYPES}
    relations = [
        ("a", "to", "a"),
        *([("a", "to", "b")] if draw.flag() else []),
        *([("b", "to", "a")] if draw.flag() else []),
    ]
    graph = {r: columns(draw, sizes[r[0]], sizes[r[2]], dtypes) for r in relations}
    hops = draw.number(0, 3)
    fanouts = {r: [draw.one_of(-1, 0, 1, 3, 10, 40) for _ in range(hops)] for r in relations}
    seed = {kind: draw.integers(0, sizes[kind], draw.number(0, 8)).to(dtypes[1]) for kind in TYPES}
    timed = draw.number(0, 2) == 0
    if timed:
        for one in graph.values():
            one.time = sorted_times(draw, one.colptr)
    for one in graph.values():
        if draw.number(0, 2) == 0:
            dtype = draw.one_of(torch.float32, torch.float64)
            one.weight = draw.integers(0, 3, int(one.colptr[-1])).to(dtype)
    call = Call(
        graph,
        seed,
        fanouts,
        seed_time={k: draw.integers(0, 7, len(nodes)) for k, nodes in seed.items()}
        if timed
        else {},
        replace=draw.flag(),
        directed=draw.flag(),
        disjoint=timed or draw.flag(),
        temporal_strategy=draw.one_of("uniform", "last"),
    )
    is_led_to = any(dst == "b" for _, _, dst in relations)
    place = {kind: number for number, kind in enumerate(TYPES)}
    arguments = {
        "colptr": [one.colptr for one in graph.values()],
        "row": [one.row for one in graph.values()],
        "src_type": torch.tensor([place[src] for src, _, _ in relations]),
        "dst_type": torch.tensor([place[dst] for _, _, dst in relations]),
        "num_nodes": torch.tensor(
            [sizes["a"], sizes["b"] if is_led_to else draw.one_of(-1, sizes["b"])]
        ),
        "seed": list(seed.values()),
        "fanouts": torch.tensor([fanouts[r] for r in relations], dtype=torch.int64)
        .t()
        .contiguous(),
        "node_time": [None, None],
        "edge_time": [one.time for one in graph.values()],
        "seed_time": [call.seed_time.get(kind) for kind in TYPES],
        "edge_weight": [one.weight for one in graph.values()],
        "replace": call.replace,
        "directed": call.directed,
        "disjoint": call.disjoint,
        "last": call.temporal_strategy == "last",
        "random_seed": draw.number(-(2**63), 2**63 - 1),
    }

    def check_made(made: Any) -> None:
        tensors = list(made)
        nodes, rest = tensors[:2], tensors[2:]
        size = len(relations)
        rows, cols, edges = (rest[i * size : (i + 1) * size] for i in range(3))
        batches = rest[3 * size : -2]
        node_counts = tensors[-2].view(2, hops + 1).tolist()
        edge_counts = tensors[-1].view(size, hops).tolist()
        sample = HeteroNeighborSample(
            dict(zip(relations, rows, strict=True)),
            dict(zip(relations, cols, strict=True)),
            dict(zip(TYPES, nodes, strict=True)),
            dict(zip(relations, edges, strict=True)),
            dict(zip(TYPES, batches, strict=True)) if call.disjoint else None,
            dict(zip(TYPES, node_counts, strict=True)),
            dict(zip(relations, edge_counts, strict=True)) if call.directed else None,
        )
        check(call, sample)

    return arguments, check_made


def random_walk(lib: Library, draw: Draw) -> Prepared:
    size = draw.number(1, draw.one_of(6, 300))
    graph = columns(draw, size, size, (draw.index_dtype(), draw.index_dtype()))
    length, walks = draw.number(0, 9), draw.number(0, draw.one_of(5, 200))
    seed = draw.integers(0, size, walks).to(graph.row.dtype)
    nodes = torch.full((walks, length + 1), -7, dtype=graph.row.dtype)
    edges = torch.full((walks, length), -7, dtype=graph.colptr.dtype)
    call = {
        "rowptr": graph.colptr,
        "col": graph.row,
        "seed": seed,
        "p": draw.one_of(1.0, 0.5, 1e9),
        "q": draw.one_of(1.0, 4.0, 1e-9),
        "random_seed": draw.number(-(2**63), 2**63 - 1),
        "nodes": nodes,
        "edges": draw.maybe(edges),
    }

    def check_walks(_: Any) -> None:
        assert_equal(nodes[:, 0], seed)
        before, after = nodes[:, :-1].long(), nodes[:, 1:]
        stays = graph.colptr.long().diff()[before] == 0
        assert_equal(after[stays], before[stays])
        if call["edges"] is not None:
            assert_equal(edges < 0, stays)
            taken = edges[~stays].long()
            assert_equal(graph.dst[taken], before[~stays])
            assert_equal(graph.row[taken], after[~stays])

    return call, check_walks


def draw_negatives(lib: Library, draw: Draw) -> Prepared:
    num_src, num_dst = draw.number(1, 12), draw.number(1, 12)
    graph = columns(draw, num_src, num_dst, (draw.index_dtype(), draw.index_dtype()))
    pairs = draw.number(0, 300)
    src, dst = (torch.full((pairs,), -7, dtype=graph.row.dtype) for _ in range(2))
    loops = draw.flag()
    call = {
        "colptr": graph.colptr,
        "row": graph.row,
        "num_src": num_src,
        "loops": loops,
        "random_seed": draw.number(0, 99),
        "src": src,
        "dst": dst,
    }

    def check_pairs(_: Any) -> None:
        edges = set(zip(graph.row.tolist(), graph.dst.tolist(), strict=True))
        for pair in zip(src.tolist(), dst.tolist(), strict=True):
            assert pair == (-1, -1) or pair not in edges
            assert pair == (-1, -1) or loops or pair[0] != pair[1]
            assert pair[0] < num_src
            assert pair[1] < num_dst

    return call, check_pairs


def unique_and_compact(lib: Library, draw: Draw) -> Prepared:
    dtype, largest = draw.index_dtype(), draw.one_of(5, 100, 2**23)
    ids = [
        draw.integers(0, largest, draw.number(0, 50)).to(dtype) for _ in range(draw.number(1, 3))
    ]

    def check_numbers(made: Any) -> None:
        unique, *positions = made
        assert unique.tolist() == list(dict.fromkeys(torch.cat(ids).tolist()))
        for given, found in zip(ids, positions, strict=True):
            assert_equal(unique[found.long()], given)

    return {"ids": ids}, check_numbers


def sample_layer(lib: Library, draw: Draw) -> Prepared:
    num_nodes, num_types = draw.number(1, draw.one_of(6, 200)), draw.number(1, 3)
    graph = columns(draw, num_nodes, num_nodes, (draw.index_dtype(), draw.index_dtype()))
    size = len(graph.row)
    types = (graph.dst * num_types + draw.integers(0, num_types, size)).sort().values % num_types
    weight = draw.integers(0, 3, size).to(draw.one_of(torch.float32, torch.float64))
    fanouts = torch.tensor([draw.one_of(-1, 0, 1, 3, 40) for _ in range(num_types)])
    seed = draw.integers(0, num_nodes, draw.number(0, 80)).to(graph.row.dtype)
    call = {
        "colptr": graph.colptr,
        "row": graph.row,
        "seed": seed,
        "fanouts": fanouts,
        "edge_type": types.to(draw.one_of(torch.uint8, torch.int64)) if num_types > 1 else None,
        "edge_weight": draw.maybe(weight),
        "replace": draw.flag(),
        "by_layer": draw.flag(),
        "ascending": draw.flag(),
        "random_seed": draw.number(-(2**63), 2**63 - 1),
    }

    def check_layer(made: Any) -> None:
        colptr, row, edge = made
        assert_equal(row, graph.row[edge.long()])
        assert_equal(graph.dst[edge.long()], seed.long().repeat_interleave(colptr.long().diff()))
        if call["edge_weight"] is not None:
            assert bool((weight[edge.long()] > 0).all())
        for kind, fanout in enumerate(fanouts.tolist()):
            drawn = graph.dst[edge.long()[types[edge.long()] == kind]]
            most = torch.bincount(seed.long(), minlength=num_nodes) * max(fanout, 0)
            assert fanout < 0 or bool((torch.bincount(drawn, minlength=num_nodes) <= most).all())

    return call, check_layer


def sample_local_nodes(lib: Library, draw: Draw) -> Prepared:
    size = draw.number(1, draw.one_of(6, 300))
    dtypes = draw.index_dtype(), draw.index_dtype()
    graphs = [columns(draw, size, size, dtypes) for _ in range(draw.number(1, 2))]
    k = draw.one_of(1, 2, 9, 120)
    nodes = draw.integers(0, size, draw.number(0, 90))
    rows = torch.full((len(nodes), k), -7, dtype=torch.int32)
    counts = torch.full((3,), -7)
    release, seed = draw.flag(), draw.number(-(2**63), 2**63 - 1)
    hubs: list[Tensor] = []
    thinned: list[Tensor] = []
    list_counts: list[Tensor] = []
    if draw.flag():
        cap = draw.one_of(1, 3, 50)
        for one in graphs:
            hubs.append((one.colptr.diff() > cap).nonzero().flatten())
            thinned.append(torch.empty(len(hubs[-1]), cap, dtype=dtypes[1]))
            list_counts.append(torch.empty(len(hubs[-1]), dtype=torch.int64))
            lib("thin_lists", one.colptr, one.row, hubs[-1], seed, thinned[-1], list_counts[-1])
    call = {
        "ptr": [one.colptr for one in graphs],
        "index": [one.row for one in graphs],
        "hubs": hubs,
        "thinned": thinned,
        "list_counts": list_counts,
        "nodes": nodes,
        "release": release,
        "random_seed": seed,
        "is_elsewhere": draw.flag(),
        "rows": rows,
        "counts": counts,
    }

    def check_rows(_: Any) -> None:
        assert_equal(rows[:, 0], nodes.to(torch.int32))
        near: list[set[int]] = [set() for _ in range(size)]
        for one in graphs:
            for source, target in zip(one.row.tolist(), one.dst.tolist(), strict=True):
                near[target].add(source)
        for node, *drawn in rows.tolist():
            possible = near[node].union(*(near[other] for other in near[node]))
            if not release:
                possible.discard(node)
            if not hubs:  # of which all that is left may be the node itself
                assert {*drawn} <= (possible or {*range(size)})
                assert not 0 < k - 1 <= len(possible) or release or len({*drawn}) == k - 1
            assert all(0 <= other < size for other in drawn)
        assert bool((counts >= 0).all())

    return call, check_rows if k > 1 else lambda _: assert_equal(rows[:, 0], nodes.to(torch.int32))


def thin_lists(lib: Library, draw: Draw) -> Prepared:
    size = draw.number(1, draw.one_of(6, 300))
    graph = columns(draw, size, size, (draw.index_dtype(), draw.index_dtype()))
    cap = draw.one_of(1, 3, 50)
    nodes = draw.integers(0, size, draw.number(0, 20))
    thinned = torch.full((len(nodes), cap), -7, dtype=graph.row.dtype)
    counts = torch.full((len(nodes),), -7)
    call = {
        "ptr": graph.colptr,
        "index": graph.row,
        "nodes": nodes,
        "random_seed": draw.number(-(2**63), 2**63 - 1),
        "thinned": thinned,
        "counts": counts,
    }

    def check_lists(_: Any) -> None:
        for node, kept, count in zip(nodes.tolist(), thinned, counts.tolist(), strict=True):
            own = {*graph.row[graph.dst == node].tolist()}
            assert count == min(len(own), cap) == len({*kept[:count].tolist()})
            assert {*kept[:count].tolist()} <= own
            assert not kept[count:].any()

    return call, check_lists


SAMPLING_CALLS = (
    *(sample_layer, sample_neighbors, random_walk, draw_negatives, unique_and_compact),
    *(sample_local_nodes, thin_lists),
)
