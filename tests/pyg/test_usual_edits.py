"""PyG's classes in their usual configurations, whose tensors are edited between the passes.

The gradients are upstream's, and so is the refusal to compute any.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgraph
from tests.pyg.test_usual import CONVS, EDGES, calling

# What functions keep for their backward passes is the same for every backend.
pytestmark = pytest.mark.repeats

Leaves = dict[str, Tensor]

EDITS: dict[str, Callable[[Leaves, Tensor, Any], object]] = {
    "a residual": lambda leaves, out, graph: leaves["x"].add_(out.sum()),
    "a product": lambda leaves, out, graph: leaves["x"].mul_(2),
    "zeros": lambda leaves, out, graph: leaves["x"].zero_(),
    "a view": lambda leaves, out, graph: leaves["x"][2:5].add_(1),
    "another shape's view": lambda leaves, out, graph: leaves["x"].view(-1).neg_(),
    "a detached view": lambda leaves, out, graph: leaves["x"].detach().add_(1),
    "a row that is assigned": lambda leaves, out, graph: leaves["x"].__setitem__(0, 1.0),
    "the output": lambda leaves, out, graph: out.mul_(2),
    "a view of the output": lambda leaves, out, graph: out[:3].zero_(),
    "relu_ of the output": lambda leaves, out, graph: torch.relu_(out),
    "all but x": lambda leaves, out, graph: [
        leaf.mul_(2) for name, leaf in leaves.items() if name != "x"
    ],
    "the edges": lambda leaves, out, graph: graph.edges.copy_(graph.edges.flip(1)),
    "the sources": lambda leaves, out, graph: graph.edges[0].copy_(graph.edges[0].flip(0)),
    "the types": lambda leaves, out, graph: graph.kinds.copy_(graph.kinds.flip(0)),
}
OF_EDGES = ("the edges", "the sources", "the types")

# Programs compute for pairs of a node and a type of edges, not with the caller's edges.
TYPED = ("FastRGCNConv", "RGATConv")

# Features of edges as wide as messages are not copied: see the page on any message.
NOT_COPIED = ("GINEConv", "GENConv, mean, edges")

# And what is made of `MultiheadAttentionBlock`, which has a route, too.
NAMES = [*(name for name in CONVS if name != "WLConv"), "SetTransformerAggregation"]


def _cases() -> list[Any]:
    found = []
    for at, name in enumerate(NAMES):
        for number, edit in enumerate(EDITS):
            is_some = (at + number) % 7 == 0 or (name in TYPED and edit in OF_EDGES)
            marks = () if is_some else pytest.mark.exhaustive
            found.append(pytest.param(name, edit, marks=marks))
    return found


class _Edited:
    """A call of a layer, which is edited between its passes.

    Args:
        name: of the configuration.
        edit: of :data:`EDITS`.
        constant: true if parameters alone require gradients.
    """

    def __init__(self, name: str, edit: str, constant: bool) -> None:
        self._module, (_, leaves) = calling(name, EDGES)
        self._leaves = {
            name: leaf.detach().requires_grad_(not constant) for name, leaf in leaves.items()
        }
        self._edit = EDITS[edit]
        self.is_empty = edit == "the types" and "kinds" not in vars(self._run()[2])
        self.is_empty |= constant and not any(True for _ in self._module.parameters())

    def _run(self) -> tuple[Leaves, Tensor, Any]:
        torch.manual_seed(0)
        module = copy.deepcopy(self._module)
        own = {name: leaf * 1 for name, leaf in self._leaves.items()}
        graph = module._made(lambda shape, name: own[name], torch.int64)
        graph.edges = graph.edges.clone()
        out = module._call(module.layer, graph)
        for kind in (tuple, dict):
            if isinstance(out, kind):
                out = next(iter(out.values() if kind is dict else out))
        self._parameters = list(module.parameters())
        return own, out, graph

    def gradients(self) -> list[Tensor | None] | str:
        """The gradients of all that require one, or the beginning of the error."""
        own, out, graph = self._run()
        loss = (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum()
        try:
            self._edit(own, out, graph)
            loss = loss + out.sum() + sum(leaf.square().sum() for leaf in own.values())
            wanted = [t for t in (*self._leaves.values(), *self._parameters) if t.requires_grad]
            return list(torch.autograd.grad(loss, wanted, allow_unused=True))
        except RuntimeError as error:
            return str(error).partition(":")[0]


@pytest.mark.parametrize("constant", [False, True], ids=["all gradients", "of parameters"])
@pytest.mark.parametrize(("name", "edit"), _cases())
def test_edits_between_the_passes(name: str, edit: str, constant: bool) -> None:
    call = _Edited(name, edit, constant)
    if call.is_empty:
        pytest.skip("nothing is edited, or has a gradient")
    expected = call.gradients()
    with fastgraph.enabled(min_edges=0):
        found = call.gradients()
    if name in NOT_COPIED and edit == "all but x" and not constant:
        assert isinstance(found, str) and "modified by an inplace operation" in found
    elif isinstance(expected, str) or isinstance(found, str):
        assert found == expected
    else:
        for ours, upstreams in zip(found, expected, strict=True):
            if ours is None or upstreams is None:
                assert all(g is None or not g.any() for g in (ours, upstreams))
            else:
                torch.testing.assert_close(ours, upstreams, rtol=1e-7, atol=1e-7)
