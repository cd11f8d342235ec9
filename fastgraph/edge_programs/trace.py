"""Edge programs of messages that are Python functions, traced and then compared with them.

The function runs on tensors without data, twice, with two numbers of edges, and as often on random
numbers. So a program is one only if it computes what the function does, gradients included.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fastgraph.edge_programs.builder import Value
from fastgraph.edge_programs.evaluation import Edges, evaluate, softmax_weights, spread
from fastgraph.edge_programs.mapped import LINEAR, mapped
from fastgraph.edge_programs.node_counts import is_count
from fastgraph.edge_programs.operations import SOFTMAX
from fastgraph.edge_programs.program import Output
from fastgraph.edge_programs.recorded import Recorded, Refused, needed_steps
from fastgraph.edge_programs.recording import Recorder
from fastgraph.edge_programs.relations import pairs_of
from fastgraph.edge_programs.traced import (
    Argument,
    Index,
    LeftValues,
    Reduce,
    Reduced,
    Reduction,
    Traced,
    reduce_by,
)
from fastgraph.edge_programs.unchanged import unchanged
from fastgraph.plugins.refusal import Refusal

_SIZES = (10_007, 2, 1_000_000_007)
"""Primes, which no product of dimensions of channels is but for the smallest.

They are far apart, so that a message that is another one for many edges or for few is seen.
"""

_Made = TypeVar("_Made")

_SUM = (Reduction("sum"),)

_PROBED_EDGES, _PROBED_NODES = 64, 24


def trace(
    message: Callable[..., Any],
    arguments: Mapping[str, object],
    reductions: Sequence[Reduction] | Reduce = _SUM,
    besides: Mapping[str, Argument] | None = None,
) -> Traced | Refusal:
    """The edge program of a message.

    Args:
        message: a method of a layer, or a function, of tensors that have a row for each edge.
        arguments: an :class:`Argument` for each tensor that it takes, by name, an :class:`Index`
            for what is of the graph, a :class:`~fastgraph.edge_programs.node_counts.NodeCount` for
            a number of nodes, and any other value as it is.
        reductions: of the message, in the order of the program's outputs, or the function that
            reduces it.
        besides: tensors of edges that reductions take and the message does not, by name.

    Returns:
        The program with what comes before it, or why there is none: the message is random, changes
        something, looks at values, works across edges, or does what no instruction does.
    """
    besides = besides or {}
    described = {n: a for n, a in arguments.items() if isinstance(a, Argument)} | dict(besides)
    dtypes = {a.dtype for a in described.values() if a.dtype.is_floating_point}
    if len(dtypes) != 1:
        return Refusal(f"its message takes tensors of {len(dtypes)} floating-point dtypes")
    (dtype,) = dtypes
    call = _Called(message)
    reduce = reductions if callable(reductions) else reduce_by(reductions)
    if any(is_lazy(tensor) for tensor in call.state().values()):
        return Refusal("its layer has parameters without a shape")
    both = sorted(described.keys() & call.state().keys())
    if both:
        return Refusal(f"its message takes {both[0]}, as a parameter of its layer is called")
    try:
        first = _record(call, arguments, _SIZES[0], dtype, reduce, besides)
        for num_edges in _SIZES[1:]:
            if _record(call, arguments, num_edges, dtype, reduce, besides) != first:
                raise Refused("it depends on the number of edges, or is another one every time")
        with torch.inference_mode(False), torch.enable_grad():
            for is_positive in (True, False):
                _probe(call, arguments, first, reduce, is_positive, besides)
    except _Raised as raised:
        if issubclass(raised.kind, TypeError) and any(map(is_count, arguments.values())):
            # From operators of torch, which take numbers alone.
            return Refusal("its message is no edge program: it takes the number of nodes")
        return Refusal(f"its message is no edge program: {raised}")
    except Refused as refused:
        return Refusal(f"its message is no edge program: {refused}")
    return first


class _Raised(Refused):
    """A message that raises while it is traced.

    Attributes:
        kind: the class of what it raises.
    """

    def __init__(self, kind: type[Exception]) -> None:
        super().__init__(f"it raises {kind.__name__} when it is traced")
        self.kind = kind


class _Called(nn.Module):
    """A module whose state is that of a message's layer, and whose call is that of the message."""

    def __init__(self, message: Callable[..., Any]) -> None:
        super().__init__()
        self._message = message
        layer = getattr(message, "__self__", None)
        self.layer = layer if isinstance(layer, nn.Module) else None

    def forward(self, given: Mapping[str, object], then: Callable[[Any], Any]) -> Any:
        return then(self._message(**given))

    def state(self) -> dict[str, Tensor]:
        """The parameters and buffers of the layer, by their names in it."""
        if self.layer is None:
            return {}
        return {**dict(self.layer.named_parameters()), **dict(self.layer.named_buffers())}

    def run(
        self,
        given: Mapping[str, object],
        state: Mapping[str, Tensor],
        then: Callable[[Any], _Made],
    ) -> _Made:
        """The value made of the message with another state, which leaves no trace in the layer.

        Raises:
            Refused: it raises.
        """
        named = {f"layer.{name}": tensor for name, tensor in state.items()}
        try:
            out: _Made = torch.func.functional_call(self, named, (given, then))
        # Any code of users runs here on tensors that have no data, which any of it may not bear.
        # Nothing has been computed yet: upstream shows the error, if it is one.
        except Exception as error:
            raise _Raised(type(error)) from None
        return out


