"""enable, disable and what they leave behind."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
import torch_geometric.nn.conv.appnp
from torch import Tensor
from torch_geometric.nn import GCNConv, MessagePassing, PNAConv, ResGatedGraphConv, SAGEConv

import fastgraph
from tests import forks
from tests.graphs import random_edges

EDGES = random_edges(10, 10, 40)


def everything() -> dict[str, object]:
    """Every attribute that a route may replace."""
    found: dict[str, object] = {}
    for cls in (MessagePassing, GCNConv, SAGEConv, ResGatedGraphConv):
        found |= {f"{cls.__name__}.{name}": value for name, value in vars(cls).items()}
    for module in (torch_geometric.nn.conv.appnp, torch_geometric.nn.conv.gcn_conv):
        found |= {f"{module.__name__}.{name}": value for name, value in vars(module).items()}
    return found


def run(conv: torch.nn.Module) -> None:
    conv(torch.ones(10, 4), EDGES)


def routed() -> int:
    return sum(row.routed for row in fastgraph.status().rows)


def test_disable_restores_the_very_same_objects() -> None:
    convs = [GCNConv(4, 2), SAGEConv(4, 2), ResGatedGraphConv(4, 2)]
    before = everything()
    for _ in range(2):
        fastgraph.enable()
        fastgraph.enable()
        for conv in convs:
            run(conv)
        assert everything()["SAGEConv.propagate"] is not before["SAGEConv.propagate"]
        fastgraph.disable()
        fastgraph.disable()
        after = everything()
        assert after.keys() == before.keys()
        assert all(after[name] is before[name] for name in before)


def test_classes_made_while_enabled_are_upstreams_own_afterwards() -> None:
    class Later(SAGEConv):
        pass

    with fastgraph.enabled():
        run(SAGEConv(4, 2))
        run(Later(4, 2))
        assert routed() == 2
    fastgraph.status().reset()
    run(Later(4, 2))
    assert routed() == 0
    for cls in (Later, SAGEConv):
        for name in ("propagate", "_orig_propagate", "_jinja_propagate"):
            assert not hasattr(getattr(cls, name), "_fastgraph_upstream")
    torch.jit.script(Later(4, 2))


def test_propagate_put_back_to_the_base_is_generated_anew() -> None:
    class Mean(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            # propagate_type: (x: Tensor)
            return self.propagate(edge_index, x=x)

    x = torch.randn(10, 4)
    expected = Mean("mean")(x, EDGES)
    with fastgraph.enabled(min_edges=0):
        layer = Mean("mean")
        Mean.propagate = Mean._orig_propagate  # type: ignore[method-assign]
        layer.__setstate__(layer.__dict__)  # as loading a pickled layer does
        assert Mean.propagate is not Mean._orig_propagate
        assert Mean.propagate.__module__ != MessagePassing.__module__
        torch.testing.assert_close(layer(x, EDGES), expected)
        assert routed() == 1
        Mean.propagate = lambda self, edge_index, x: x  # type: ignore[method-assign]
        assert Mean("mean")(x, EDGES) is x  # a user's own stays


def test_live_instances_and_subclasses() -> None:
    conv = SAGEConv(4, 2)
    run(conv)
    with fastgraph.enabled():
        run(conv)
    assert routed() == 1


def test_nesting() -> None:
    conv = SAGEConv(4, 2)
    with fastgraph.enabled():
        with fastgraph.enabled(min_edges=1000):
            run(conv)
            assert routed() == 0
        run(conv)
        assert routed() == 1
        fastgraph.disable()
        assert not fastgraph.is_enabled()
    assert not fastgraph.is_enabled()
    fastgraph.enable()
    with fastgraph.enabled(backend="reference"):
        pass
    assert fastgraph.is_enabled()
    from fastgraph.registry.registry import REGISTRY

    assert REGISTRY.selected is None


def test_signatures_and_docstrings_are_upstreams() -> None:
    SAGEConv(4, 2)
    before = inspect.signature(SAGEConv.propagate), SAGEConv.propagate.__doc__
    norm = inspect.signature(torch_geometric.nn.conv.gcn_conv.gcn_norm)
    with fastgraph.enabled():
        assert (inspect.signature(SAGEConv.propagate), SAGEConv.propagate.__doc__) == before
        assert inspect.signature(torch_geometric.nn.conv.gcn_conv.gcn_norm) == norm
        assert SAGEConv.propagate.__module__.startswith("torch_geometric.nn.conv.sage_conv_SAGE")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"backend": "cuda-graphs"}, r"backend must be one of \["),
        ({"backend": "referense"}, "did you mean 'reference'"),
        ({"min_edges": -1}, "min_edges"),
        ({"min_edges": "many"}, "min_edges"),
        ({"cache_bytes": -5}, "cache_bytes"),
        ({"measure": "always"}, "measure must be True or False"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        fastgraph.enable(**arguments)
    assert not fastgraph.is_enabled()


def test_an_unknown_argument_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="layers"):
        fastgraph.enable(layers=["GCNConv"])


def python(code: str, cwd: Path, **environment: str) -> str:
    process = forks.python("-c", AS_IF_FRESH + code, cwd=cwd, **environment)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


# PyG has been imported, and is to be imported before or after fastgraph.
AS_IF_FRESH = """
import sys
from torch.utils.data import IterDataPipe
IterDataPipe.functions.clear()  # which it enters its own in
for name in [name for name in sys.modules if name.partition(".")[0] == "torch_geometric"]:
    del sys.modules[name]
