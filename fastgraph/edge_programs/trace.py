"""Edge programs of messages that are Python functions, traced and then compared with them.

The function runs on tensors without data, twice, with two numbers of edges, and as often on random
numbers. So a program is one only if it computes what the function does, gradients included.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from fastgraph.edge_programs.builder import Value
from fastgraph.edge_programs.called import Called, Raised
from fastgraph.edge_programs.drawn import NUM_EDGES, NUM_NODES, Drawn, Dropping
from fastgraph.edge_programs.dtypes import DTYPES, autocasting, in_double, widest
from fastgraph.edge_programs.evaluation import Edges, evaluate, softmax_weights, spread
from fastgraph.edge_programs.mapped import LINEAR, mapped
from fastgraph.edge_programs.node_counts import is_count
from fastgraph.edge_programs.operations import EXTREMA, SOFTMAX
from fastgraph.edge_programs.program import Output
from fastgraph.edge_programs.recorded import (
    Mapped,
    Recorded,
    Refused,
    is_part_of_argument,
    needed_steps,
)
from fastgraph.edge_programs.recording import Recorder
from fastgraph.edge_programs.relations import Pairs, pairs_of
from fastgraph.edge_programs.saved import saved_tensors
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

_SUM = (Reduction("sum"),)

_NODES = ("row", "gathered")

_MOST_COMPARED = 64


def trace(
    message: Callable[..., Any],
    arguments: Mapping[str, object],
    reductions: Sequence[Reduction] | Reduce = _SUM,
    besides: Mapping[str, Argument] | None = None,
    autocast: torch.dtype | None = None,
    *,
    on_gpu: bool = False,
    compared_numbers: Callable[[], Iterable[int]] = tuple,
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
        autocast: the dtype of the autocast on the CPU under which it runs, if any.
        on_gpu: true if it runs on a GPU, which maps few features of edges faster for all edges at
            once than for each by itself.
        compared_numbers: gives those with which the message may compare sizes of tensors, once it
            has run.

    Returns:
        The program with what comes before it, or why there is none: the message is random, changes
        something, looks at values, works across edges, or does what no instruction does.
    """
    besides = besides or {}
    described = {n: a for n, a in arguments.items() if isinstance(a, Argument)} | dict(besides)
    dtypes = {a.dtype for a in described.values() if a.dtype.is_floating_point}
    if not dtypes:
        return Refusal("its message takes no tensors of a floating-point dtype")
    call = Called(message)
    reduce = reductions if callable(reductions) else reduce_by(reductions)
    rounds = not callable(reductions) and any(r.name in EXTREMA for r in reductions)
    if any(is_lazy(tensor) for tensor in call.state().values()):
        return Refusal("its layer has parameters without a shape")
    both = sorted(described.keys() & call.state().keys())
    if both:
        return Refusal(f"its message takes {both[0]}, as a parameter of its layer is called")
    try:
        with autocasting(autocast):

            def recorded(size: int) -> Traced:
                recorder = Recorder(size, dtypes, autocast, rounds, maps_few=not on_gpu)
                return _record(call, arguments, recorder, reduce, besides)

            first = recorded(_SIZES[0])
            channels = {size for a in described.values() for size in a.channels}
            channels.update(size for t in call.state().values() for size in t.shape)
            sizes = [*_SIZES[1:], *_around(compared_numbers(), channels)]
            if any(recorded(size) != first for size in sizes):
                raise Refused("it depends on the number of edges, or is another one every time")
            with torch.inference_mode(False), torch.enable_grad():
                for is_positive in (True, False):
                    drawn = Drawn.of(call, arguments, besides, first.types, is_positive=is_positive)
                    with in_double() if first.converts else nullcontext():
                        _probe(call, arguments, first, reduce, drawn)
                saved = _saved(call, arguments, first, reduce, drawn)
    except Raised as raised:
        if issubclass(raised.kind, TypeError) and any(map(is_count, arguments.values())):
            # From operators of torch, which take numbers alone.
            return Refusal("its message is no edge program: it takes the number of nodes")
        return Refusal(f"its message is no edge program: {raised}")
    except Refused as refused:
        return Refusal(f"its message is no edge program: {refused}")
    return replace(first, saved=saved)