def _record(
    call: _Called,
    arguments: Mapping[str, object],
    num_edges: int,
    dtype: torch.dtype,
    reduce: Reduce,
    besides: Mapping[str, Argument],
) -> Traced:
    with torch.inference_mode(), unchanged(call.layer) as changes:
        recorder = Recorder(num_edges, dtype)
        given = {name: _stand_in(recorder, name, a, num_edges) for name, a in arguments.items()}
        state = {name: recorder.state(name, tensor) for name, tensor in call.state().items()}
        taken_besides = {name: _given(recorder, name, a) for name, a in besides.items()} | state

        def then(message: Any) -> Reduced:
            recorder.is_after_message = True
            return reduce(message, taken_besides)

        try:
            with recorder:
                reduced = call.run(given, state, then)
        except Refused:
            if recorder.reason is None:
                raise
        if recorder.reason is not None:
            raise Refused(recorder.reason)
        if recorder.changed is not None:
            raise Refused(f"it changes {recorder.changed}")
        maps_of = [_of_edges(recorder, tensors[0], dtype).maps for tensors in reduced.values]
        if len({tuple(one.matrix for one in maps) for maps in maps_of}) > 1:
            raise Refused("matrices of edges map some of its values alone")
        left = changes(lambda v: isinstance(v, Tensor) and recorder.known(v) is not None)
        program = recorder.builder.program(
            *(
                output
                for reduction, taken in reduced.outputs
                for output in _outputs(recorder, dtype, reduction, taken)
            ),
            *(("edge", _left(recorder, dtype, path, v)) for path, v in left.items()),
        )
        outputs = program.outputs[len(reduced.outputs) * max(len(maps_of[0]), 1) :]
        if len(set(outputs)) < len(outputs):  # an edit of one may be one of the other
            raise Refused(f"it leaves the same values of edges in {' and '.join(left)}")
        kept = tuple(
            LeftValues(
                tuple(path.split(".")[:-1]),
                path.rpartition(".")[2],
                tuple(tensor.shape[1:]),
                program.operands_of(output.value),
                _has_scores(recorder, tensor),
            )
            for (path, tensor), output in zip(left.items(), outputs, strict=True)
        )
        maps = {f"map {k}": one.matrix for k, one in enumerate(maps_of[0])}
        steps, step_of = needed_steps(recorder.steps, recorder.steps_of(program.names) | maps)
        reductions = tuple(reduction for reduction, _ in reduced.outputs)
        shapes = tuple(tuple(tensors[0].shape[1:]) for tensors in reduced.values)
        after = reduced.after
        matrix_size = max((one.matrix_size for one in maps_of[0]), default=0)
        del given, reduced, left
        state.clear()
        taken_besides.clear()
        references = recorder.close()
    if any(reference() is not None for reference in references):
        raise Refused("it keeps values of edges outside its layer")
    owner_of = {name: recorder.owner_of[name] for name in program.names}
    return Traced(
        program,
        reductions,
        shapes,
        steps,
        step_of,
        kept,
        owner_of,
        recorder.types,
        tuple(maps),
        matrix_size,
        after,
    )


