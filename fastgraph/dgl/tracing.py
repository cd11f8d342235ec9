"""Functions that users pass to DGL's message passing, traced into an edge program.

A function of edges and a function that reduces its messages are called with batches that stand for
all edges (:mod:`fastgraph.dgl.batches`) and nodes (:mod:`fastgraph.dgl.mailbox`), once for each
state of what they read and each description of the features that they ask for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from dgl.frame import Column
from dgl.init import zero_initializer
from torch import Tensor, nn

from fastgraph.dgl.batches import EdgeFeatures, Features, NodeFeatures, refuse
from fastgraph.dgl.expressions import DATA, OUTPUT, Expression
from fastgraph.dgl.functions import Pair
from fastgraph.dgl.mailbox import Ledger, Mail, OfNodes, winner
from fastgraph.edge_programs.evaluation import Edges
from fastgraph.edge_programs.reading import Guard, Reading
from fastgraph.edge_programs.recorded import is_part_of_argument
from fastgraph.edge_programs.recording import active_recorder
from fastgraph.edge_programs.trace import trace
from fastgraph.edge_programs.traced import Argument, Index, Reduced, Reduction, Traced
from fastgraph.layers.prepared import Prepared
from fastgraph.layers.tracing import Known, read_message, state_refusal_of
from fastgraph.plugins.refusal import Refusal
from fastgraph.routing.status import counted_as_whole

KINDS: Mapping[str, Any] = {"src": "gathered", "dst": "row", "data": "edge"}
"""The features of an edge, as functions name them, and the places of programs that have them."""

REDUCTIONS = {
    "sum": Reduction("sum"),
    "mean": Reduction("mean"),
    "max": Reduction("max", winner),
    "min": Reduction("min", winner),
}
"""DGL's own functions that reduce messages."""

COPIES = {"copy_u": "src", "copy_e": "data"}
"""DGL's own messages that are features as they are."""

_INDEX = "index"


@dataclass(frozen=True)
class Call:
    """The functions and features of a call of message passing.

    Attributes:
        pair: the functions of users.
        message: that of DGL; ``None`` for one of users.
        reduce: the same.
        frames: the features, by the names of :data:`KINDS`.
        num_edges: of the graph.
        is_of_edges: true if nothing is reduced: messages are new features of edges.
    """

    pair: Pair
    message: Any
    reduce: Any
    frames: Mapping[str, Any]
    num_edges: int
    is_of_edges: bool = False

    @property
    def around(self) -> dict[str, Tensor]:
        """The variables around functions that are tensors, by the names of arguments."""
        return {
            f"{prefix}_{name}": tensor
            for prefix, function in (("message", self.pair.message), ("reduce", self.pair.reduce))
            if function is not None
            for name, tensor in function.tensors.items()
        }

    def key(self) -> tuple[object, ...]:
        """The parts that must be equal for a tracing to hold, but for features and the layer."""
        functions = self.pair.functions
        return (
            type(self.pair.layer),
            self.is_of_edges,
            torch.get_default_dtype(),
            *((id(f.function.__code__), f.state) for f in functions),
            *((name, self._described(tensor)) for name, tensor in self.around.items()),
            *(None if f is None else _text_of(f) for f in (self.message, self.reduce)),
        )

    def described(self) -> dict[str, Argument]:
        """The variables around functions as arguments of a message."""
        return {name: self._described(tensor) for name, tensor in self.around.items()}

    def _described(self, tensor: Tensor) -> Argument:
        if tensor.dim() > 0 and tensor.shape[0] == self.num_edges:
            return Argument("edge", tuple(tensor.shape[1:]), tensor.dtype)
        return Argument("parameter", tuple(tensor.shape), tensor.dtype)

    def column(self, kind: str, name: str) -> Argument | str | None:
        """Features as an argument of a message, why they are none, or ``None`` for no features."""
        column = self.frames[kind]._columns.get(name)
        if column is None:
            return None
        if type(column) is not Column:
            return "which are not there yet"
        return Argument(KINDS[kind], tuple(column.shape), column.dtype)


def reduction_refusal(call: Call) -> Refusal | None:
    """Why messages are not reduced as a program would, of which nothing is asked."""
    if call.message is not None and call.message.name not in COPIES:
        return Refusal(f"messages by {call.message.name} that a function of users reduces")
    if call.is_of_edges:
        return None
    if call.reduce is not None:
        if call.reduce.name in REDUCTIONS:
            return None
        return Refusal(f"messages of users reduced by {call.reduce.name}")
    frame = call.frames["dst"]
    if frame._initializers or frame._default_initializer not in (None, zero_initializer):
        return Refusal("nodes without edges that are initialised by a function of users")
    return None


def _text_of(function: Any) -> tuple[str, ...]:
    """A function of DGL's as text."""
    return type(function).__name__, *(f"{k}={v}" for k, v in sorted(vars(function).items()))


