"""The arguments of messages before they are gathered, found as upstream's ``collect`` does.

How they are found is kept for calls of the same kind: with tensors of the same dtypes and channels,
whatever their numbers of nodes and edges.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn.conv import MessagePassing

from fastgraph.edge_programs.frozen import PLAIN, UnknownError, frozen
from fastgraph.edge_programs.node_counts import NUM_GATHERED, NUM_ROWS
from fastgraph.edge_programs.program import Place
from fastgraph.edge_programs.traced import Argument, Index
from fastgraph.plugins.refusal import Refusal

_ENDS = ("edge_index_i", "edge_index_j", "index")
_SIZES = ("size_i", "size_j", "dim_size")
NEVER = ("edge_index", "adj_t", "size")
"""Arguments that no message that is traced takes."""
SPECIAL = frozenset((*_ENDS, *_SIZES, *NEVER, "ptr"))
"""Arguments that are of the graph."""

Described = tuple[tuple[str, object], ...]
Taken = tuple[tuple[str, Any], ...]
"""The arguments of a message, with their defaults."""


class Collected(NamedTuple):
    """The arguments of a message.

    Attributes:
        num_in: the number of gathered nodes.
        num_out: that of aggregating nodes.
        tensors: by the names of arguments.
        described: all arguments.
    """

    num_in: int
    num_out: int
    tensors: dict[str, Tensor]
    described: Described


def key_of(edge_index: Any, arguments: Mapping[str, Any]) -> tuple[object, ...] | None:
    """A key that calls share whose arguments are found in the same way; ``None`` if none does."""
    if type(edge_index) is not Tensor or edge_index.is_nested:
        return None
    shape = edge_index.shape
    if len(shape) != 2 or edge_index.layout is not torch.strided:
        return None
    num_edges, device = shape[1], edge_index.device
    found: list[object] = [shape[0], edge_index.dtype, device]
    for name, value in arguments.items():
        if name == "size" and value is not None:
            if type(value) is not tuple and type(value) is not list:
                return None
            if not all(part is None or type(part) is int for part in value):
                return None
            found += name, *[part is None for part in value]
            continue
        parts = (value,)
        if type(value) is tuple:
            parts = value
            found.append(len(value))
        found.append(name)
        for part in parts:
            kind = type(part)
            if kind is Tensor or kind is Parameter:
                if part.is_nested or part.device != device or part.layout is not torch.strided:
                    return None
                shape = part.shape
                count = len(shape)  # part of a shape takes longer to get than all of it
                found += count, part.dtype, shape[1] if count == 2 else shape[1:]
                found.append(count > 0 and shape[0] == num_edges)
            elif kind in PLAIN:
                found.append(frozen(part))
            elif part is None:
                found.append(None)
            else:
                return None
    return tuple(found)


@dataclass(frozen=True)
class Kept:
    """How the arguments of calls of one kind are found.

    Attributes:
        described: the arguments.
        taken: the name of each that is a tensor, that of the argument of ``propagate`` and the
            position in it, if that is a pair.
        ends: the end of edges, the same name and position of all features of nodes.
        shapes: of the arguments that are neither of nodes nor of edges, by name.
        own: the end of aggregating nodes.
    """

    described: Described
    taken: tuple[tuple[str, str, int | None], ...]
    ends: tuple[tuple[int, str, int | None], ...]
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    own: int

    @classmethod
    def of(cls, module: MessagePassing, arguments: Mapping[str, Any], collected: Collected) -> Kept:
        """How arguments were found."""
        own = int(module.flow == "source_to_target")
        taken: list[tuple[str, str, int | None]] = []
        ends: list[tuple[int, str, int | None]] = []
        for name in collected.tensors:
            is_lifted = name[-2:] in ("_i", "_j")
            key = name[:-2] if is_lifted else name
            is_pair = isinstance(arguments[key], (tuple, list))
            end = own if name[-2:] == "_i" else 1 - own
            taken.append((name, key, end if is_pair else None))
        for name, _ in collected.described:
            if name in SPECIAL or name[-2:] not in ("_i", "_j"):
                continue
            value = arguments[name[:-2]]
            if isinstance(value, (tuple, list)):
                ends += [(k, name[:-2], k) for k, part in enumerate(value) if part is not None]
            elif value is not None:
                ends.append((own if name[-1] == "i" else 1 - own, name[:-2], None))
        shapes = tuple(
            (name, argument.channels)
            for name, argument in collected.described
            if isinstance(argument, Argument) and argument.place == "parameter"
        )
        return cls(collected.described, tuple(taken), tuple(dict.fromkeys(ends)), shapes, own)

    def collected(self, arguments: Mapping[str, Any]) -> Collected | None:
        """The arguments of another call of this kind, unless its sizes do not fit."""
        tensors = {}
        for name, key, position in self.taken:
            value = arguments[key]
            tensors[name] = value if position is None else value[position]
        for name, expected in self.shapes:
            if tensors[name].shape != expected:
                return None
        size = arguments.get("size")
        sizes: list[Any] = [None, None] if size is None else list(size)
        for end, key, position in self.ends:
            value = arguments[key]
            count = (value if position is None else value[position]).shape[0]
            if sizes[end] is None:
                sizes[end] = count
            elif sizes[end] != count:
                return None
        num_out, num_in = sizes[self.own], sizes[1 - self.own]
        num_out, num_in = (
            num_in if num_out is None else num_out,
            num_out if num_in is None else num_in,
        )
        if num_out is None or min(num_in, num_out) < 0:
            return None
        return Collected(num_in, num_out, tensors, self.described)


def collect(
    module: MessagePassing,
    taken: Taken,
    arguments: Mapping[str, Any],
    num_edges: int,
    index_dtype: torch.dtype,
) -> Collected | Refusal:
    """The arguments of a message, or why there are none.

    Args:
        module: the layer.
        taken: the arguments that its message takes.
        arguments: those of ``propagate``.
        num_edges: of the graph.
        index_dtype: the dtype of its ``edge_index``.
    """
    size = arguments.get("size")
    sizes = [None, None] if size is None else list(size)
    if len(sizes) != 2:
        return Refusal("a size that is no pair")
    is_forward = module.flow == "source_to_target"
    own = {"i": 1, "j": 0} if is_forward else {"i": 0, "j": 1}
    tensors: dict[str, Tensor] = {}
    described: list[tuple[str, object]] = []
    for name, default in taken:
        if name in SPECIAL:
            described.append((name, _special(name, index_dtype)))
            continue
        is_lifted = name[-2:] in ("_i", "_j")
        key = name[:-2] if is_lifted else name
        value = arguments.get(key, inspect.Parameter.empty if is_lifted else default)
        if value is inspect.Parameter.empty:
            return Refusal(f"{key} is missing")
        if is_lifted:
            found = _lifted(module, name, value, sizes, own[name[-1]])
            if isinstance(found, Refusal):
                return found
            value = found
        if isinstance(value, Tensor):
            if value.layout is not torch.strided or value.is_nested:
                return Refusal(f"{key} is not a dense tensor")
            tensors[name] = value
            described.append((name, place_of(name, value, num_edges, is_lifted)))
        else:
            try:
                described.append((name, Value(frozen(value), value)))
            except UnknownError as unknown:
                return Refusal(f"its message takes {name}, {unknown}")
    num_out, num_in = sizes[own["i"]], sizes[own["j"]]
    num_out, num_in = num_in if num_out is None else num_out, num_out if num_in is None else num_in
    if type(num_out) is not int or type(num_in) is not int or min(num_in, num_out) < 0:
        return Refusal("the number of nodes is not known")
    return Collected(num_in, num_out, tensors, tuple(described))


def _special(name: str, index_dtype: torch.dtype) -> object:
    """The stand-in for an argument that is of the graph."""
    if name == "ptr":
        return Value(name, None)
    place: Place = "gathered" if name[-2:] == "_j" else "row"
    if name in _ENDS:
        return Index(place, index_dtype)
    return Value(name, NUM_ROWS if place == "row" else NUM_GATHERED)


@dataclass(frozen=True)
class Value:
    """A value that a message takes as it is, compared by its frozen form."""

    frozen: object
    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and self.frozen == other.frozen

    def __hash__(self) -> int:
        return hash(self.frozen)


def _lifted(
    module: MessagePassing, name: str, value: Any, sizes: list[Any], end: int
) -> Tensor | Refusal | None:
    """The features of nodes that an argument is gathered from."""
    node_dim = module.node_dim
    if isinstance(value, (tuple, list)):
        if len(value) != 2 or module.flow != "source_to_target":
            return Refusal(f"{name} is of features that are no pair of sources and destinations")
        parts = list(enumerate(value))
        value = value[end]
    else:
        parts = [(end, value)]
    for number, part in parts:
        if part is None:
            continue
        if not isinstance(part, Tensor) or part.is_nested or part.dim() == 0:
            return Refusal(f"{name} is of a {type(part).__name__}, not of a tensor of nodes")
        if node_dim != 0 and node_dim != -part.dim():
            return Refusal(f"features of {part.dim()} dimensions with node_dim={node_dim}")
        if sizes[number] is None:
            sizes[number] = part.shape[0]
        elif sizes[number] != part.shape[0]:
            return Refusal(f"{name} is of features that do not fit the number of nodes")
    found: Tensor | None = value
    return found


def place_of(name: str, tensor: Tensor, num_edges: int, is_lifted: bool) -> Argument:
    """A tensor as an argument of a message."""
    if is_lifted:
        place: Any = "row" if name[-1] == "i" else "gathered"
    elif tensor.dim() > 0 and tensor.shape[0] == num_edges:
        place = "edge"
    else:
        return Argument("parameter", tuple(tensor.shape), tensor.dtype)
    return Argument(place, tuple(tensor.shape[1:]), tensor.dtype)