def _outputs(
    recorder: Recorder, dtype: torch.dtype, reduction: Reduction, taken: Sequence[Tensor]
) -> list[tuple[str, *tuple[Value, ...]]]:
    recorded = [_of_edges(recorder, v, dtype) for v in taken]
    if recorded[0].maps and reduction.name in LINEAR and len(recorded) == 1:
        return [(reduction.name, one.value) for one in recorded[0].maps]
    (scores, *others) = [v.scores for v in recorded]
    if scores is None:
        return [(reduction.name, *map(recorder.value, recorded))]
    if reduction.name != "sum" or others:
        raise Refused("what its softmax over neighbours weighs is not summed")
    return [(SOFTMAX, recorder.value(replace(recorded[0], scores=None)), scores)]


def _left(recorder: Recorder, dtype: torch.dtype, path: str, tensor: Tensor) -> Value:
    """The value of edges that a message leaves in an attribute.

    Raises:
        Refused: it is no new value of edges.
    """
    recorded = recorder.known(tensor)
    assert recorded is not None
    if recorded.scores is not None:
        scores = recorded.scores
        ones = recorder.builder.spread(recorder.builder.constant(1.0), scores.width)
        if recorded.value != ones or tensor.shape[1:].numel() != scores.width:
            raise Refused(f"it leaves a multiple of a softmax over neighbours in {path}")
        return scores
    if not recorded.has_rows or tensor.dtype != dtype or recorder.is_part_of_argument(recorded):
        raise Refused(f"it leaves a tensor in {path} that is no new one of edges")
    return recorder.value(recorded)


def _has_scores(recorder: Recorder, tensor: Tensor) -> bool:
    recorded = recorder.known(tensor)
    return recorded is not None and recorded.scores is not None


def _of_edges(recorder: Recorder, tensor: object, dtype: torch.dtype) -> Recorded:
    recorded = recorder.known(tensor) if isinstance(tensor, Tensor) else None
    if recorded is None or not recorded.has_rows or tensor.dtype != dtype:  # type: ignore[attr-defined]
        raise Refused("it gives no tensor of edges")
    return recorded


def _given(recorder: Recorder, name: str, a: Argument) -> Tensor:
    return recorder.given(name, a.place, a.channels, a.dtype)


def _stand_in(recorder: Recorder, name: str, a: object, num_edges: int) -> object:
    """A message's argument on tensors without data."""
    if isinstance(a, Argument):
        return _given(recorder, name, a)
    if isinstance(a, Index):
        reason = f"it takes {name}, which is of the graph"
        if a.place == "row":
            return recorder.rows(a.dtype, reason)
        return recorder.closed((num_edges,), a.dtype, reason)
    return a


