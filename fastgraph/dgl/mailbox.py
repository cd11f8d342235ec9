"""The messages of a node as a function that reduces them takes them while it is traced.

``nodes.mailbox["m"]`` is ``[nodes, degree, *channels]`` for DGL. Here it stands for the messages of
all edges, and what is computed with them is computed for edges. Reductions over the second
dimension are outputs of the edge program; what is made of these, for nodes, is written down as
expressions, which are computed after it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fastgraph.dgl.batches import refuse
from fastgraph.dgl.expressions import DEGREE, OUTPUT, STATE, Expression, apply
from fastgraph.edge_programs.dtypes import HALVES
from fastgraph.edge_programs.evaluation import Edges, softmax_weights
from fastgraph.edge_programs.recording import active_recorder
from fastgraph.edge_programs.traced import Reduction


def winner(message: Tensor) -> tuple[Tensor, ...]:
    """The message itself: its extremum gives its gradient to one edge."""
    return (message,)


_OF_TWO = (
    *("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "pow"),
    *("maximum", "minimum"),
)
_MAPS = (
    *(*_OF_TWO, "square", "neg", "abs", "sign", "sqrt", "exp", "expm1", "log", "log1p"),
    *("sigmoid", "tanh", "relu", "leaky_relu", "elu", "silu", "gelu", "softplus", "clamp"),
)
_OPERATORS = {
    **{"__add__": "add", "__sub__": "sub", "__mul__": "mul", "__truediv__": "div"},
    **{"__pow__": "pow", "__neg__": "neg", "__abs__": "abs"},
}
_SWAPPED = {"__radd__": "add", "__rsub__": "sub", "__rmul__": "mul", "__rtruediv__": "div"}
_FOLDS, _EXTREMA = ("sum", "mean"), ("max", "min", "amax", "amin")
_SHAPES = ("unsqueeze", "squeeze")
_NAMES = (*_MAPS, *_FOLDS, *_EXTREMA, *_SHAPES, "softmax", "cat", "linear", "size", "dim")

_NAME_OF = {
    function: name
    for name in _NAMES
    for owner in (torch, Tensor, F)
    if (function := getattr(owner, name, None)) is not None
}


class _Extremum(tuple[Any, ...]):
    """Extrema and their indices, of which nothing is known."""

    @property
    def values(self) -> Any:
        """The extrema."""
        return self[0]


class Ledger:
    """The results that a function which reduces messages computes with them.

    Args:
        edges: of the messages, where these are numbers; ``None`` while they are recorded.
        index: the aggregating nodes, as a recorder knows them.
        named: the names of parameters, by their identities.
    """

    def __init__(self, edges: Edges | None, index: Tensor, named: Mapping[int, str]) -> None:
        self._edges, self._index, self._named = edges, index, named
        self.outputs: list[tuple[Reduction, tuple[Tensor, ...]]] = []

    def softmax(self, scores: Tensor) -> Tensor:
        """The softmax over the edges of each node."""
        recorder = active_recorder()
        if recorder is not None:
            return recorder.softmax(scores, self._index)
        assert self._edges is not None
        return softmax_weights(scores, self._edges)

    def reduced(self, name: str, values: Tensor) -> OfNodes:
        """The reduction of values of edges, an output of the program."""
        is_winner = name in ("max", "min")
        reduction = Reduction(name.removeprefix("a"), winner if is_winner else None)
        taken = (reduction, (values,))
        for k, (known, (tensor,)) in enumerate(self.outputs):
            if known == reduction and tensor is values:
                return OfNodes(self, Expression(OUTPUT, (k,)), values.dim())
        self.outputs.append(taken)
        return OfNodes(self, Expression(OUTPUT, (len(self.outputs) - 1,)), values.dim())

    def state(self, tensor: Tensor) -> Expression:
        """A parameter as an expression."""
        if id(tensor) not in self._named:
            refuse("its reduction takes a tensor that is no argument, parameter or buffer")
        return Expression(STATE, (self._named[id(tensor)],))


class _Symbol:
    """A value of a ledger, with which functions of torch compute."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class that ``isinstance`` sees."""
        return Tensor

    @classmethod
    def __torch_function__(
        cls, function: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = _NAME_OF.get(function)
        if name is None:
            refuse(f"its reduction computes {getattr(function, '__name__', function)}")
        return _computed(name, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name not in _NAMES:
            refuse(f"its reduction takes {name} of messages")
        return partial(_method, name, self)

    def __array_ufunc__(self, function: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        name = {np.log: "log", np.sqrt: "sqrt", np.exp: "exp", np.log1p: "log1p"}.get(function)
        name = name or {np.multiply: "mul", np.add: "add", np.divide: "div"}.get(function)
        if name is None or method != "__call__" or kwargs:
            refuse(f"its reduction computes {function.__name__} of numpy")
        return _computed(name, args, {})


def _method(name: str, symbol: _Symbol, *args: Any, **kwargs: Any) -> Any:
    return _computed(name, (symbol, *args), kwargs)


def _operator(name: str, *, is_swapped: bool) -> Callable[..., Any]:
    def compute(self: _Symbol, *others: Any) -> Any:
        return _computed(name, (*others, self) if is_swapped else (self, *others), {})

    return compute


for _dunder, _name in (*_OPERATORS.items(), *_SWAPPED.items()):
    setattr(_Symbol, _dunder, _operator(_name, is_swapped=_dunder in _SWAPPED))


def _refuse_use(*_: object) -> Any:
    refuse("its reduction depends on values, for example in a branch")


for _dunder in (
    *("__bool__", "__int__", "__float__", "__index__", "__len__", "__iter__", "__contains__"),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__setitem__"),
    *("__iadd__", "__isub__", "__imul__", "__itruediv__", "__matmul__", "__format__", "__hash__"),
):
    setattr(_Symbol, _dunder, _refuse_use)


def _refuse_items(*_: object) -> Any:
    refuse("its reduction takes a part of what it computes with")


setattr(_Symbol, "__getitem__", _refuse_items)  # noqa: B010  # as the others


_ALL = slice(None)


class Mail(_Symbol):
    """Messages, ``[nodes, degree, *channels]``.

    Args:
        edges: the same of edges, ``[E, *channels]``.
    """

    def __init__(self, ledger: Ledger, edges: Tensor) -> None:
        super().__init__(ledger)
        self.edges = edges

    def __getitem__(self, key: Any) -> Mail:
        """Some channels of all messages."""
        parts = key if isinstance(key, tuple) else (key,)
        is_known = all(type(part) is int or isinstance(part, slice) for part in parts)
        if not is_known or parts[:2] != (_ALL, _ALL):
            _refuse_items()
        return Mail(self.ledger, self.edges[(_ALL, *parts[2:])])

    @property
    def shape(self) -> tuple[Any, ...]:
        """Of which the first number is nothing to compute with."""
        return object(), OfNodes(self.ledger, Expression(DEGREE, ()), 0), *self.edges.shape[1:]


class OfNodes(_Symbol):
    """A value of each node, ``[nodes, *channels]``.

    Args:
        expression: how it is computed.
        rank: its dimensions; 0 for a number that is another one for each degree.
        is_shared: true for one of all messages of a node, ``[nodes, 1, *channels]``.
    """

    def __init__(
        self, ledger: Ledger, expression: Expression, rank: int, *, is_shared: bool = False
    ) -> None:
        super().__init__(ledger)
        self.expression, self.rank, self.is_shared = expression, rank, is_shared

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """A tensor, or the in-degree, which is a number."""
        return Tensor if self.rank else int


class Scaled(_Symbol):
    """Messages that values of their node multiply or divide, which may follow a sum.

    Args:
        mail: the messages without these.
        factors: the values, each one of all messages of a node, with the name of what it does.
    """

    def __init__(self, mail: Mail, factors: tuple[tuple[str, OfNodes], ...]) -> None:
        super().__init__(mail.ledger)
        self.mail, self.factors = mail, factors


def _is_tensor(value: object) -> bool:
    """True for a tensor itself; what stands for one says that it is one, too."""
    return issubclass(type(value), Tensor)


def _computed(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The value of a function of torch of some symbols."""
    given = dict(kwargs)
    if given.pop("inplace", False) or given.pop("out", None) is not None:
        refuse("its reduction works in place")
    if given.pop("dtype", None) is not None or given.pop("_stacklevel", 3) != 3:
        refuse("its reduction asks for another dtype")
    if any(isinstance(value, _Symbol) for value in given.values()):
        refuse(f"its reduction names an argument of {name}")
    values = args[0] if name == "cat" else args
    if any(isinstance(value, Scaled) for value in values) or _is_scaling(name, args, given):
        return _of_scaled(name, args, given)
    if any(isinstance(value, Mail) for value in values):
        return _of_mail(name, args, given)
    return _of_nodes(name, args, given)


def _of_mail(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name == "cat":
        refuse("its reduction concatenates messages")
    mail = next(value for value in args if isinstance(value, Mail))
    if name == "size":
        return _size(mail, *args[1:], **kwargs)
    if name == "dim":
        return mail.edges.dim() + 1
    if name in (*_MAPS, "linear"):
        return Mail(mail.ledger, _map(name, args, kwargs))
    if args[0] is not mail:
        refuse(f"its reduction computes {name} of messages and other values")
    return _along(name, mail, *args[1:], **kwargs)


_PRODUCTS, _QUOTIENTS = ("mul", "multiply"), ("div", "divide", "true_divide")


def _is_scaling(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if values of all messages of a node multiply or divide these."""
    if name not in (*_PRODUCTS, *_QUOTIENTS) or len(args) != 2 or kwargs:
        return False
    first, second = args[::-1] if name in _PRODUCTS and isinstance(args[0], OfNodes) else args
    is_of_node = isinstance(second, OfNodes) and second.is_shared
    return is_of_node and isinstance(first, (Mail, Scaled))


def _of_scaled(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation of messages and values of their nodes, or of what that has made."""
    if _is_scaling(name, args, kwargs):
        messages, factor = args[::-1] if isinstance(args[0], OfNodes) else args
        mail, factors = _parts(messages)
        if factor.rank != mail.edges.dim() + 1:
            refuse("its reduction broadcasts over the messages of a node")
        if mail.edges.dtype in HALVES:
            refuse(
                "its reduction scales messages of a half type, whose sums may not have its range"
            )
        return Scaled(mail, (*factors, (name, factor)))
    is_quotient = name in _QUOTIENTS and not isinstance(args[-1], Scaled)
    if (name in _PRODUCTS or is_quotient) and len(args) == 2 and not kwargs:
        (first, own), (second, others) = map(_parts, args)
        return Scaled(_of_mail(name, (first, second), {}), (*own, *others))
    scaled, *rest = args
    if not isinstance(scaled, Scaled) or any(isinstance(value, _Symbol) for value in rest):
        refuse(f"its reduction computes {name} of messages and values of nodes together")
    if name == "unsqueeze":
        mail = _along(name, scaled.mail, *rest, **kwargs)
        return Scaled(
            mail, tuple((n, _computed(name, (f, *rest), kwargs)) for n, f in scaled.factors)
        )
    dim, keepdim = _dimension(*rest, **kwargs)
    if name not in _FOLDS or dim != 1:
        refuse(f"its reduction computes {name} of messages and values of nodes together")
    found = _along(name, scaled.mail, dim, keepdim=True)
    for way, factor in scaled.factors:
        found = _computed(way, (found, factor), {})
    return found if keepdim else _computed("squeeze", (found, 1), {})


def _parts(value: Any) -> tuple[Any, tuple[tuple[str, OfNodes], ...]]:
    """Messages without the factors of their nodes, and these; a number has none."""
    return (value.mail, value.factors) if isinstance(value, Scaled) else (value, ())


def _dimension(dim: Any = None, keepdim: bool = False) -> tuple[Any, bool]:
    return dim, keepdim


def _size(mail: Mail, dim: Any = None) -> Any:
    return mail.shape if dim is None else mail.shape[operator.index(dim)]


def _map(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """An operation of each message by itself."""
    ranks = {a.edges.dim() for a in args if isinstance(a, Mail)}
    others = [a for a in args if _is_tensor(a)]
    if len(ranks) > 1 or (name != "linear" and any(a.dim() >= max(ranks) for a in others)):
        refuse("its reduction broadcasts over the messages of a node")
    if any(isinstance(a, OfNodes) for a in args):
        refuse("its reduction computes with messages and values of nodes together")
    own = [a.edges if isinstance(a, Mail) else a for a in args]
    return apply(name, own, kwargs)


def _along(name: str, mail: Mail, dim: Any = None, keepdim: bool = False) -> Any:
    """An operation along dimensions of messages."""
    edges, rank = mail.edges, mail.edges.dim() + 1
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        (dim,) = dim
    if type(dim) is not int:
        refuse(f"its reduction computes {name} along all or several dimensions")
    is_new = name == "unsqueeze"
    place = dim + rank + is_new if dim < 0 else dim
    if place < 1 or (is_new and place < 2):
        refuse(f"its reduction computes {name} across nodes")
    if place > 1:
        further = {"keepdim": keepdim} if name in (*_FOLDS, *_EXTREMA) else {}
        if name in ("max", "min"):
            refuse(f"its reduction computes {name} along channels")
        return Mail(mail.ledger, apply(name, (edges,), {"dim": place - 1, **further}))
    if name == "softmax":
        return Mail(mail.ledger, mail.ledger.softmax(edges))
    if name not in (*_FOLDS, *_EXTREMA):
        refuse(f"its reduction computes {name} of messages")
    found = mail.ledger.reduced(name, edges)
    if keepdim:
        found = _computed("unsqueeze", (found, 1), {})
        found.is_shared = True
    return _Extremum((found, object())) if name in ("max", "min") else found


def _of_nodes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OfNodes:
    """An operation of each node by itself, after the program."""
    taken = args[0] if name == "cat" else args
    symbols = [value for value in taken if isinstance(value, OfNodes)]
    ledger, ranks = symbols[0].ledger, {s.rank for s in symbols if s.rank}
    rank = max(ranks, default=0)
    is_shared = rank > 0 and all(s.is_shared for s in symbols if s.rank)
    if name in _MAPS:
        tensors = [value for value in taken if _is_tensor(value)]
        if len(ranks) > 1 or any(t.dim() >= max(rank, 1) for t in tensors):
            refuse("its reduction broadcasts over nodes")
        if name not in _OF_TWO and (len(symbols) > 1 or args[0] is not symbols[0]):
            refuse(f"its reduction computes {name} with a value of nodes for a setting")
        args = tuple(_of_rank(a, rank) for a in args)
    elif rank == 0 or kwargs.keys() - {"dim", "weight", "bias"}:
        refuse(f"its reduction computes {name}")
    elif name == "cat":
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        if len(symbols) < len(taken) or len(ranks) > 1 or type(dim) is not int or dim % rank == 0:
            refuse("its reduction concatenates across nodes")
        args, kwargs = (list(args[0]), dim % rank), {}
    elif name in _SHAPES:
        (dim,) = (*args[1:], *kwargs.values()) if len(args) + len(kwargs) == 2 else (None,)
        is_new = name == "unsqueeze"
        if type(dim) is not int or dim % (rank + is_new) == 0:
            refuse(f"its reduction computes {name} across nodes")
        dim %= rank + is_new
        is_shared = is_shared and (is_new or dim > 1)
        args, kwargs, rank = (args[0], dim), {}, rank + (1 if is_new else -1)
    elif name != "linear" or rank < 2:
        refuse(f"its reduction computes {name} of what it has reduced")
    made = _expression(ledger, name, args, kwargs)
    return OfNodes(ledger, made, rank, is_shared=is_shared and name in (*_MAPS, *_SHAPES))


def _of_rank(value: Any, rank: int) -> Any:
    """A number of each node with as many dimensions as others have."""
    if not isinstance(value, OfNodes) or value.rank or rank == 0:
        return value
    shaped = Expression("reshape", (value.expression, (-1, *(1,) * (rank - 1))))
    return OfNodes(value.ledger, shaped, rank)


def _expression(
    ledger: Ledger, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Expression:
    named = tuple((key, _argument(ledger, name, value)) for key, value in kwargs.items())
    return Expression(name, tuple(_argument(ledger, name, value) for value in args), named)


# No function within another, which would keep messages alive in a cycle.
def _argument(ledger: Ledger, name: str, value: Any) -> Any:
    if isinstance(value, OfNodes):
        return value.expression
    if _is_tensor(value):
        return ledger.state(value)
    if isinstance(value, (list, tuple)):
        return tuple(_argument(ledger, name, part) for part in value)
    if value is None or isinstance(value, (int, float)):
        return value
    refuse(f"its reduction computes {name} with a {type(value).__name__}")