def _around(numbers: Iterable[int], channels: Collection[int]) -> list[int]:
    """Numbers of edges of which a message that compares them may be another one.

    Raises:
        Refused: there are too many.
    """
    near = {number + k for number in numbers for k in (-1, 0, 1)}
    found = sorted(n for n in near if n > 2 and n not in channels)
    if len(found) > _MOST_COMPARED:
        raise Refused("it may compare the number of edges with many numbers")
    return found


def _record(
    call: Called,
    arguments: Mapping[str, object],
    recorder: Recorder,
    reduce: Reduce,
    besides: Mapping[str, Argument],
) -> Traced:
    num_edges = recorder.num_edges
    with torch.inference_mode(), unchanged(call.layer) as changes:
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
        maps_of = _maps_of(
            [_of_edges(recorder, tensors[0]) for tensors in reduced.values],
            [reduction for reduction, _ in reduced.outputs],
        )
        left = changes(lambda v: isinstance(v, Tensor) and recorder.known(v) is not None)
        program = recorder.builder.program(
            *(
                output
                for reduction, taken in reduced.outputs
                for output in _outputs(recorder, reduction, taken, bool(maps_of[0]))
            ),
            *(("edge", _left(recorder, path, v)) for path, v in left.items()),
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
        matrix_size = recorder.matrix_size
        results = (*reduced.values, *((tensor,) for tensor in left.values()))
        of_results = tuple(widest(*(tensor.dtype for tensor in taken)) for taken in results)
        del given, reduced, left, results
        state.clear()
        taken_besides.clear()
        references = recorder.close()
    if any(reference() is not None for reference in references):
        raise Refused("it keeps values of edges outside its layer")
    owner_of = {name: recorder.owner_of[name] for name in program.names}
    traced = Traced(
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
        of_results,
        recorder.precision.is_autocast,
        recorder.precision.converts,
        after,
        tuple(recorder.dropouts),
    )
    operands = traced.unconverted(_without_data(call, {**arguments, **besides}, traced)).values()
    return replace(traced, dtype=widest(*of_results, *(t.dtype for t in operands)))


def _without_data(call: Called, arguments: Mapping[str, object], traced: Traced) -> dict[str, Any]:
    """The tensors that the steps of a message take, of two rows, without data."""
    found: dict[str, Any] = {name: tensor.to("meta") for name, tensor in call.state().items()}
    for name, a in arguments.items():
        if isinstance(a, Argument):
            rows = () if a.place == "parameter" else (2,)
            found[name] = torch.empty((*rows, *a.channels), dtype=a.dtype, device="meta")
    for name, dropout in traced.dropouts:
        found[name] = torch.empty((2, *dropout.channels), dtype=dropout.dtype, device="meta")
    if traced.types is not None:
        two = torch.empty(2, dtype=torch.int64, device="meta")
        counts = (2, *(0,) * (traced.types.count - 1))
        found |= dict.fromkeys(traced.pairs, Pairs(two, counts, two))
    return found


def _maps_of(
    values: Sequence[Recorded], reductions: Sequence[Reduction]
) -> list[tuple[Mapped, ...]]:
    """The maps behind a program for each value that it reduces, which are the same.

    Those of a value that edges have, too, only where each reduction may be mapped.

    Raises:
        Refused: they differ.
    """
    are_linear = all(r.name in LINEAR and r.values is None for r in reductions)
    needed = [v.maps if v.value is None else () for v in values]
    for maps_of in ([v.maps for v in values] if are_linear else needed, needed):
        if len({tuple(one.matrix for one in maps) for maps in maps_of}) < 2:
            return maps_of
    raise Refused("matrices of edges map some of its values alone")


def _outputs(
    recorder: Recorder, reduction: Reduction, taken: Sequence[Tensor], is_mapped: bool
) -> list[tuple[str, *tuple[Value, ...]]]:
    recorded = [_of_edges(recorder, v) for v in taken]
    if is_mapped and recorded[0].maps and reduction.name in LINEAR and len(recorded) == 1:
        return [(reduction.name, one.value) for one in recorded[0].maps]
    (scores, *others) = [v.scores for v in recorded]
    if scores is None:
        return [(reduction.name, *map(recorder.value, recorded))]
    if reduction.name != "sum" or others:
        raise Refused("what its softmax over neighbours weighs is not summed")
    return [(SOFTMAX, recorder.value(replace(recorded[0], scores=None)), scores)]


def _left(recorder: Recorder, path: str, tensor: Tensor) -> Value:
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
    is_of_edges = recorded.has_rows and tensor.dtype in DTYPES
    if not is_of_edges or is_part_of_argument(recorder.steps, recorded):
        raise Refused(f"it leaves a tensor in {path} that is no new one of edges")
    return recorder.value(recorded)


def _has_scores(recorder: Recorder, tensor: Tensor) -> bool:
    recorded = recorder.known(tensor)
    return recorded is not None and recorded.scores is not None


def _of_edges(recorder: Recorder, tensor: object) -> Recorded:
    recorded = recorder.known(tensor) if isinstance(tensor, Tensor) else None
    if recorded is None or not recorded.has_rows or tensor.dtype not in DTYPES:  # type: ignore[attr-defined]
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
    call: Called, arguments: Mapping[str, object], traced: Traced, reduce: Reduce, drawn: Drawn
) -> None:
    """Compare a program with its message on random numbers in float64, gradients included.

    Gradients must be enabled.

    Raises:
        Refused: they differ.
    """
    index = {"row": drawn.row, "gathered": drawn.gathered}
    own: dict[str, Any] = drawn.own | drawn.state
    with unchanged(call.layer):
        given = drawn.given(arguments, drawn.own)
        factors = {name: drawn.factors(dropout) for name, dropout in traced.dropouts}
        with Dropping(factors.values()):
            values = call.run(given, drawn.state, lambda message: reduce(message, own)).values
        for tensors, channels in zip(values, traced.shapes, strict=True):
            is_same = tensors[0].shape == (NUM_EDGES, *channels)
            if not is_same or tensors[0].dtype != torch.float64:
                raise Refused("its result has another shape or dtype on other edges")
            if drawn.is_positive and not tensors[0].isfinite().any():
                raise Refused("it has no finite values for positive ones")
        values += [(kept.owner(call.layer).__dict__[kept.name],) for kept in traced.kept]
        with_pairs = own | factors
        if traced.types is not None:
            types = own[traced.types.name]
            for owner in traced.pairs:
                nodes = index[owner.split()[0]]
                with_pairs[owner] = pairs_of(nodes, types, NUM_NODES, traced.types.count)
        pairs = with_pairs.get("gathered by type")
        edges = Edges(drawn.gathered if pairs is None else pairs.of_edge, drawn.row, NUM_NODES)
        ours = _reduced(replace(traced, dtype=torch.float64), with_pairs, edges, values)
    leaves = [tensor for tensor in own.values() if tensor.requires_grad]
    for found, expected in zip(ours, itertools.chain(*values), strict=True):
        out = found.reshape(expected.shape)
        if not _is_close(out, expected):
            raise Refused("it computes other values than its operations on tensors without data")
        grad = drawn.numbers(expected.shape, expected.dtype).detach()
        own_grads, grads = _gradients(out, leaves, grad), _gradients(expected, leaves, grad)
        scale = max(map(_largest, (expected, *grads)))
        if not all(_is_close(a, b, scale) for a, b in zip(own_grads, grads, strict=True)):
            raise Refused("its gradients are not those of its operations")


def _saved(
    call: Called, arguments: Mapping[str, object], traced: Traced, reduce: Reduce, drawn: Drawn
) -> Mapping[str, frozenset[str]]:
    """The tensors of edges and of the layer that upstream saves for gradients; see ``Traced``."""

    def compute(own: Mapping[str, Tensor]) -> list[Tensor]:
        state = {name: own[name] for name in drawn.state}
        for name, tensor in drawn.state.items():
            state[name]._is_param = tensor._is_param
        factors = [drawn.factors(dropout) for _, dropout in traced.dropouts]
        with unchanged(call.layer), Dropping(factors):
            given = drawn.given(arguments, own)
            reduced = call.run(given, state, lambda message: reduce(message, own))
        return list(itertools.chain(*reduced.values))

    types = None if traced.types is None else traced.types.name
    names = [
        name
        for name, tensor in (drawn.own | drawn.state).items()
        if name == types
        or (tensor.is_floating_point() and getattr(arguments.get(name), "place", "") not in _NODES)
    ]
    saves_results = any(reduction.name not in LINEAR for reduction in traced.reductions)
    return saved_tensors(compute, drawn.own | drawn.state, names, saves_results=saves_results)


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
