"""``dgl.sparse`` where DGL has no library for it: :mod:`fastgraph.sparse` in its place."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest
import torch

import fastgraph.sparse as fgs
from tests.dgl.graphs import ALL, dgl, of_case
from tests.graphs import Case


@pytest.mark.parametrize("case", ALL, ids=str)
def test_the_adjacency_matrix_of_a_graph(case: Case) -> None:
    """By ``adj()`` sources are rows; by ``from_dgl`` rows aggregate."""
    graph = of_case(case)
    src, dst = graph.edges(order="eid")
    weight = torch.randn(graph.num_edges(), dtype=torch.float64)
    # With a name of weights DGL takes heterographs only.
    theirs, ours = fgs.val_like(graph.adj(), weight), fgs.from_dgl(graph, weight)
    assert isinstance(graph.adj(), fgs.SparseMatrix)
    assert theirs.shape == ours.T.shape == (graph.num_src_nodes(), graph.num_dst_nodes())
    for a in (theirs, ours.T):
        assert torch.equal(a.row, src) and torch.equal(a.col, dst) and torch.equal(a.val, weight)
    x = torch.randn(graph.num_src_nodes(), 5, dtype=torch.float64)
    torch.testing.assert_close(ours @ x, dgl.ops.u_mul_e_sum(graph, x, weight))


def test_one_relation_of_several() -> None:
    edges = {("a", "to", "b"): ([0, 1], [2, 2]), ("b", "of", "a"): ([0], [1])}
    graph = dgl.heterograph(edges, {"a": 2, "b": 4})
    assert fgs.from_dgl(graph, etype="to").to_dense().nonzero().tolist() == [[2, 0], [2, 1]]
    assert graph.adj(etype=("b", "of", "a")).shape == (4, 2)
    with pytest.raises(dgl.DGLError, match="must be specified"):
        fgs.from_dgl(graph)


def test_it_is_ours_with_all_of_its_modules() -> None:
    module = importlib.import_module("dgl.sparse")
    assert module is fgs is dgl.sparse
    for name in ("broadcast", "elementwise_op", "elementwise_op_sp", "matmul", "reduction"):
        assert importlib.import_module(f"dgl.sparse.{name}").SparseMatrix is fgs.SparseMatrix
    for name in ("sddmm", "softmax", "sparse_matrix", "unary_op", "utils"):
        assert importlib.import_module(f"dgl.sparse.{name}").val_like is fgs.val_like
    assert dgl.sparse.matmul is fgs.matmul  # no module of that name, as in DGL
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("dgl.sparse.nothing_of_this_name")


def test_no_name_of_dgls_is_missing() -> None:
    """Of its functions, and of methods of its matrix, in its own sources."""
    folder = Path(dgl.__file__).parent / "sparse"
    names, methods = set(), set()
    for path in folder.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.ClassDef):
                methods |= {f.name for f in node.body if isinstance(f, ast.FunctionDef)}
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                methods.add(node.targets[0].attr)
    # What operators of Python call, and the search for the library.
    names -= {"sp_add", "sp_sub", "sp_mul", "sp_div", "sp_power", "load_dgl_sparse"}
    names -= {name for name in names if name.startswith(("_", "spsp_", "diag_", "sp_diag"))}
    assert len(names) > 30 and len(methods) > 40
    assert not names - {*fgs.__all__}
    assert not {name for name in methods if not hasattr(fgs.SparseMatrix, name)}
