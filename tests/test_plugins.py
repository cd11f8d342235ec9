"""A third-party plugin, installed as its users would install it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fastgraph.backends.building import BY_TORCH, TorchBuilder
from fastgraph.plugins.backend import FALLBACK_PRIORITY
from fastgraph.plugins.patching import Patches
from fastgraph.registry.operators import SIGNATURES
from fastgraph.registry.registry import Registry
from fastgraph.registry.signatures import check_signature
from tests import forks

PLUGIN = Path(__file__).parent / "plugins" / "fastgraph_squares"

SCRIPT = """
import torch, fastgraph, fastgraph_squares
layer, x = fastgraph_squares.SumOfSquares(), torch.tensor([[1.0], [2.0]])
edges = torch.tensor([[0, 1], [1, 1]])
plain = layer(x, edges)
with fastgraph.enabled(backend="counting"):
    assert torch.equal(layer(x, edges), plain)
assert fastgraph_squares.CALLS == ["builder", "spmm"], fastgraph_squares.CALLS
assert fastgraph.status().rows[0].routed == 1
layer(x, edges)
assert fastgraph.status().rows[0].routed == 1
from fastgraph.registry.registry import backend_report
assert ("counting", True, "") in backend_report()
fastgraph_squares.CALLS.clear()
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv
for conv in (GATConv(1, 2), GATv2Conv(1, 2), TransformerConv(1, 2)):
    with fastgraph.enabled(backend="counting"):
        conv(x, edges).sum().backward()
