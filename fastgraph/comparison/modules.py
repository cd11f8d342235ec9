"""Comparing one call of a module: upstream, ours, and float64 as the truth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastgraph.comparison.cost import CUDA_MEMORY_MEASURE, MEMORY_MEASURE, Contestant, measure
from fastgraph.comparison.errors import FACTOR, TensorError, compare_tensors
from fastgraph.comparison.means import SEEDS, MeanDifference, compare_means
from fastgraph.comparison.result import Comparison
from fastgraph.comparison.runs import (
    Call,
    Results,
    attention_dropout,
    check_module,
    comparing,
    ours,
    tensors_of,
    untouched_randomness,
    upstream,
)
from fastgraph.comparison.upstream_path import UpstreamPath, recorded_paths
from fastgraph.routing.status import NOT_COUNTED, StatusRow, recording

_SEED = 0

# A module that makes noise in float32 makes other noise in float64, and then nothing is shown.
_INCONCLUSIVE = 0.1


@dataclass(frozen=True)
class Accuracy:
    """Errors of one call, and how it ran.

    Attributes:
        tensors: outputs, gradients of inputs, gradients of parameters.
        routing: by layer class, what was routed and what was not.
        paths: by layer, what upstream did.
        attention_dropout: layers whose dropout was set to zero for this.
    """

    tensors: tuple[TensorError, ...]
    routing: tuple[StatusRow, ...]
    paths: tuple[UpstreamPath, ...]
    attention_dropout: tuple[str, ...]


def compare(module: nn.Module, *args: Any, **kwargs: Any) -> Comparison:
    """Run ``module(*args, **kwargs)`` forward and backward through upstream and through fastgraph.

    Both are judged against upstream in float64. Copies of the module and of its inputs are run, so
    parameters, buffers, gradients and random state stay as they are. Gradients are those of all
    parameters, and of the inputs that require one; where none does, of all floating-point inputs.

    Args:
        module: any module, in the mode, dtype and on the device in which it is to be compared.
        args: its positional arguments; tensors may be nested in tuples, lists, dictionaries and
            PyG's data objects.
        kwargs: its keyword arguments.

    Returns:
        Errors, time, memory and what was routed; print it, or ask for ``.ok`` and ``.worst``.

    Raises:
        TypeError: not a ``torch.nn.Module``.
        ValueError: lazy parameters that were never initialised, or no floating-point output.
        RuntimeError: ``FASTGRAPH=0`` switches fastgraph off.
    """
    return compare_call(module, args, kwargs)


def compare_call(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    factor: float = FACTOR,
    budget: float = 2.0,
    seeds: int = SEEDS,
) -> Comparison:
    """:func:`compare` with options.

    Args:
        module: see :func:`compare`.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        factor: our error may be this many times upstream's own.
        budget: about how many seconds to spend on timing.
        seeds: runs on each side where attention dropout is active, at least 2.

    Raises:
        ValueError: an option out of range, or as for :func:`compare`.
        TypeError: see :func:`compare`.
        RuntimeError: see :func:`compare`.
    """
    if not factor > 0:
        raise ValueError(f"factor must be above 0, got {factor!r}")
    if seeds < 2:
        raise ValueError(f"seeds must be at least 2, got {seeds!r}")
    kwargs = kwargs or {}
    accuracy = compare_accuracy(module, args, kwargs, factor=factor)
    tensors = tensors_of(module, args, kwargs)
    device = _device(tensors)
    means: tuple[MeanDifference, ...] = ()
    around = untouched_randomness(_SEED, tensors)
    with torch.inference_mode(False), torch.enable_grad(), comparing(), around:
        calls = [Call(module, args, kwargs), Call(module, args, kwargs)]
        sides = (upstream, ours)
        if accuracy.attention_dropout:
            means = compare_means(calls, sides, seeds=seeds, factor=factor)
        with recording():
            costs = measure(
                [Contestant(call.run, side) for call, side in zip(calls, sides, strict=True)],
                budget=budget,
                device=device,
            )
    return Comparison(
        module=type(module).__name__,
        factor=factor,
        tensors=accuracy.tensors,
        means=means,
        upstream=costs[0],
        ours=costs[1],
        memory_measure=CUDA_MEMORY_MEASURE if device.type == "cuda" else MEMORY_MEASURE,
        upstream_paths=accuracy.paths,
        routing=accuracy.routing,
        inconclusive=inconclusive(accuracy),
        notes=_notes(module, accuracy),
    )


def compare_accuracy(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, factor: float = FACTOR
) -> Accuracy:
    """Only the errors of a call; attention dropout is set to zero, so that they can be compared.

    Raises:
        ValueError: see :func:`compare`.
        TypeError: see :func:`compare`.
        RuntimeError: see :func:`compare`.
    """
    check_module(module)
    dropout = attention_dropout(module)
    tensors = tensors_of(module, args, kwargs)

    def run(side: AbstractContextManager[Any], *, double: bool = False) -> Results:
        with side, untouched_randomness(_SEED, tensors):
            return Call(module, args, kwargs, double=double, without_dropout=dropout).run()

    # Around everything, because copying a module may draw random numbers as well.
    around = untouched_randomness(_SEED, tensors)
    with torch.inference_mode(False), torch.enable_grad(), comparing(), around:
        with recording() as seen:
            our_results = run(ours())
        with upstream():
            call = Call(module, args, kwargs, without_dropout=dropout)
            with recorded_paths(call.module) as paths, untouched_randomness(_SEED, tensors):
                upstream_results = call.run()
        truth = run(upstream(), double=True)
    if not any(out.is_floating_point() for out in truth.outputs.values()):
        raise ValueError(
            f"module must return a floating-point tensor, got outputs {sorted(truth.outputs)}"
        )
    errors = [
        error
        for kind, part in (
            ("output", "outputs"),
            ("gradient of input", "input_gradients"),
            ("gradient of parameter", "parameter_gradients"),
        )
        for error in compare_tensors(
            kind,
            getattr(truth, part),
            getattr(upstream_results, part),
            getattr(our_results, part),
            factor,
        )
    ]
    return Accuracy(tuple(errors), tuple(seen.rows), tuple(paths), tuple(dropout))


def inconclusive(accuracy: Accuracy) -> str | None:
    """Why the float64 run cannot serve as the truth, if it cannot."""
    for error in accuracy.tensors:
        if error.kind == "output" and error.upstream > _INCONCLUSIVE:
            return (
                f"upstream's own {error.name} differs from float64 by {error.upstream:.1g} of its "
                "size: the module may draw random numbers that depend on the dtype; "
                "compare it in eval mode"
            )
    return None


def _notes(module: nn.Module, accuracy: Accuracy) -> tuple[str, ...]:
    notes = []
    if any(_is_compiled(part) for part in module.modules()):
        notes.append(f"{NOT_COUNTED}, so routing is not known for them")
    elif not any(row.routed for row in accuracy.routing):
        notes.append("no layer was routed: both sides ran upstream's own code")
    if accuracy.attention_dropout:
        layers = ", ".join(name or "the module" for name in accuracy.attention_dropout)
        notes.append(
            f"attention dropout is active in {layers}: its random stream differs from "
            "upstream's by design, so errors are those with the rate set to zero, and with it "
            "means over several seeds are compared"
        )
    return tuple(notes)


def _is_compiled(module: nn.Module) -> bool:
    # torch.compile(module), and module.compile()
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def _device(tensors: Sequence[Tensor]) -> torch.device:
    return next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu"))
