"""TorchScript while fastgraph is enabled: it sees upstream's code and its caller's frame."""

from __future__ import annotations

import enum
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.jit._recursive
import torch.jit._script
import torch_geometric.nn.conv.appnp as appnp
from torch import Tensor
from torch_geometric.nn import (
    APPNP,
    GATConv,
    GCNConv,
    GINConv,
    ResGatedGraphConv,
    SAGEConv,
    SGConv,
    TransformerConv,
)

import fastgraph
from fastgraph.routing import status
from tests.cli.commands import environment, python
from tests.graphs import random_edges

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::fastgraph.FallbackWarning"
)

NODES = 10
EDGES = random_edges(NODES, NODES, 40)
REASON = "scripted by torch.jit, calls of which are not counted"

FACTORIES = """\
import torch
from fastgraph.dist.tensor import hooks
def plain(index: torch.Tensor):
    values = torch.as_tensor([1.0, 2.0]) + torch.tensor([3, 4])
    return torch.sparse_coo_tensor(index, values, [3, 3]).to_dense()
if BEFORE:
    torch.jit.script(plain)
hooks.install()
print(torch.jit.script(plain)(torch.tensor([[0, 1], [2, 1]])).tolist())
"""

IMPORT_EVERYTHING = """\
import importlib, json, pathlib, pkgutil, re, sys, warnings
warnings.simplefilter("ignore")
if sys.argv[1] == "enabled":
    import fastgraph
    fastgraph.enable()
import torch, torch_geometric
scripting = re.compile(r"\bjit\b")
failures, modules = {}, 0
for package in (torch, torch_geometric):
    walk = pkgutil.walk_packages(package.__path__, package.__name__ + ".", lambda name: None)
    for module in walk:
        if module.name.endswith("__main__"):  # would run a command line
            continue
        if package is torch and sys.argv[3] == "scripting":
            path = pathlib.Path(module.module_finder.find_spec(module.name).origin or "")
            if path.suffix != ".py" or not scripting.search(path.read_text(errors="replace")):
                continue
        modules += 1
        try:
            importlib.import_module(module.name)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            failures[module.name] = re.sub("0x[0-9a-f]+", "ADDRESS", text)
with open(sys.argv[2], "w") as file:
    json.dump([modules, failures], file)
"""


# In short those alone that could script something while they are imported.
@pytest.mark.parametrize(
    ("which", "at_least"),
    [("scripting", 600), pytest.param("all", 1000, marks=pytest.mark.exhaustive)],
)
def test_every_module_of_torch_and_pyg_imports_as_without_us(
    which: str, at_least: int, tmp_path: Path
) -> None:
    sides = ("plain", "enabled")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", IMPORT_EVERYTHING, side, str(tmp_path / side), which],
            cwd=tmp_path,
            env=environment(OMP_NUM_THREADS="1"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for side in sides
    ]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    plain, enabled = (json.loads((tmp_path / side).read_text()) for side in sides)
    assert plain[0] > at_least
    assert enabled == plain


@pytest.mark.parametrize("before", [False, True])
def test_factories_that_ranks_replace_compile(before: bool, tmp_path: Path) -> None:
    # TorchScript looks up operators by identity, in a table that it makes when first asked.
    (tmp_path / "script.py").write_text(FACTORIES.replace("BEFORE", str(before)))
    done = python("script.py", cwd=tmp_path)
    assert done.stdout == "[[0.0, 0.0, 4.0], [0.0, 6.0, 0.0], [0.0, 0.0, 0.0]]\n", done.stderr