@dataclass(frozen=True)
class State:
    """The state in which a tracing holds.

    Attributes:
        guards: of the functions that were read.
        codes: of these, whose identities are in keys.
        columns: the features that they ask for.
    """

    guards: tuple[Guard, ...]
    codes: tuple[Any, ...]
    columns: tuple[tuple[str, str, Argument | str | None], ...]

    def holds(self, now: Call) -> bool:
        """True if another call would be traced in the same way."""
        for kind, name, found in self.columns:
            if now.column(kind, name) != found:
                return False
        return self.holds_around(now.pair.layer)

    def holds_around(self, layer: nn.Module | None) -> bool:
        """The same where the features are known to be the same, of the layer and the code."""
        return False not in [guard.holds(layer) for guard in self.guards]


def traced(call: Call, device: torch.device) -> Known:
    """The program of a call's functions, or why they are none.

    Args:
        call: the functions.
        device: of its features.
    """
    layer = call.pair.layer
    codes = tuple(f.function.__code__ for f in call.pair.functions)
    refusal = state_refusal_of(layer, device)
    if any(0 in a.channels for a in call.described().values()):
        refusal = Refusal("a variable around its functions is a tensor without values")
    if refusal is not None:
        guards = tuple(f.reading(layer).guard(layer) for f in call.pair.functions)
        return Known(State(guards, codes, ()), refusal)
    columns = {
        (kind, name): call.column(kind, name)
        for kind, frame in call.frames.items()
        for name in frame._columns
    }
    described = (*columns.values(), *call.described().values())
    dtypes = {a.dtype for a in described if isinstance(a, Argument) and a.dtype.is_floating_point}
    asked: set[tuple[str, str]] = set()
    # There is one as a rule; of several, functions may take those of one alone.
    for dtype in sorted(dtypes, key=str) or [torch.float32]:
        tracing = _Tracing(call, columns, dtype, asked)
        guards_found, found = read_message(tracing.read, layer)
        if not tracing.asks_for_others:
            break
    read = tuple((kind, name, columns.get((kind, name))) for kind, name in sorted(asked))
    state = State(tuple(guards_found), codes, read)
    if isinstance(found, Traced) and found.kept:
        found = Refusal(f"its message is no edge program: it sets the attribute {found.kept[0]}")
    if isinstance(found, Traced) and found.types is not None:
        found = Refusal("its message takes types of edges")
    if isinstance(found, Refusal):
        return Known(state, found)
    winning = frozenset(k for k, r in enumerate(found.reductions) if r.values is winner)
    arguments = {f"{kind}_{name}": a for (kind, name), a in columns.items()} | call.described()
    return Known(state, Prepared.of(found, layer, arguments, winning))


class _Tracing:
    """The functions of a call while they are traced with values of one dtype.

    Args:
        call: the functions.
        columns: all features, described.
        dtype: of all values that they may take.
        asked: has the features that they ask for afterwards.

    Attributes:
        asks_for_others: true once they ask for features of another dtype.
    """

    def __init__(
        self,
        call: Call,
        columns: Mapping[tuple[str, str], Argument | str | None],
        dtype: torch.dtype,
        asked: set[tuple[str, str]],
    ) -> None:
        self._call, self._asked = call, asked
        self.asks_for_others = False
        reasons = {place: _reason_of(a, dtype) for place, a in columns.items()}
        self._others = {place: reason for place, reason in reasons.items() if reason is not None}
        self._arguments: dict[str, object] = {
            f"{kind}_{name}": a
            for (kind, name), a in columns.items()
            if a is not None and (kind, name) not in self._others
        }
        self._places = [place for place in columns if place not in self._others]
        self._arguments |= call.described()
        self._arguments[_INDEX] = Index("row")

    def read(self) -> tuple[list[Reading], Traced | Refusal]:
        """The functions as they were read, and their program."""
        functions = _Functions(self._call, self)
        with counted_as_whole(functions):
            found = trace(
                functions,
                self._arguments,
                functions.reduce,
                compared_numbers=functions.compared_numbers,
            )
        return functions.readings, found

    def features(self, kind: str, text: str, values: Mapping[str, Any]) -> Features:
        """The features of one kind, as a function takes them.

        Args:
            kind: of :data:`KINDS`.
            text: how the function names them.
            values: of all kinds, by the names of arguments.
        """
        own = {name: values[f"{kind}_{name}"] for k, name in self._places if k == kind}
        others = {name: reason for (k, name), reason in self._others.items() if k == kind}

        def asked(name: str) -> None:
            self._asked.add((kind, name))
            self.asks_for_others |= others.get(name, "").startswith("of ")

        return Features(text, own, others, asked)


def _reason_of(a: Argument | str | None, dtype: torch.dtype) -> str | None:
    """Why a function may not take features when it takes others of a dtype, if it may not."""
    if a is None or isinstance(a, str):
        return a
    if 0 in a.channels:
        return "which have no channels"
    return f"of {a.dtype}" if a.dtype.is_floating_point and a.dtype != dtype else None