def _probe(
    call: _Called,
    arguments: Mapping[str, object],
    traced: Traced,
    reduce: Reduce,
    is_positive: bool,
    besides: Mapping[str, Argument],
) -> None:
    """Compare a program with its message on random numbers in float64, gradients included.

    Gradients must be enabled. Edges are few, in no order, and each is there twice. Numbers are
    positive, or such that many are equal or zero.

    Raises:
        Refused: they differ.
    """
    generator = torch.Generator().manual_seed(int(is_positive))

    def numbers(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if not dtype.is_floating_point:
            return torch.zeros(tuple(shape), dtype=dtype)
        made = torch.rand(tuple(shape), generator=generator, dtype=torch.float64)
        made = made + 0.1 if is_positive else (made * 16).round() / 4 - 2
        return made.requires_grad_()

    ends = torch.randint(_PROBED_NODES, (2, _PROBED_EDGES // 2), generator=generator)
    order = torch.randperm(_PROBED_EDGES, generator=generator)
    row, gathered = torch.cat([ends, ends], dim=1)[:, order]
    index = {"row": row, "gathered": gathered}
    own: dict[str, Tensor] = {}
    given = dict(arguments)
    for name, a in (*arguments.items(), *besides.items()):
        if isinstance(a, Argument):
            rows = {"row": _PROBED_NODES, "gathered": _PROBED_NODES}.get(a.place, _PROBED_EDGES)
            shape = a.channels if a.place == "parameter" else (rows, *a.channels)
            own[name] = numbers(shape, a.dtype)
            if traced.types is not None and name == traced.types.name:
                own[name] = torch.randint(traced.types.count, shape, generator=generator)
            taken = own[name][index[a.place]] if a.place in index else own[name]
            if name in arguments:
                given[name] = taken
        elif isinstance(a, Index):
            given[name] = index[a.place]  # Some of torch's gradients are wrong for int32.
        elif is_count(a):
            given[name] = _PROBED_NODES
    state = {name: numbers(tensor.shape, tensor.dtype) for name, tensor in call.state().items()}
    for name, tensor in call.state().items():
        state[name]._is_param = isinstance(tensor, nn.Parameter)
    with unchanged(call.layer):
        values = call.run(given, state, lambda message: reduce(message, own | state)).values
        for tensors, channels in zip(values, traced.shapes, strict=True):
            is_same = tensors[0].shape == (_PROBED_EDGES, *channels)
            if not is_same or tensors[0].dtype != torch.float64:
                raise Refused("its result has another shape or dtype on other edges")
            if is_positive and not tensors[0].isfinite().any():
                raise Refused("it has no finite values for positive ones")
        values += [(kept.owner(call.layer).__dict__[kept.name],) for kept in traced.kept]
        own |= state
        with_pairs: dict[str, Any] = dict(own)
        if traced.types is not None:
            types = own[traced.types.name]
            for owner in traced.pairs:
                nodes = index[owner.split()[0]]
                with_pairs[owner] = pairs_of(nodes, types, _PROBED_NODES, traced.types.count)
        pairs = with_pairs.get("gathered by type")
        edges = Edges(gathered if pairs is None else pairs.of_edge, row, _PROBED_NODES)
        ours = _reduced(traced, with_pairs, edges, values)
    leaves = [tensor for tensor in own.values() if tensor.requires_grad]
    for found, expected in zip(ours, itertools.chain(*values), strict=True):
        out = found.reshape(expected.shape)
        if not _is_close(out, expected):
            raise Refused("it computes other values than its operations on tensors without data")
        grad = numbers(expected.shape, expected.dtype).detach()
        own_grads, grads = _gradients(out, leaves, grad), _gradients(expected, leaves, grad)
        scale = max(map(_largest, (expected, *grads)))
        if not all(_is_close(a, b, scale) for a, b in zip(own_grads, grads, strict=True)):
            raise Refused("its gradients are not those of its operations")


def _reduced(
    traced: Traced,
    given: Mapping[str, Any],
    edges: Edges,
    expected: Sequence[tuple[Tensor, ...]],
) -> list[Tensor]:
    """The values of float64 that a program reduces, as many of each output as are expected."""
    outputs = (Output("edge", v) for output in traced.program.outputs for v in output.values)
    program = replace(traced.program, outputs=tuple(outputs))
    operands = traced.operands(given)
    matrices = [
        operands[o.name].reshape(-1, o.width)[0 if o.place == "parameter" else slice(None)]
        for o in program.operands
    ]
    values = iter(evaluate(program, matrices, edges, torch.float64))
    found = []
    softmaxes = [False] * len(traced.reductions) + [kept.is_softmax for kept in traced.kept]
    groups = [traced.program.outputs[k] for k in range(0, traced.num_reduced, traced.per_reduction)]
    groups += traced.program.outputs[traced.num_reduced :]
    maps = [operands[name] for name in traced.maps]
    for number, (output, tensors, is_softmax) in enumerate(
        zip(groups, expected, softmaxes, strict=True)
    ):
        own = [next(values) for _ in output.values]
        if maps and number < len(traced.reductions):
            own = [mapped([*own, *itertools.islice(values, len(maps) - 1)], maps)]
        if is_softmax:
            own = [softmax_weights(own[0], edges)]
        if len(own) > len(tensors):  # the message itself has the softmax for a factor
            value, score = own
            own = [value * spread(softmax_weights(score, edges), value.shape[1])]
        found += own
    return found


def _gradients(out: Tensor, leaves: Sequence[Tensor], grad: Tensor) -> Sequence[Tensor]:
    if not out.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    return torch.autograd.grad(
        out, leaves, grad, retain_graph=True, allow_unused=True, materialize_grads=True
    )


def _is_close(ours: Tensor, theirs: Tensor, scale: float = 0.0) -> bool:
    """True if two results of float64 differ by rounding alone.

    Args:
        ours: one of them.
        theirs: the other.
        scale: of numbers that may cancel in both, as in the gradient of equal scores.
    """
    atol = 1e-9 * _largest(theirs) + 1e-13 * scale
    return torch.allclose(ours.detach(), theirs.detach(), rtol=1e-9, atol=atol, equal_nan=True)


def _largest(tensor: Tensor) -> float:
    """The largest size of a finite number."""
    finite = tensor.detach()[tensor.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0