"""

USE = """
import torch
conv = SAGEConv(4, 2)
conv(torch.ones(3, 4), torch.tensor([[0, 1], [1, 2]]))
print(sum(row.routed for row in fastgraph.status().rows))
"""
IMPORT = "from torch_geometric.nn import SAGEConv\n"
ENABLE = "import fastgraph; fastgraph.enable()\n"


@pytest.mark.parametrize(
    ("code", "environment", "expected"),
    [
        (IMPORT + ENABLE + USE, {}, "1"),
        (ENABLE + IMPORT + USE, {}, "1"),
        (ENABLE + "import torch_geometric\n" + IMPORT + USE, {}, "1"),
        ("import fastgraph\n" + IMPORT + USE, {}, "0"),
        ("import fastgraph\n" + IMPORT + USE, {"FASTGRAPH": "1"}, "1"),
        (ENABLE + IMPORT + USE, {"FASTGRAPH": "0"}, "0"),
        (ENABLE + IMPORT + USE, {"FASTGRAPH_MIN_EDGES": "3"}, "0"),
    ],
)
def test_order_of_imports_and_environment(
    code: str, environment: dict[str, str], expected: str, tmp_path: Path
) -> None:
    assert python(code, tmp_path, **environment) == expected


def test_enabling_does_not_import_pyg(tmp_path: Path) -> None:
    code = ENABLE + "print('torch_geometric' in sys.modules)"
    assert python(code, tmp_path) == "False"


def test_scripting_tracing_and_export_see_upstream(tmp_path: Path) -> None:
    conv, x = GCNConv(4, 2), torch.randn(10, 4)
    expected = conv(x, EDGES)
    with fastgraph.enabled():
        scripted = torch.jit.script(conv)
        traced = torch.jit.trace(conv, (x, EDGES))
        fastgraph.status().reset()
        run(conv)
        assert routed() == 1
    torch.testing.assert_close(scripted(x, EDGES), expected)
    torch.testing.assert_close(traced(x, EDGES), expected)
    assert "fastgraph::" not in str(traced.inlined_graph)
    for strict in (False, True):
        with fastgraph.enabled():
            program = torch.export.export(conv.eval(), (x, EDGES), strict=strict)
        assert "fastgraph" not in str(program.graph)
    sage = SAGEConv(4, 2)
    with fastgraph.enabled():
        torch.jit.script(sage).save(tmp_path / "conv.pt")
    torch.testing.assert_close(torch.jit.load(tmp_path / "conv.pt")(x, EDGES), sage(x, EDGES))


def test_compile_sees_through_a_routed_layer() -> None:
    for conv in (SAGEConv(4, 2, aggr="max"), SAGEConv(4, 2), GCNConv(4, 2)):
        compiled = torch.compile(conv, fullgraph=True, backend="aot_eager", dynamic=True)
        for num_nodes in (10, 13):
            x = torch.randn(num_nodes, 4, requires_grad=True)
            edges = random_edges(num_nodes, num_nodes, 4 * num_nodes)
            expected = torch.autograd.grad(conv(x, edges).square().sum(), x)
            with fastgraph.enabled():
                graphs = torch._dynamo.explain(conv)(x, edges).graphs
                names = [str(node.target) for graph in graphs for node in graph.graph.nodes]
                assert any("fastgraph" in name for name in names)
                out = torch.autograd.grad(compiled(x, edges).square().sum(), x)
            torch.testing.assert_close(out, expected)


def test_compiled_code_follows_the_switch() -> None:
    conv, x = SAGEConv(4, 2), torch.randn(10, 4)
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        seen.append(str(any("fastgraph" in str(node.target) for node in graph.graph.nodes)))
        return graph.forward

    compiled = torch.compile(conv, backend=backend)
    compiled(x, EDGES)
    with fastgraph.enabled():
        compiled(x, EDGES)
        compiled(x, EDGES)
    compiled(x, EDGES)
    assert seen == ["False", "True", "False"]


def test_is_accelerated() -> None:
    conv, x = SAGEConv(4, 2), torch.ones(10, 4)
    norm = torch.nn.BatchNorm1d(4)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.conv = norm, conv

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv(self.norm(x), edge_index)

    assert fastgraph.is_accelerated(conv, x, EDGES) == (False, ["fastgraph is not enabled"])
    with fastgraph.enabled():
        net, state = Net(), torch.random.get_rng_state()
        mean = norm.running_mean.clone()
        assert fastgraph.is_accelerated(net, x, EDGES) == (True, [])
        assert torch.equal(norm.running_mean, mean)
        assert torch.equal(torch.random.get_rng_state(), state)
        assert fastgraph.is_accelerated(ResGatedGraphConv(4, 2), x, EDGES) == (True, [])
        assert fastgraph.is_accelerated(SAGEConv(4, 2, aggr="median"), x, EDGES) == (
            False,
            ["SAGEConv: aggregation MedianAggregation"],
        )
        assert fastgraph.is_accelerated(torch.nn.Linear(4, 2), x) == (
            False,
            ["Linear runs no layer that fastgraph knows"],
        )
    assert not fastgraph.status().rows


def test_status_table() -> None:
    with fastgraph.enabled():
        run(SAGEConv(4, 2))
        run(PNAConv(4, 2, ["mul"], ["identity"], torch.ones(3)))
    text = str(fastgraph.status())
    assert "SAGEConv" in text and "aggregation MulAggregation" in text
    row = fastgraph.status().rows[0]
    assert (row.layer, row.routed, row.fell_back, dict(row.reasons)) == ("SAGEConv", 1, 0, {})


def test_inference_first_and_training_afterwards() -> None:
    conv, x = GCNConv(4, 2), torch.randn(10, 4)
    expected = conv(x, EDGES)
    with fastgraph.enabled(strict=True):
        with torch.inference_mode():
            torch.testing.assert_close(conv(x, EDGES), expected)
        conv(x, EDGES).sum().backward()
        with torch.inference_mode():
            torch.testing.assert_close(conv(x, EDGES), expected)
    assert conv.lin.weight.grad is not None


def test_gradient_checkpointing_and_double_backward() -> None:
    from torch.utils.checkpoint import checkpoint

    conv = SAGEConv(4, 2, aggr="max").double()
    x = torch.randn(10, 4, dtype=torch.float64, requires_grad=True)

    def penalty(out: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return grad.square().sum()

    expected = torch.autograd.grad(penalty(conv(x, EDGES)), x)
    with fastgraph.enabled(strict=True):
        torch.testing.assert_close(torch.autograd.grad(penalty(conv(x, EDGES)), x), expected)
        out = checkpoint(conv, x, EDGES, use_reentrant=False)
        recomputed = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(recomputed, torch.autograd.grad(conv(x, EDGES).sum(), x))