backwards = [name for name in fastgraph_squares.CALLS if name.endswith("_backward")]
assert sorted(backwards) == [
    "attention_backward", "gat_backward", "gatv2_backward", "head_scores_backward"
], fastgraph_squares.CALLS
print("done")
"""


def test_a_plugin_installed_as_an_entry_point(tmp_path: Path) -> None:
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "--target",
            str(tmp_path),
            str(PLUGIN),
        ],
        check=True,
    )
    done = forks.python("-c", SCRIPT, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.stdout.strip() == "done", done.stderr


class Fake:
    def __init__(
        self,
        name: str,
        why_not: str | None = None,
        priority: int = 500,
        device_types: tuple[str, ...] = ("cpu", "cuda"),
    ) -> None:
        self.name = name
        self.why_not = why_not
        self.priority = priority
        self.device_types = device_types

    def unavailable(self) -> str | None:
        return self.why_not

    def kernel(self, operator: str, device_type: str, dtype: torch.dtype) -> object:
        known = operator == "spmm" and device_type in self.device_types
        return (lambda *_: self.name) if known else None


def registry(*backends: object) -> Registry:
    found = Registry()
    found._backends = {b.name: b for b in backends}  # type: ignore[attr-defined]
    return found


def test_the_first_available_backend_with_a_kernel_computes() -> None:
    found = registry(Fake("broken", "no driver"), Fake("fast"))
    assert found.kernel("spmm", "cpu", torch.float32)() == "fast"
    found.select(None)
    assert found.refusal("spmm", "cpu", torch.float32) is None
    assert "no backend computes sddmm" in str(found.refusal("sddmm", "cpu", torch.float32))


def test_a_backend_is_asked_once_whether_it_is_available() -> None:
    """Not for each kernel: it may have to look for files."""
    asked = []

    class Slow(Fake):
        def unavailable(self) -> str | None:
            asked.append(self.name)
            return None

    registry(Slow("slow")).select(None)
    assert asked == ["slow"]


@pytest.mark.parametrize("why_not", [None, "no driver"])
def test_what_is_made_for_a_device_serves_it_before_the_last_resort(why_not: str | None) -> None:
    """As where a backward pass runs after the block that enabled the backend by name."""
    found = registry(
        Fake("reference", priority=FALLBACK_PRIORITY),
        Fake("anywhere", priority=-2),
        Fake("gpu", why_not, priority=-3, device_types=("cuda",)),
    )
    found.select(None)
    assert found.kernel("spmm", "cuda", torch.float32)() == ("reference" if why_not else "gpu")
    assert found.kernel("spmm", "cpu", torch.float32)() == "reference"
    assert "gpu" in str(found.refusal("spmm", "cuda", torch.float32))  # nothing is routed to it


ATTENTION = "query, key, value, edge, transpose, scale, dropout, seed, weights"


@pytest.mark.parametrize(
    ("operator", "kernel", "text"),
    [
        ("gatv2", lambda *given: None, r"takes \(\*given\): got an unexpected keyword .*'addend'"),
        ("spmm", lambda graph, x: None, "takes .graph, x.: too many positional arguments"),
        ("sddmm", lambda g, a, b, h, r, t, u: None, "missing a required argument: 'u'"),
        ("attention", eval(f"lambda graph, {ATTENTION}: None"), "unexpected keyword.*'addend'"),
        ("attention", eval(f"lambda graph, {ATTENTION}, *, add=0: None"), "keyword.*'addend'"),
        ("gat_backward", lambda graph, grad, *rest, seed: None, "required.*'seed'"),
    ],
)
def test_a_kernel_that_an_operator_could_not_call_is_refused(
    operator: str, kernel: Any, text: str
) -> None:
    class Wrong(Fake):
        def kernel(self, name: str, device_type: str, dtype: torch.dtype) -> object:
            return kernel if (name, device_type) == (operator, "cuda") else None

    expected = rf"the kernel '{operator}' of backend 'wrong' must take .*{text}"
    with pytest.raises(TypeError, match=expected):
        registry(Wrong("wrong")).select(None)
    with pytest.raises(TypeError, match=expected):
        registry(Wrong("wrong", priority=-9), Fake("fast")).select("wrong")


def test_built_in_kernels_take_what_operators_pass() -> None:
    """On any machine, with a GPU or without."""
    for backend in Registry().backends.values():
        for operator in SIGNATURES:
            for device_type in ("cpu", "cuda"):
                kernel = backend.kernel(operator, device_type, torch.float32)
                if kernel is not None:
                    check_signature(backend.name, operator, kernel)


class Building(Fake):
    """Builds graphs by an object with some methods."""

    def __init__(self, name: str, builder: object, **options: Any) -> None:
        super().__init__(name, **options)
        self._builder = builder

    def builder(self, device_type: str) -> object:
        return self._builder if device_type in self.device_types else None


def test_graphs_are_built_by_the_selected_backend_or_another_one() -> None:
    by_mine, by_usual = TorchBuilder(), TorchBuilder()
    found = registry(
        Fake("fast"),
        Building("usual", by_usual, device_types=("cpu",)),
        Building("mine", by_mine, priority=-2, device_types=("cuda",)),
        Building("reference", BY_TORCH, priority=FALLBACK_PRIORITY, device_types=("cpu", "cuda")),
    )
    for selected, expected in {
        None: (by_usual, BY_TORCH),
        "fast": (by_usual, BY_TORCH),
        "mine": (by_usual, by_mine),
        "reference": (BY_TORCH, BY_TORCH),
    }.items():
        found.select(selected)
        assert tuple(map(found.builder, ("cpu", "cuda"))) == expected, selected
    with pytest.raises(NotImplementedError, match="no backend builds graphs on xpu"):
        found.builder("xpu")


def test_a_builder_that_a_graph_could_not_call_is_refused() -> None:
    class Wrong(TorchBuilder):
        def transpose_csr(self, rows: Any) -> Any:  # type: ignore[override]
            return rows

    taken = r"must take \(rows, num_cols, numbered\).* too many"
    expected = rf"builder's 'transpose_csr' of backend 'b' {taken}"
    with pytest.raises(TypeError, match=expected):
        registry(Building("b", Wrong())).builder("cpu")
    with pytest.raises(TypeError, match="builder's 'build_csr' of backend 'b' is missing"):
        registry(Building("b", object())).builder("cpu")


def test_selection_errors_name_the_reason() -> None:
    found = registry(Fake("broken", "no driver"), Fake("fast"))
    with pytest.raises(ValueError, match="backend 'broken' is unavailable: no driver"):
        found.select("broken")
    with pytest.raises(ValueError, match="did you mean 'fast'"):
        found.select("fats")
    found.select("fast")
    with pytest.raises(NotImplementedError, match="'fast' has no kernel 'sddmm'"):
        found.kernel("sddmm", "cpu", torch.float32)


def test_what_a_user_has_set_meanwhile_stays() -> None:
    class Owner:
        def first(self) -> str:
            return "upstream"

        def second(self) -> str:
            return "upstream"

    patches = Patches()
    for text in ("ours", "ours again"):
        for name in ("first", "second"):
            patches.replace(Owner, name, lambda self, text=text: text)
        patches.provide(Owner, "third", lambda self, text=text: text)
    theirs = lambda self: "a user's"  # noqa: E731
    Owner.first = theirs  # type: ignore[method-assign]
    del Owner.third  # type: ignore[attr-defined]
    with patches.suspended():
        assert vars(Owner)["first"] is theirs and Owner().second() == "upstream"
    assert vars(Owner)["first"] is theirs and Owner().second() == "ours again"
    patches.restore()
    assert vars(Owner)["first"] is theirs and Owner().second() == "upstream"
    assert not hasattr(Owner, "third")


def test_suspended_patches_come_back_as_they_were() -> None:
    class Base:
        def first(self) -> str:
            return "base"

    class Derived(Base):
        def second(self) -> str:
            return "upstream"

    patches = Patches()
    for text in ("ours", "ours again"):
        patches.replace(Derived, "first", lambda self, text=text: text)
        patches.replace(Derived, "second", lambda self, text=text: text)
    replaced = dict(vars(Derived))
    with patches.suspended():
        assert Derived().first() == "base" and Derived().second() == "upstream"
        assert "first" not in vars(Derived)
    assert dict(vars(Derived)) == replaced and Derived().first() == "ours again"
    patches.restore()
    assert Derived().first() == "base" and Derived().second() == "upstream"
