"""Messages recorded on tensors without data: each operation is known to be row-wise, or refused.

What the operations make is in :mod:`fastgraph.edge_programs.rules`.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from fastgraph.edge_programs.builder import Value
from fastgraph.edge_programs.calls import CONVERSIONS, DROPOUTS, EXACT, LOOKS, Call
from fastgraph.edge_programs.channels import channel_dims, dims_of
from fastgraph.edge_programs.compositions import COMPOSITIONS, SEVERAL
from fastgraph.edge_programs.dtypes import DTYPES, StandIn, without_data
from fastgraph.edge_programs.elementwise import ELEMENTWISE
from fastgraph.edge_programs.in_place import aliases, out_of_place
from fastgraph.edge_programs.program import Place
from fastgraph.edge_programs.reading import unread
from fastgraph.edge_programs.recorded import Recorded, Refused
from fastgraph.edge_programs.relations import Choice, EdgeTypes, chosen
from fastgraph.edge_programs.rules import Rules
from fastgraph.edge_programs.terms import common_owner
from fastgraph.edge_programs.traced import Dropout

aten = torch.ops.aten


class Recorder(Rules, TorchDispatchMode):
    """Records the operations of a message while it is active, in ``torch.inference_mode()``.

    Args:
        num_edges: the rows of values of edges: another number than all numbers of channels.
        dtypes: of the tensors that the message takes.
        autocast: the dtype of the autocast on the CPU under which the message runs, if any.
        rounds: true if values of half types are rounded after each operation, as upstream's are.
        maps_few: true if few features of edges are mapped to many in the program, not before it.

    Raises:
        Refused: from an operation that is not known to be row-wise.
    """

    def __init__(
        self,
        num_edges: int,
        dtypes: Iterable[torch.dtype],
        autocast: torch.dtype | None = None,
        rounds: bool = False,
        *,
        maps_few: bool = True,
    ) -> None:
        TorchDispatchMode.__init__(self)
        Rules.__init__(self, dtypes, autocast, rounds, maps_few=maps_few)
        self.reason: str | None = None
        """The first refusal, which stands even if the message goes on."""
        self.changed: str | None = None
        """A parameter or buffer that was changed in place."""
        self.num_edges = num_edges
        self._seen: Callable[[Tensor], Tensor] = StandIn if autocast else lambda tensor: tensor
        self._state: dict[int, str] = {}
        self._lasting: set[int] = set()
        self._closed: dict[int, tuple[Tensor, str]] = {}
        self._rows: set[int] = set()
        self.types: EdgeTypes | None = None
        """The types of edges that choose something."""
        self.dropouts: list[tuple[str, Dropout]] = []
        """Drawn for each call, by the names of what stands for them."""

    def given(
        self, name: str, place: Place, channels: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """A tensor that stands for an argument."""
        rows = () if place == "parameter" else (self.num_edges,)
        tensor = self._seen(torch.empty((*rows, *channels), dtype=dtype, device="meta"))
        self._know(tensor, Recorded(place, channels, self._step(None, (name,))))
        if place not in ("row", "gathered"):  # which are gathered for each message
            self._lasting.add(id(tensor))
        return tensor

    def state(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor that stands for a parameter or a buffer."""
        stand_in = self.given(name, "parameter", tuple(tensor.shape), tensor.dtype)
        self._state[id(stand_in)] = name
        stand_in._is_param = isinstance(tensor, torch.nn.Parameter)  # what ``isinstance`` sees
        return stand_in

    def closed(self, shape: tuple[int, ...], dtype: torch.dtype, reason: str) -> Tensor:
        """A tensor of which every use is refused."""
        tensor = self._seen(torch.empty(shape, dtype=dtype, device="meta"))
        self._closed[id(tensor)] = (tensor, reason)
        return tensor

    def rows(self, dtype: torch.dtype, reason: str) -> Tensor:
        """A closed tensor that stands for the aggregating node of each edge."""
        tensor = self.closed((self.num_edges,), dtype, reason)
        self._rows.add(id(tensor))
        return tensor

    def softmax(self, scores: Tensor, index: object) -> Tensor:
        """The softmax of scores over those edges that have one number in an index.

        Raises:
            Refused: the index is not that of rows, or the scores are not values of edges.
        """
        if id(index) not in self._rows:
            self.refuse("it has a softmax over others than the edges of a node")
        v = self.known(scores)
        if v is None or not v.has_rows or scores.dtype not in DTYPES:
            self.refuse("it has a softmax over neighbours of what is no value of edges")
        if v.scores is not None:
            self.refuse("it has a softmax over neighbours of another")
        try:
            found = self.value(v)
        except Refused as refused:
            self.refuse(str(refused))
        ones = self.builder.spread(self.builder.constant(1.0), found.width)
        weights = scores.clone()
        self._know(weights, Recorded(None, v.channels, None, ones, scores=found))
        return weights

    def refuse(self, reason: str) -> NoReturn:
        """Refuse the message, whatever it does about that.

        Raises:
            Refused: always.
        """
        self.reason = self.reason or reason
        raise Refused(reason)

    def known(self, tensor: Tensor) -> Recorded | None:
        """The knowledge of a tensor, if it was recorded."""
        return self._known[id(tensor)][1] if id(tensor) in self._known else None

    def close(self) -> list[weakref.ref[Tensor]]:
        """Forget all tensors. The references that live on show that the message keeps some."""
        references = [weakref.ref(tensor) for tensor, _ in self._known.values()]
        self._known.clear()
        self._closed.clear()
        return references

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        try:
            return self._record(Call(func, args, kwargs or {}))
        except Refused as refused:
            self.refuse(str(refused))

    def _record(self, call: Call) -> object:
        func, given = call.func, call.given
        if call.operation in DROPOUTS and (not given["train"] or given["p"] == 0):
            return given["input"]
        if call.operation is aten.dropout:
            return self._dropped(given["input"], given["p"])
        if call.operation is aten.batch_norm and given["training"]:
            raise Refused("it takes statistics of the batch")
        if call.operation is aten.lift_fresh:  # as torch.tensor does, which gives no argument
            made = given["self"]
            return self.closed(tuple(made.shape), made.dtype, _NO_ARGUMENT)
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags
        if is_drawn and call.operation is not aten.dropout_:  # which is the same out of place
            raise Refused(f"it draws random numbers ({func})")
        tensors = [a for a in torch.utils._pytree.tree_leaves(given) if isinstance(a, Tensor)]
        if call.operation is aten.detach_ and id(tensors[0]) in self._closed:
            return tensors[0]
        if func._schema.is_mutable:
            if tensors and (name := self._state.get(id(tensors[0]))):
                self.changed = self.changed or name
                return tensors[0]
            return self._edit(call)
        if call.operation is aten.detach and id(tensors[0]) not in self._closed:
            reason = "it stops gradients (aten.detach)"
            return self.closed(tuple(tensors[0].shape), tensors[0].dtype, reason)
        for tensor in tensors:
            if id(tensor) in self._closed:
                raise Refused(self._closed[id(tensor)][1])
            if self.known(tensor) is None:
                raise Refused(_NO_ARGUMENT)
        if call.operation in LOOKS or torch.Tag.data_dependent_output in func.tags:
            raise Refused("it depends on the values of tensors, for example in a branch")
        if call.operation in COMPOSITIONS or call.operation is aten.amax:
            taken = [self._of(tensor) for tensor in tensors]
            dims = dims_of(call)
            if taken[0].has_rows and dims is not None:
                channel_dims(taken[0].channels, dims)
            is_step = common_owner(taken) is not None and all(v.step is not None for v in taken)
            if call.operation in SEVERAL or not (is_step or call.operation is aten.amax):
                return self._compose(call)
        choice = chosen(call, self._of, self.steps)
        if torch.Tag.dynamic_output_shape in func.tags and choice is None:
            raise Refused(f"its shapes depend on the values of tensors ({func})")
        if not tensors:
            raise Refused(f"it makes a tensor ({func})")
        if func.namespace != "aten":
            raise Refused(f"{func} is not known to be row-wise")
        args, kwargs = without_data(call.args), without_data(call.kwargs)
        found = unread(functools.partial(func, *args, **kwargs))  # what torch runs is no message
        if not isinstance(found, Tensor) or found.device.type != "meta":
            raise Refused(f"{func} is not known to be row-wise")
        found = self._seen(found)
        if choice is not None:
            self._know(found, self._chosen(choice, tuple(found.shape[1:])))
            return found
        for tensor in (*tensors, found):
            if tensor.dtype not in (*DTYPES, torch.bool):
                raise Refused(f"it computes with {tensor.dtype}")
        rule = ELEMENTWISE.get(call.operation)
        is_mask = rule.is_mask if rule else tensors[0].dtype is torch.bool
        if found.dtype is torch.bool and not is_mask:  # as the sum of two masks, which is no 2
            raise Refused(f"it makes a mask ({func})")
        has_rows = any(self._of(tensor).has_rows for tensor in tensors)
        if has_rows and (found.dim() == 0 or found.shape[0] != self.num_edges):
            raise Refused(f"it works across edges ({func})")
        is_conversion = call.operation in CONVERSIONS
        if is_conversion:
            result = self.precision.convert(self._of(tensors[0]), tensors[0].dtype, found.dtype)
        if not is_conversion or found.dtype == tensors[0].dtype:
            result = self._result(call, tuple(found.shape[has_rows:]), has_rows)
        if is_conversion or call.operation not in EXACT:
            result = self.precision.rounded(result, found.dtype)
        self._know(found, result)
        return found

    def _dropped(self, tensor: Tensor, rate: float) -> object:
        """Values of edges times factors that are drawn for each call.

        Raises:
            Refused: there are many factors, or not one for each edge.
        """
        v = self.known(tensor)
        if v is None or not v.has_rows or tensor.dtype not in DTYPES:
            raise Refused("it draws random numbers for what is no value of edges")
        if math.prod(v.channels) > _MOST_DROPPED:
            raise Refused(f"it draws random numbers for more than {_MOST_DROPPED} channels")
        dropout = Dropout(rate, v.channels, tensor.dtype)
        name = f"dropout {len(self.dropouts)}"  # which no argument is called
        self.dropouts.append((name, dropout))
        factors = self.given(name, "edge", v.channels, tensor.dtype)
        return self.run(aten.mul.Tensor, tensor, factors)

    def _compose(self, call: Call) -> object:
        """An operator by others that are known."""
        dtype = next(a.dtype for a in call.given.values() if isinstance(a, Tensor))
        if call.operation not in SEVERAL and self.precision.rounds(dtype):
            raise Refused(f"it rounds {call.func} once")
        return COMPOSITIONS[call.operation](self, **call.given)

    def run(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """The result of another operator, recorded as if the message had called it."""
        return self._record(Call(func, args, kwargs))

    def largest(self, tensor: Tensor, dims: Sequence[int]) -> Tensor:
        """The largest numbers along dimensions of channels, which stay, without their gradient."""
        return self._new(tensor, dims, keepdim=True, make=self.largest_of)

    def first_largest(self, tensor: Tensor, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
        """The largest numbers along a dimension, of which the first has the gradient, and where."""
        found = self._new(tensor, (dim,), keepdim=keepdim, make=self.first_largest_of)
        reason = "it takes the places of largest values of edges"
        return found, self.closed(tuple(found.shape), torch.int64, reason)

    def _new(
        self,
        tensor: Tensor,
        dims: Sequence[int],
        *,
        keepdim: bool,
        make: Callable[[Recorded, Sequence[int]], Value],
    ) -> Tensor:
        found = self._seen(torch.amax(without_data((tensor,))[0], tuple(dims), keepdim=keepdim))
        v = self._of(tensor)
        self._know(found, Recorded(None, tuple(found.shape[1:]), None, make(v, dims)))
        return found

    def _edit(self, call: Call) -> Tensor:
        """The tensor that an operator changes in place, which has the result from then on.

        Raises:
            Refused: others see the edit.
        """
        made = out_of_place(call)
        edited = call.args[0] if call.args else None
        if made is None or not isinstance(edited, Tensor) or id(edited) in self._closed:
            raise Refused(f"it works in place ({call.func})")
        others = aliases(edited, [tensor for tensor, _ in self._known.values()])
        if others is None or any(id(other) in self._lasting for other in (edited, *others)):
            raise Refused(f"it works in place on what others see ({call.func})")
        found: Any = self._record(made)
        is_known = isinstance(found, Tensor) and id(found) in self._known
        if not is_known or (found.shape, found.dtype) != (edited.shape, edited.dtype):
            raise Refused(f"it works in place ({call.func})")
        result = self._of(found)
        for tensor in (edited, *others):
            has_rows = result.has_rows
            self._know(tensor, self._reshape(result, tuple(tensor.shape[has_rows:])))
        return edited

    def _chosen(self, choice: Choice, channels: tuple[int, ...]) -> Recorded:
        """Rows of a parameter, one for each edge."""
        if self.types not in (None, choice.types):
            raise Refused("it takes several types of edges, or different numbers of them")
        self.types = choice.types
        step = self._step(aten.index_select.default, choice.args)
        return Recorded("edge", channels, step, table=choice.table)


def active_recorder() -> Recorder | None:
    """The recorder of the message that runs in this thread; ``None`` if none is traced."""
    mode = _get_current_dispatch_mode()
    return mode if isinstance(mode, Recorder) else None


_MOST_DROPPED = 32
"""Channels for which factors are drawn, and stored for each edge; upstream stores more of them."""

_NO_ARGUMENT = "it takes a tensor that is no argument, parameter or buffer"