class Net(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.layer(x, edge_index)


def layers() -> list[torch.nn.Module]:
    return [
        GCNConv(4, 2),
        SAGEConv(4, 2),
        SAGEConv(4, 2, aggr="max"),
        SGConv(4, 2),
        APPNP(2, 0.1),
        GINConv(torch.nn.Linear(4, 2)),
        TransformerConv(4, 2),
        ResGatedGraphConv(4, 2),
    ]


@pytest.mark.parametrize("position", range(8))
def test_scripted_layers_run_upstreams_code(position: int) -> None:
    script = torch.jit.script  # as a user's `from torch.jit import script` before enabling
    layer, x = layers()[position], torch.randn(NODES, 4)
    expected = layer(x, EDGES)
    with fastgraph.enabled():
        scripted = script(Net(layer))
        assert [(row.layer, row.routed, row.fell_back) for row in fastgraph.status().rows] == [
            (type(layer).__name__, 0, 1)
        ]
        assert torch.equal(scripted(x, EDGES), expected)
        torch.testing.assert_close(layer(x, EDGES), expected)


def test_functions_with_overloads_are_those_of_upstream() -> None:
    def normalised(edge_index: Tensor) -> tuple[Tensor, Tensor | None]:
        return appnp.gcn_norm(edge_index, None, 10)

    expected = normalised(EDGES)
    with fastgraph.enabled():
        for _ in range(2):  # torch declares the overloads of a function once
            for found, wanted in zip(torch.jit.script(normalised)(EDGES), expected, strict=True):
                assert torch.equal(found, wanted)
            with pytest.raises(RuntimeError, match="cannot be directly compiled"):
                torch.jit.script(appnp.gcn_norm)
    assert torch.equal(torch.jit.script(normalised)(EDGES)[0], expected[0])


def test_an_error_reads_as_without_us() -> None:
    def text() -> str:
        class Own(GATConv):  # which torch cannot script; it says why the first time only
            pass

        with pytest.raises(RuntimeError) as caught:
            torch.jit.script(Net(Own(4, 2)))
        return re.sub(r"___torch_mangle_\d+\.|0x[0-9a-f]+", "", str(caught.value))

    plain = text()
    assert "gat_conv.py" in plain
    with fastgraph.enabled():
        assert text() == plain


@torch.jit.interface
class Layer(torch.nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        pass


def scripted_forms() -> list[Any]:
    """Results of TorchScript in the ways in which it is used, names being those of this frame."""

    class Colour(enum.Enum):
        RED = 1

    @torch.jit.script
    def shifted(x: Tensor) -> Tensor:
        return x + 3

    def twice(x: Tensor) -> Tensor:
        return shifted(shifted(x))

    @torch.jit.script
    class Pair:
        def __init__(self, x: Tensor) -> None:
            self.x = x

        def both(self) -> Tensor:
            return twice(self.x)

    @torch.jit.script
    class Holder:
        def __init__(self, pair: Pair) -> None:
            self.pair = pair
            self.is_red = Colour.RED == Colour.RED

        def both(self) -> Tensor:
            return self.pair.both()

    @torch.jit.script
    def held(x: Tensor) -> tuple[Tensor, bool]:
        holder = Holder(Pair(x))
        return holder.both(), holder.is_red

    class Module(torch.nn.Module):
        __annotations__ = {"layer": Layer}  # torch reads no strings here

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return twice(self.layer.forward(x)) + self.python(x)

        @torch.jit.export
        def exported(self, x: Tensor) -> Tensor:
            return shifted(x)

        @torch.jit.ignore
        def python(self, x):  # nor here
            return torch.sin(x)

        @torch.jit.unused
        def untyped(self, *anything: Any) -> Any:
            return anything

    class Own(torch.jit.ScriptModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = GCNConv(2, 2, bias=False)
            torch.nn.init.ones_(self.layer.lin.weight)

        @torch.jit.script_method
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return shifted(self.layer(x, edge_index))

    class Exporting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = SAGEConv(2, 2, aggr="max")
            for parameter in self.parameters():
                torch.nn.init.ones_(parameter)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.layer(x, edge_index)

        @torch.jit.export
        def exported(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.layer(x, edge_index) + 1

    x = torch.arange(20.0).view(NODES, 2)
    module = torch.jit.script(Module())
    for parameter in module.parameters():
        torch.nn.init.ones_(parameter)
    traced = torch.jit.trace(Exporting(), (x, EDGES))
    exporting = torch.jit.script(Exporting().eval())
    with torch.no_grad():
        return [
            held(x),
            twice(x),
            torch.jit.script(Colour) is Colour,
            dict(torch.jit.script({"a": x})),
            list(torch.jit.script([x])),
            module(x),
            module.exported(x),
            module.untyped(1),
            Own()(x, EDGES),
            traced(x, EDGES),
            traced.exported(x, EDGES),
            torch.jit.freeze(exporting)(x, EDGES),
            torch.jit.optimize_for_inference(exporting)(x, EDGES),
        ]


def test_all_forms_of_scripting() -> None:
    expected = scripted_forms()
    with fastgraph.enabled():
        found = scripted_forms()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def doubled(x: Tensor) -> Tensor:
    return 2 * x


@pytest.mark.parametrize("arguments", [{"optimize": True}, {"example_inputs": [(torch.ones(1),)]}])
@pytest.mark.filterwarnings("default")
def test_warnings_point_where_they_do_without_us(arguments: dict[str, Any]) -> None:
    def seen() -> list[tuple[type[Warning], str, str, int]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.jit.script(doubled, **arguments)
        return [(w.category, str(w.message), w.filename, w.lineno) for w in caught]

    plain = seen()
    assert plain
    with fastgraph.enabled():
        assert seen() == plain


def test_a_scripted_layer_is_shown_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([GCNConv(4, 4), GCNConv(4, 4), SAGEConv(4, 4)])

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, edge_index)
            return x

    net = Net()
    torch.jit.script(net)
    assert not fastgraph.status().rows
    monkeypatch.setattr(status, "_warned", set())
    with fastgraph.enabled(), pytest.warns(fastgraph.FallbackWarning, match=REASON) as caught:
        torch.jit.script(net)
    ours = [w for w in caught if w.category is fastgraph.FallbackWarning]
    assert [warning.filename for warning in ours] == [__file__]
    rows = [(row.layer, row.routed, dict(row.reasons)) for row in fastgraph.status().rows]
    assert rows == [("GCNConv", 0, {REASON: 2}), ("SAGEConv", 0, {REASON: 1})]


def test_a_scripted_layer_within_another_is_counted_once() -> None:
    with fastgraph.enabled():
        scripted = torch.jit.script(GCNConv(4, 2))
        torch.jit.script(Net(scripted))
    assert [row.fell_back for row in fastgraph.status().rows] == [1]


def test_tracing_is_not_scripting() -> None:
    conv, x = GCNConv(4, 2), torch.randn(NODES, 4)
    with fastgraph.enabled():
        torch.jit.trace(conv, (x, EDGES))
    assert REASON not in fastgraph.status().row("GCNConv").reasons
    assert "torch.jit is tracing" in fastgraph.status().row("GCNConv").reasons


class OwnMessage(GCNConv):
    def message(self, x_j: Tensor, edge_weight: Tensor | None) -> Tensor:
        return x_j


@pytest.mark.parametrize(
    ("make", "raises"),
    [
        (lambda: GCNConv(4, 2), True),
        (lambda: GINConv(torch.nn.Linear(4, 2)), True),
        (lambda: TransformerConv(4, 2), True),
        (lambda: ResGatedGraphConv(4, 2), False),
        (lambda: OwnMessage(4, 2), False),
    ],
)
def test_strict_refuses_layers_that_have_a_route(
    make: Callable[[], torch.nn.Module], raises: bool
) -> None:
    context = pytest.raises(fastgraph.RouteRefusedError, match=REASON) if raises else nullcontext()
    with fastgraph.enabled(strict=True), context:
        torch.jit.script(make())


def functions_of_torch() -> list[object]:
    """All that a route of ours replaces."""
    return [
        torch._jit_internal.get_closure,
        torch._sources.get_source_lines_and_file,
        torch.jit._script._get_overloads,
        torch.jit._script._check_directly_compile_overloaded,
        torch.jit._recursive.create_script_module,
    ]


def test_disabling_restores_torchs_own_functions() -> None:
    before = functions_of_torch()
    with fastgraph.enabled():
        assert not set(before) & set(functions_of_torch())
    assert functions_of_torch() == before
