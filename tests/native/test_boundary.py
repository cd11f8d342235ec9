"""Every function refuses tensors that do not fit, and says which and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastgraph.graphs.graph import Csr
from fastgraph.graphs.windows import windows_of

from .cases import Sparse, make_graph, transpose

WIDTH, HEADS, EDGE_DIM = 5, 3, 2


def attention_calls(
    graph: Sparse, matrix: dict[str, Any], matrix_t: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    src = torch.randn(graph.num_cols, HEADS, WIDTH)
    dst = torch.randn(graph.num_rows, HEADS, WIDTH)
    att, stats = torch.randn(1, HEADS, WIDTH), torch.randn(graph.num_rows, HEADS, 2)
    score_src, score_dst = src[..., 0].contiguous(), dst[..., 0].contiguous()
    edge, alpha = torch.randn(graph.num_edges, EDGE_DIM), torch.randn(graph.num_edges, HEADS)
    weight = torch.randn(HEADS, EDGE_DIM, WIDTH)
    query = torch.randn(graph.num_rows, HEADS, WIDTH + EDGE_DIM)
    options = {"slope": 0.2, "dropout": 0.5, "seed": 7}
    additive = {"x_src": src, "x_dst": dst, "att": att, "edge": edge, "weight_edge": weight}
    scores = {"x": src, "score_src": score_src, "score_dst": score_dst, "score_edge": alpha}
    products = {"query": query, "key": src, "value": src.clone(), "edge": edge}
    biases = {"bias": alpha, "table": torch.randn(4, HEADS)}
    biases["bias_index"] = torch.arange(graph.num_edges, dtype=torch.int32) % 4
    biased = {**products, **biases}
    projected = {**products, "query": dst, "weight_edge": weight}

    def results(out: Tensor) -> dict[str, Tensor]:
        addend = {"addend": out[:1].clone()}
        return {"out": out.clone(), "stats": stats, "alpha": alpha.clone(), **addend}

    def given_at_once(out: Tensor) -> dict[str, Tensor]:
        grads = {"grad": out.clone(), "grad_alpha": alpha, "grad_logsum": stats[..., 0].clone()}
        return {"stats": stats, **grads}

    def given(out: Tensor, numbers: int = 2) -> dict[str, Tensor]:
        return {**given_at_once(out), "between": torch.zeros(graph.num_edges, HEADS, numbers)}

    def gradients(**inputs: Tensor) -> dict[str, Tensor]:
        return {f"grad_{name}": tensor.clone() for name, tensor in inputs.items()}

    return {
        "head_scores": {"x": src, "att": att, "scores": score_src.unsqueeze(0).clone()},
        "head_scores_backward": {
            "x": src,
            "att": att,
            "grad": score_src.unsqueeze(0).clone(),
            "addend": src.clone(),
            **gradients(x=src, att=att),
        },
        "gatv2": {**matrix, **additive, **options, **results(dst)},
        "gatv2_backward_dst": {
            **matrix,
            **additive,
            **options,
            **given(dst, 3),  # with a bit for each channel
            **gradients(dst=dst, att=att, edge=edge, weight_edge=weight),
        },
        "gatv2_backward_src": {
            **matrix_t,
            **additive,
            **options,
            **given(dst, 3),  # with a bit for each channel
            **gradients(src=src),
        },
        "gat": {**matrix, **scores, **options, **results(dst)},
        "gat_backward": {
            **matrix,
            **matrix_t,
            **scores,
            **options,
            **given_at_once(dst),
            **gradients(x=src, score_src=score_src, score_dst=score_dst, score_edge=alpha),
        },
        "attention": {**matrix, **products, **options, **results(query)},
        "attention_backward_dst": {
            **matrix,
            **products,
            **options,
            **given(query),
            **gradients(query=query, edge=edge),
        },
        "attention_backward_src": {
            **matrix_t,
            **products,
            **options,
            **given(query),
            **gradients(key=src, value=src),
        },
        "biased_attention": {**matrix, **biased, **options, **results(query)},
        "biased_attention_backward_dst": {
            **matrix,
            **biased,
            **options,
            **given(query),
            **gradients(query=query, edge=edge, bias=alpha, table=biases["table"]),
        },
        "biased_attention_backward_src": {
            **matrix_t,
            **biased,
            **options,
            **given(query),
            **gradients(key=src, value=src),
        },
        "edge_attention": {**matrix, **projected, **options, **results(dst)},
        "edge_attention_backward_dst": {
            **matrix,
            **projected,
            **options,
            **given(dst),
            **gradients(query=dst, edge=edge, weight_edge=weight),
        },
        "edge_attention_backward_src": {
            **matrix_t,
            **projected,
            **options,
            **given(dst),
            **gradients(key=src, value=src),
        },
    }


def dense_calls() -> dict[str, dict[str, Any]]:
    query, key = torch.randn(4, HEADS, WIDTH), torch.randn(6, HEADS, WIDTH)
    offsets = {"ptr": torch.tensor([0, 1, 4]), "key_ptr": torch.tensor([0, 6, 6])}
    of_pairs = {"bias": torch.randn(5, HEADS), **offsets}
    of_pairs["pair_type"] = torch.tensor([0, 1, 2, 3, 4, 0], dtype=torch.uint8)
    given = {"query": query, "key": key, "value": key.clone(), **of_pairs}
    given |= {"scale": 0.5, "dropout": 0.5, "seed": 7, "first_head": 1, "first_pair": 5}
    given |= {"out": query.clone(), "stats": torch.randn(4, HEADS, 2)}
    gradients = {
        "grad": query.clone(),
        "grad_logsum": query[..., 0].clone(),
        "grad_query": query.clone(),
        "grad_key": key.clone(),
        "grad_value": key.clone(),
        "grad_bias": torch.randn(5, HEADS),
    }
    return {"dense_attention": given, "dense_attention_backward": given | gradients}


def distance_calls() -> dict[str, dict[str, Any]]:
    graph = {"rowptr": torch.tensor([0, 1, 3, 4]), "col": torch.tensor([1, 0, 2, 1])}
    ranges = {"nodes": torch.tensor([0, 2]), "first": torch.tensor([0, 1])}
    ranges["begin"] = torch.tensor([0, 3, 5])
    entries = {"ptr": torch.tensor([0, 2, 2, 3]), "key": torch.tensor([2, 0, 1])}
    return {
        "distances_in_ranges": {**graph, **ranges, "longest": 3, "out": torch.zeros(5).byte()},
        "distances_of_entries": {**graph, **entries, "longest": 3, "out": torch.zeros(3).byte()},
        "nodes_within": {**graph, "longest": 3},
    }


def block_calls(lib: Any, graph: Sparse) -> dict[str, dict[str, Any]]:
    by_query, by_key = (
        windows_of(Csr(sparse.rowptr, sparse.index, sparse.edge_id))._asdict()
        for sparse in (graph, transpose(lib, graph))
    )
    query = torch.randn(graph.num_rows, HEADS, WIDTH)
    key = torch.randn(graph.num_cols, HEADS, WIDTH)
    given: dict[str, Any] = {"query": query, "key": key, "value": key.clone()}
    given |= {"table": torch.randn(4, HEADS), "bias_index": torch.arange(graph.num_edges) % 4}
    stats = torch.randn(graph.num_rows, HEADS, 2)
    grads = {"scale": 0.5, "stats": stats, "grad": query.clone()}
    delta = {"delta": stats[..., 0].clone()}
    return {
        "block_attention": {
            **by_query,
            **given,
            **{"scale": 0.5, "out": query.clone(), "stats": stats.clone()},
        },
        "block_attention_backward_queries": {
            **by_query,
            **given,
            **grads,
            "grad_logsum": stats[..., 1].clone(),
            **delta,
            "grad_query": query.clone(),
            "grad_table": given["table"].clone(),
        },
        "block_attention_backward_keys": {
            **by_key,
            **given,
            **grads,
            **delta,
            "grad_key": key.clone(),
            "grad_value": key.clone(),
        },
    }


def valid_calls(lib: Any) -> dict[str, dict[str, Any]]:
    graph = make_graph(lib, "random")
    flipped = transpose(lib, graph)
    rowptr, col, edge_id, num_cut, _ = graph.csr
    rowptr_t, col_t, edge_id_t, num_cut_t, _ = flipped.csr
    x = torch.randn(graph.num_cols, WIDTH)
    out = torch.randn(graph.num_rows, WIDTH)
    record = torch.zeros(graph.num_rows, WIDTH, dtype=torch.int32)
    weight = torch.randn(graph.num_edges)
    of_heads = torch.randn(graph.num_edges, HEADS)
    ascending = {"rowptr": rowptr, "col": col, "edge_id": edge_id, "num_cut": num_cut}
    matrix = ascending | {"row_id": torch.arange(graph.num_rows).int()}
    matrix_t = {"rowptr_t": rowptr_t, "col_t": col_t, "edge_id_t": edge_id_t}
    matrix_t |= {"num_cut_t": num_cut_t, "row_id_t": torch.arange(graph.num_cols).int()}
    attention = attention_calls(graph, matrix, matrix_t) | dense_calls() | distance_calls()
    attention |= block_calls(lib, graph)
    return attention | {
        "build_csr": {
            "row": graph.row,
            "col": graph.col,
            "num_rows": graph.num_rows,
            "num_cols": graph.num_cols,
            "rowptr": rowptr.clone(),
            "col_out": col.clone(),
            "edge_id": torch.empty_like(col),
        },
        "build_csr_with_loops": {
            "row": graph.row,
            "col": graph.col,
            "num_rows": graph.num_rows,
            "num_cols": graph.num_cols,
            "num_loops": 3,
            "rowptr": rowptr.clone(),
            "col_out": torch.empty(graph.num_edges + 3, dtype=torch.int32),
            "edge_id": torch.empty(graph.num_edges + 3, dtype=torch.int32),
        },
        "check_csr": {
            "ptr": rowptr,
            "index": col.long(),
            "num_rows": graph.num_rows,
            "num_cols": graph.num_cols,
            "rowptr": rowptr.clone(),
            "col_out": col.clone(),
        },
        "order_rows": {
            **ascending,
            "row_bytes": 1024,
            "rowptr_out": rowptr.clone(),
            "col_out": col.clone(),
            "edge_id_out": torch.empty_like(col),
            "row_id_out": torch.empty(graph.num_rows, dtype=torch.int32),
        },
        "transpose_csr": {
            **ascending,
            "num_cols": graph.num_cols,
            "rowptr_t": rowptr_t.clone(),
            "col_t": col_t.clone(),
            "edge_id_t": torch.empty_like(col_t),
        },
        "reverse_rows": {"rowptr": rowptr, "col": col, "col_out": col.clone()},
        "same_indices": {"a": col.long(), "b": col},
        "inverse_degree": {"rowptr": rowptr, "out": torch.empty(graph.num_rows)},
        "spmm": {
            **matrix,
            "weight": weight,
            "row_scale": torch.randn(graph.num_rows),
            "col_scale": torch.randn(graph.num_cols),
            "x": x,
            "out": out.clone(),
        },
        "check_edges": {
            "source": graph.col,
            "destination": graph.row,
            "num_sources": graph.num_cols,
            "num_destinations": graph.num_rows,
        },
        "spmm_coo": {
            "source": graph.col,
            "destination": graph.row,
            "transpose": False,
            "is_checked": False,
            "weight": torch.randn(graph.num_edges),
            "inverse_degree": torch.empty(graph.num_rows),
            "col_scale": torch.randn(graph.num_cols),
            "x": torch.randn(graph.num_cols, 2),
            "out": torch.empty(graph.num_rows, 2),
        },
        "segment_reduce_coo": {
            "source": graph.col,
            "destination": graph.row,
            "transpose": False,
            "is_checked": False,
            "weight": torch.randn(graph.num_edges),
            "is_max": True,
            "x": torch.randn(graph.num_cols, 2),
            "out": torch.empty(graph.num_rows, 2),
            "ties": torch.empty(graph.num_rows, 2, dtype=torch.int32),
        },
        "sddmm": {
            **matrix,
            "row_scale": torch.randn(graph.num_rows),
            "grad": out,
            "x": x,
            "out": weight.clone(),
        },
        "edge_softmax": {**matrix, "score": of_heads, "out": of_heads.clone()},
        "edge_softmax_backward": {
            **matrix,
            "weight": of_heads,
            "grad": of_heads.clone(),
            "grad_score": of_heads.clone(),
        },
        "segment_reduce": {
            **matrix,
            "weight": weight,
            "is_max": True,
            "x": x,
            "out": out.clone(),
            "ties": record,
            "winner": None,
        },
        "segment_reduce_backward": {
            **ascending,
            "weight": weight,
            "x": x,
            "out": out,
            "grad": out.clone(),
            "ties": None,
            "winner": record,
            "grad_x": x.clone(),
        },
    }


FUNCTIONS = (
    "build_csr",
    "build_csr_with_loops",
    "check_csr",
    "transpose_csr",
    "reverse_rows",
    "same_indices",
    "inverse_degree",
    "order_rows",
    "spmm",
    "check_edges",
    "spmm_coo",
    "segment_reduce_coo",
    "sddmm",
    "edge_softmax",
    "edge_softmax_backward",
    "segment_reduce",
    "segment_reduce_backward",
    "head_scores",
    "head_scores_backward",
    "gatv2",
    "gatv2_backward_dst",
    "gatv2_backward_src",
    "gat",
    "gat_backward",
    "attention",
    "attention_backward_dst",
    "attention_backward_src",
    "biased_attention",
    "biased_attention_backward_dst",
    "biased_attention_backward_src",
    "edge_attention",
    "edge_attention_backward_dst",
    "edge_attention_backward_src",
    "dense_attention",
    "dense_attention_backward",
    "distances_in_ranges",
    "distances_of_entries",
    "nodes_within",
    "block_attention",
    "block_attention_backward_queries",
    "block_attention_backward_keys",
)
# Sizes are taken from these: what disagrees with them is reported instead.
LEADING = {"row", "index", "col", "col_t", "rowptr", "rowptr_t", "x"}
LEADING |= {"x_src", "x_dst", "score_dst", "query", "key"}
LEADING_IN = {
    ("same_indices", "a"),
    ("check_edges", "source"),
    ("spmm_coo", "source"),
    ("spmm_coo", "out"),
    ("segment_reduce_coo", "source"),
    ("segment_reduce_coo", "out"),
    ("dense_attention", "bias"),
    ("biased_attention", "table"),
    ("block_attention", "table"),
    ("block_attention_backward_keys", "table"),
    *(
        (f"block_attention{which}", name)
        for which in ("", "_backward_queries", "_backward_keys")
        for name in ("node", "edge")
    ),
    ("biased_attention_backward_src", "table"),
    ("head_scores", "att"),
    ("head_scores_backward", "att"),
    ("distances_in_ranges", "nodes"),
    ("distances_of_entries", "key"),
}
STRIDED = {
    ("build_csr", "row"),
    ("build_csr", "col"),
    ("build_csr_with_loops", "row"),
    ("build_csr_with_loops", "col"),
    ("check_csr", "ptr"),
    ("check_csr", "index"),
    ("same_indices", "a"),
    ("same_indices", "b"),
    ("inverse_degree", "rowptr"),
    ("check_edges", "source"),
    ("check_edges", "destination"),
    ("spmm_coo", "source"),
    ("spmm_coo", "destination"),
    ("segment_reduce_coo", "source"),
    ("segment_reduce_coo", "destination"),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_valid_arguments_pass(best: Any, function: str) -> None:
    getattr(best, function)(*valid_calls(best)[function].values())


@pytest.mark.parametrize("function", FUNCTIONS)
def test_wrong_tensors_are_named(best: Any, function: str) -> None:
    call = getattr(best, function)
    arguments = valid_calls(best)[function]

    def refused(name: str, value: Any, error: Any, message: str) -> None:
        with pytest.raises(error, match=message):
            call(*{**arguments, name: value}.values())

    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            continue
        refused(name, value.to(torch.complex64), TypeError, rf"{name} must be .*, got complex")
        refused(name, value.bool(), TypeError, rf"{name} must be .*, got bool")
        refused(name, value[None], ValueError, rf"{name} must have .*, got (shape )?\[1, ")
        refused(name, value[0], ValueError, rf"{name} must have .*, got (shape )?\[")
        grown = torch.cat([value, value[:1]])
        if name not in LEADING and (function, name) not in LEADING_IN:
            refused(name, grown, ValueError, rf"{name} must have shape \[")
        if (function, name) not in STRIDED:
            gaps = value.repeat_interleave(2, -1)[..., ::2]
            refused(name, gaps, ValueError, rf"{name} must be contiguous, got shape \[")
    for name in ("x", "out", "grad", "ties", "winner", "grad_x"):
        value = arguments.get(name)
        if isinstance(value, Tensor) and value.dim() == 2 and name != "x":
            refused(name, value[:, 1:].contiguous(), ValueError, rf"{name} must have shape \[")


def test_integer_features_are_refused(best: Any) -> None:
    arguments = valid_calls(best)["spmm"]
    arguments["x"] = arguments["x"].int()
    with pytest.raises(
        TypeError, match="x must be float32, float64, bfloat16 or float16, got int32"
    ):
        best.spmm(*arguments.values())


def test_float_indices_are_refused(best: Any) -> None:
    arguments = valid_calls(best)["build_csr"]
    arguments["row"] = arguments["row"].float()
    with pytest.raises(TypeError, match="row must be int32 or int64, got float32"):
        best.build_csr(*arguments.values())


def test_there_are_no_more_self_loops_than_nodes(best: Any) -> None:
    arguments = valid_calls(best)["build_csr_with_loops"]
    for number, message in ((-1, r"num_loops must be in \[0, 2\^31\)"), (10**6, "must not exceed")):
        arguments["num_loops"] = number
        with pytest.raises(ValueError, match=message):
            best.build_csr_with_loops(*arguments.values())


@pytest.mark.parametrize(("function", "name"), [("spmm", "weight"), ("sddmm", "out")])
def test_heads_share_columns_evenly(best: Any, function: str, name: str) -> None:
    arguments = valid_calls(best)[function]
    edges = len(arguments[name])
    for heads in (1, WIDTH):
        getattr(best, function)(*(arguments | {name: torch.randn(edges, heads)}).values())
    for heads in (0, 2, 2 * WIDTH):
        with pytest.raises(ValueError, match=f"{name} must have heads that share 5 columns evenly"):
            getattr(best, function)(*(arguments | {name: torch.randn(edges, heads)}).values())
    with pytest.raises(ValueError, match=rf"{name} must have shape \["):
        getattr(best, function)(*(arguments | {name: torch.randn(edges + 1, 1)}).values())


@pytest.mark.parametrize(
    ("function", "name", "value", "error", "message"),
    [
        ("distances_in_ranges", "longest", 255, ValueError, r"longest must be in \[0, 254\]"),
        ("distances_in_ranges", "nodes", [0, 3], IndexError, "nodes holds node 3 at position 1"),
        ("distances_in_ranges", "first", [1, 1], IndexError, "nodes holds node 0 at position 0"),
        ("distances_in_ranges", "first", [0, -1], IndexError, "nodes holds node 2 at position 1"),
        ("distances_in_ranges", "begin", [0, 4, 3], ValueError, "begin must ascend from 0"),
        ("distances_in_ranges", "begin", [1, 3, 5], ValueError, "begin must ascend from 0"),
        ("distances_of_entries", "longest", -1, ValueError, r"longest must be in \[0, 254\]"),
        ("distances_of_entries", "key", [0, 3, 1], IndexError, "key holds node 3 at position 1"),
        ("distances_of_entries", "ptr", [0, 2, 2, 2], ValueError, "ptr must run to 3"),
        ("nodes_within", "col", [1, 0, 3, 1], IndexError, "col holds node 3 at position 2"),
        ("nodes_within", "rowptr", [0, 5, 3, 4], ValueError, "rowptr must ascend"),
    ],
)
def test_wrong_distances_are_refused(
    best: Any, function: str, name: str, value: Any, error: type[Exception], message: str
) -> None:
    arguments = distance_calls()[function]
    arguments[name] = torch.tensor(value) if isinstance(value, list) else value
    with pytest.raises(error, match=message):
        getattr(best, function)(*arguments.values())


def test_row_pointers_must_span_the_entries(best: Any) -> None:
    arguments = valid_calls(best)["spmm"]
    arguments["rowptr"] = arguments["rowptr"] + 1
    with pytest.raises(ValueError, match="rowptr must run from 0 to 4000"):
        best.spmm(*arguments.values())


def test_objects_that_are_no_tensors_are_refused(best: Any) -> None:
    arguments = valid_calls(best)["spmm"]
    arguments["x"] = "features"
    with pytest.raises(TypeError):
        best.spmm(*arguments.values())
    with pytest.raises(TypeError):
        best.spmm(arguments["rowptr"])


def test_terms_of_a_sum_are_alike(best: Any) -> None:
    """Reductions of one output go on with the same sums: of as many channels, scaled alike."""
    graph = make_graph(best, "random")
    rowptr, col, edge_id, num_cut, order = graph.csr
    kinds = [(1, 8), (1, 8), (1, 4), (0, 8), (2, 1)]  # gathered thrice, of a row, of edges
    slots = torch.tensor(kinds, dtype=torch.int32)
    operands = [
        torch.randn(n, w)
        for n, w in zip(
            [graph.num_cols] * 3 + [graph.num_rows, graph.num_edges], (8, 8, 4, 8, 1), strict=True
        )
    ]
    out = torch.full((graph.num_rows, 8), 77.0)

    def run(*reductions: list[int]) -> None:
        table = torch.tensor([[*row, -1, -1] for row in reductions], dtype=torch.int32)
        best.edge_program(
            *(rowptr, col, edge_id, num_cut, order, graph.num_cols, slots),
            *(torch.zeros(5, dtype=torch.float64), torch.empty(0, 5, dtype=torch.int32), table),
            *(operands, [out]),
        )

    run([0, 0, 4, 3, 0], [0, 1, -1, 3, 0])
    x, y, _, r, w = (operand.double() for operand in operands)
    expected = torch.zeros(out.shape, dtype=torch.float64)
    expected.index_add_(0, graph.row, x[graph.col] * w + y[graph.col])
    torch.testing.assert_close(out.double(), expected * r, rtol=1e-4, atol=1e-4)
    for other in ([0, 2, -1, -1, 0], [0, 1, -1, -1, 0], [1, 1, -1, 3, 0], [2, 1, -1, -1, 0]):
        with pytest.raises(ValueError, match="reduction 1 must have an output of its own"):
            run([0, 0, 4, 3, 0], other)
