"""Wrong calls of a layer, made of a right one: each argument in turn is what it should not be."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.ab import Arguments
from tests.wrong_calls import values

Path = tuple[Any, ...]
"""Where a value stands within arguments: the name of one, then keys and positions."""

Edit = Callable[[dict[str, Any]], object]
"""Edits arguments, by name, between the passes."""


class Case(NamedTuple):
    """A call, and what is done between its passes.

    Attributes:
        name: of the argument, and what is wrong with it.
        call: the arguments, all by name.
        edit: between the passes.
    """

    name: str
    call: Arguments
    edit: Edit | None = None


class Shapes(NamedTuple):
    """Sizes by which values are told apart; no two may be equal.

    Attributes:
        num_nodes: rows of features of nodes.
        num_edges: rows of features of edges.
        num_kinds: of edges and of nodes.
    """

    num_nodes: int
    num_edges: int
    num_kinds: int


def recorded(layer: nn.Module, call: Callable[[Any], Any]) -> dict[str, Any]:
    """The arguments, by name, with which a function calls a layer first."""
    try:
        call(_Recorder(layer))
    except _FirstCall as found:
        args, kwargs = found.args
    else:
        raise ValueError(f"{type(layer).__name__} is not called")
    bound = inspect.signature(layer.forward).bind(*args, **kwargs)
    return dict(bound.arguments)


class _FirstCall(BaseException):
    """The first call of a layer, with its arguments."""


class _Recorder:
    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _FirstCall(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def cases(
    layer: nn.Module,
    given: dict[str, Any],
    shapes: Shapes,
    graphs: Callable[[Any], dict[str, Any]] | None = None,
) -> list[Case]:
    """The call itself, and wrong ones made of it.

    Args:
        layer: the layer.
        given: its arguments in a right call, by name.
        shapes: of its graph.
        graphs: what may stand in place of a graph that is no tensor.
    """
    found = [Case("right", ((), given))]
    for path, value in _paths(given):
        name = ".".join(map(str, path))
        found += [
            Case(f"{name}: {what}", ((), _replaced(given, path, wrong)))
            for what, wrong in _wrong(value, shapes, graphs).items()
        ]
        if isinstance(value, Tensor):
            found += [
                Case(f"{name}: {what} between the passes", ((), given), _at(path, edit))
                for what, edit in _EDITS[value.is_floating_point()].items()
            ]
    found += [
        Case(f"{name}: {what}", ((), {**given, name: wrong}))
        for name, wrongs in _not_given(layer, given, shapes).items()
        for what, wrong in wrongs.items()
    ]
    return found


def _paths(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The values within arguments, with tuples and what they consist of."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _paths(part, (*path, key))
        return
    yield path, value
    if isinstance(value, tuple):
        for position, part in enumerate(value):
            yield from _paths(part, (*path, position))


def _replaced(value: Any, path: Path, by: Any) -> Any:
    if not path:
        return by
    if isinstance(value, dict):
        return {**value, path[0]: _replaced(value[path[0]], path[1:], by)}
    parts = list(value)
    parts[path[0]] = _replaced(parts[path[0]], path[1:], by)
    return tuple(parts)


def _wrong(
    value: Any, shapes: Shapes, graphs: Callable[[Any], dict[str, Any]] | None
) -> dict[str, Any]:
    """The values that may stand in place of one."""
    if isinstance(value, tuple):
        return {
            "None last": (*value[:-1], None),
            "None first": (None, *value[1:]),
            "a list": list(value),
            "one less": value[:-1],
            "one more": (*value, value[-1]),
            "the other way round": value[::-1],
        }
    if not isinstance(value, Tensor):
        return graphs(value) if graphs is not None and hasattr(value, "num_edges") else {}
    if not value.is_floating_point():
        if value.dim() == 2:
            return values.graphs(value, shapes.num_nodes) | values.adjacencies(
                value, shapes.num_nodes
            )
        return values.of_kinds(value, shapes.num_kinds) if value.dim() == 1 else {}
    is_of_edges = len(value) == shapes.num_edges
    return values.of_edges(value) if is_of_edges else values.of_nodes(value)


def _not_given(
    layer: nn.Module, given: dict[str, Any], shapes: Shapes
) -> dict[str, dict[str, Any]]:
    """Values for arguments that a right call leaves out, by their names."""
    features = torch.linspace(0.5, 2, 3 * shapes.num_edges).view(-1, 3)
    kinds = torch.arange(shapes.num_edges) % shapes.num_kinds
    known: dict[str, dict[str, Any]] = {
        "edge_weight": values.of_edges(features[:, 0].contiguous()),
        "edge_attr": values.of_edges(features),
        "edge_type": values.of_kinds(kinds, shapes.num_kinds),
        "size": values.sizes(shapes.num_nodes),
        "return_attention_weights": {"true": True, "false": False, "a number": 3},
        "get_attention": {"true": True},
        "batch": values.of_kinds(torch.arange(shapes.num_nodes) // 4, shapes.num_nodes),
        "dim_size": {"right": shapes.num_nodes, "small": 1, "negative": -1, "a float": 9.0},
        "dim": {"first": 0, "last": -1, "too large": 5},
    }
    taken = inspect.signature(layer.forward).parameters
    return {name: wrong for name, wrong in known.items() if name in taken and name not in given}


def _at(path: Path, edit: Callable[[Tensor], object]) -> Edit:
    def edited(arguments: dict[str, Any]) -> None:
        value: Any = arguments
        for key in path:
            value = value[key]
        edit(value)

    return edited


# By whether values are floating-point numbers.
_EDITS: dict[bool, dict[str, Callable[[Tensor], object]]] = {
    False: {
        "turned round": lambda v: v.copy_(v.flip(-1)),
        "turned round through .data": lambda v: v.data.copy_(v.flip(-1)),
    },
    True: {
        "doubled": lambda v: v.detach().mul_(2),
        "doubled through .data": lambda v: v.data.mul_(2),
    },
}