@dataclass
class _Messages:
    """The messages, and the arguments of the function that made them."""

    messages: Mapping[str, Any]
    given: Mapping[str, Any]


@dataclass(eq=False)
class _Functions:
    """The functions of a call, called as a message of all arguments by name."""

    call: Call
    tracing: _Tracing
    layer: Any = field(init=False)
    readings: list[Reading] = field(init=False)

    def __post_init__(self) -> None:
        self.layer = self.call.pair.stand_in()
        self.readings = [f.reading(self.layer) for f in self.call.pair.functions]

    @property
    def __self__(self) -> Any:
        """The layer, whose state tracing replaces."""
        return self.layer

    def compared_numbers(self) -> set[int]:
        """The numbers with which the functions may compare the sizes of tensors."""
        return {number for reading in self.readings for number in reading.compared_numbers()}

    def __call__(self, **given: Any) -> _Messages:
        """The messages."""
        own = self.call.message
        if own is not None:
            kind = COPIES[own.name]
            features = self.tracing.features(kind, f"edges.{kind}", given)
            return _Messages({own.out_field: features[own.in_field]}, given)
        kinds = [self.tracing.features(kind, f"edges.{kind}", given) for kind in KINDS]
        made = self._read(0, "message", given, EdgeFeatures(*kinds))
        if not isinstance(made, dict):
            refuse("it gives no dictionary")
        return _Messages(made, given)

    def _read(self, number: int, prefix: str, given: Mapping[str, Any], batch: object) -> Any:
        function, reading = self.call.pair.functions[number], self.readings[number]
        tensors = {name: given[f"{prefix}_{name}"] for name in function.tensors}
        reading.function = function.with_variables(self.layer, tensors)
        try:
            return reading(batch)
        finally:
            reading.function = function.function

    def reduce(self, made: _Messages, state: Mapping[str, Tensor]) -> Reduced:
        """The values of edges that are reduced, and the expressions that are made of these."""
        if self.call.is_of_edges:
            return _of_edges(made.messages)
        own = self.call.reduce
        if own is not None:
            if own.msg_field not in made.messages:
                refuse(f"it gives no {own.msg_field}")
            reduced = (REDUCTIONS[own.name], (made.messages[own.msg_field],))
            return Reduced((reduced,), ((own.out_field, Expression(OUTPUT, (0,))),))
        given = made.given
        index = given[_INDEX]
        edges = None
        if active_recorder() is None:
            edges = Edges(index, index, int(index.max()) + 1)
        named = {id(tensor): name for name, tensor in state.items()}
        named |= {
            id(given[name]): name
            for name, a in self.call.described().items()
            if a.place == "parameter"
        }
        ledger = Ledger(edges, index, named)
        data = self.tracing.features("dst", "nodes.data", _OfNodes(ledger, given))
        mail = {name: Mail(ledger, tensor) for name, tensor in made.messages.items()}
        mailbox = Features("nodes.mailbox", mail, {}, lambda _: None)
        number = len(self.readings) - 1
        out = self._read(number, "reduce", given, NodeFeatures(data, mailbox))
        if self.readings[number].names("type"):
            refuse("its reduction looks at the type of what it computes with")
        if not isinstance(out, dict) or not out:
            refuse("its reduction gives no dictionary")
        for value in out.values():
            if not isinstance(value, OfNodes) or value.rank == 0:
                refuse("its reduction gives what is no value of nodes")
        if not ledger.outputs:
            refuse("its reduction reduces nothing")
        return Reduced(
            tuple(ledger.outputs), tuple((name, value.expression) for name, value in out.items())
        )


def _of_edges(messages: Mapping[str, Any]) -> Reduced:
    """The messages as they are, which must be new ones: callers may edit them."""
    recorder = active_recorder()
    for name, tensor in messages.items():
        known = recorder.known(tensor) if recorder is not None else None
        if recorder and known and is_part_of_argument(recorder.steps, known):
            refuse(f"it gives features of edges as they are ({name})")
    if len({id(tensor) for tensor in messages.values()}) < len(messages) or not messages:
        refuse("it gives one value of edges several times, or none")
    return Reduced(
        tuple((Reduction("edge"), (tensor,)) for tensor in messages.values()),
        tuple((name, Expression(OUTPUT, (k,))) for k, name in enumerate(messages)),
    )


class _OfNodes(Mapping[str, OfNodes]):
    """Features of nodes as values of a ledger, by the names of arguments."""

    def __init__(self, ledger: Ledger, given: Mapping[str, Any]) -> None:
        self._ledger, self._given = ledger, given

    def __getitem__(self, name: str) -> OfNodes:
        made = Expression(DATA, (name,))
        return OfNodes(self._ledger, made, self._given[name].dim())

    def __iter__(self) -> Any:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)
