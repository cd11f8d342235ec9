"""The check of kernels passes what is right, and finds what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgraph.backends import reference
from fastgraph.graphs.graph import Graph
from fastgraph.plugins.backend import FLOATING
from fastgraph.registry.operators import SIGNATURES
from fastgraph.registry.registry import REGISTRY
from fastgraph.verification.cases import graphs, typical
from fastgraph.verification.checking import Finding, check, operators

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_kernels_of_the_cpu_pass(name: str, dtype: torch.dtype) -> None:
    found = list(check(REGISTRY.backends[name], CPU, [dtype]))
    expected = set(operators())
    if name == "cpu" and dtype.itemsize < 4:
        expected.remove("edge_attention")
    assert [finding.failure for finding in found] == [None] * len(expected)
    assert {finding.operator for finding in found} == expected
    assert all(finding.calls > 0 and 0 <= finding.error <= 1 for finding in found)


class Planted:
    """The reference with one kernel that does something else to its result."""

    name = "planted"
    priority = 500

    def __init__(self, operator: str, change: Callable[[tuple[Any, ...]], object]) -> None:
        self._operator, self._change = operator, change

    def unavailable(self) -> str | None:
        return None

    def kernel(self, operator: str, device_type: str, dtype: torch.dtype) -> Any:
        if operator.removesuffix("_backward") != self._operator.removesuffix("_backward"):
            return None
        kernel = getattr(reference, operator)
        if operator != self._operator:
            return kernel

        def changed(*arguments: Any, **keywords: Any) -> object:
            found = kernel(*arguments, **keywords)
            return self._change(found if isinstance(found, tuple) else (found,))

        return changed


def one_off(found: tuple[Any, ...]) -> object:
    """Off by a per cent in one element of the first result."""
    first, *rest = found
    first = first.clone()
    first.view(-1)[first.abs().argmax()] *= 1.01
    return first, *rest


def one_missing(found: tuple[Any, ...]) -> object:
    return found[:-1]


def wrong_dtype(found: tuple[Any, ...]) -> object:
    return found[0].double(), *found[1:]


def wrong_shape(found: tuple[Any, ...]) -> object:
    return found[0].unsqueeze(0), *found[1:]


def not_a_number(found: tuple[Any, ...]) -> object:
    return torch.full_like(found[0], torch.nan), *found[1:]


def another_winner(found: tuple[Any, ...]) -> object:
    out, record = found
    return out, record + 1


def another_edge(found: tuple[Any, ...]) -> object:
    out, record = found
    return out, torch.where(record == 1, ~torch.zeros_like(record), record)


def raises(found: tuple[Any, ...]) -> object:
    raise RuntimeError("an illegal memory access")


@pytest.mark.parametrize(
    ("operator", "change", "text"),
    [
        ("spmm", one_off, "result 0 is off by"),
        ("sddmm", not_a_number, "result 0 is off by nan"),
        ("segment_reduce", another_winner, "result 1 differs"),
        ("segment_reduce", another_edge, "result 1 differs"),
        ("segment_reduce_backward", one_off, "result 0 is off by"),
        ("edge_softmax_backward", wrong_shape, r"result 0 is \[1, "),
        ("gatv2", one_missing, "2 results instead of 3"),
        ("gatv2_backward", one_off, "result 0 is off by"),
        ("gat", raises, "RuntimeError: an illegal memory access"),
        ("attention_backward", wrong_dtype, "of torch.float64, not .* of torch.float32"),
        ("head_scores", one_off, "result 0 is off by"),
    ],
)
def test_a_fault_is_found(operator: str, change: Any, text: str) -> None:
    (found,) = check(Planted(operator, change), CPU, [torch.float32])
    assert found.operator == operator.removesuffix("_backward")
    assert found.failure is not None and found.error > 1
    assert found.failure.startswith(f"{operator} (")
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(found.failure)


class Forgetful(Planted):
    """The reference with a kernel to which the last edge of a graph is unknown."""

    def __init__(self, operator: str) -> None:
        super().__init__(operator, lambda found: found)

    def kernel(self, operator: str, device_type: str, dtype: torch.dtype) -> Any:
        if operator != self._operator:
            return None
        kernel = getattr(reference, operator)

        def forgetting(graph: Graph, *arguments: Any, **keywords: Any) -> object:
            edge_index = graphs()[0].edge_index
            by_edge = [x for x in arguments if isinstance(x, Tensor) and len(x) == graph.num_edges]
            if graph.num_edges and not by_edge:
                graph = Graph(edge_index[:, :-1], graph.num_src, graph.num_dst)
            return kernel(graph, *arguments, **keywords)

        return forgetting


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("operator", ["spmm", "gatv2", "gat", "attention"])
def test_one_edge_of_hundreds_is_missed(operator: str, dtype: torch.dtype) -> None:
    """In a row with many, where half of the digits are lost in the roundings of a result."""
    destinations = graphs()[0].edge_index[1]
    assert int((destinations == destinations[-1]).sum()) > 100
    (found,) = check(Forgetful(operator), CPU, [dtype])
    assert found.failure is not None and "is off by" in found.failure


def test_every_kernel_is_timed() -> None:
    assert typical().keys() == SIGNATURES.keys()


def test_too_little_memory_is_not_the_kernel_s_fault() -> None:
    def full(found: tuple[Any, ...]) -> object:
        raise torch.OutOfMemoryError("nothing left")

    with pytest.raises(torch.OutOfMemoryError):
        list(check(Planted("spmm", full), CPU, [torch.float32]))


def test_arguments_reach_kernels_misaligned() -> None:
    """As views of a user's tensors may be."""
    offsets: list[int] = []

    def look(found: tuple[Tensor, ...]) -> object:
        return found

    backend = Planted("head_scores", look)
    kernel = backend.kernel("head_scores", "cpu", torch.float32)

    class Watching(Planted):
        def kernel(self, operator: str, device_type: str, dtype: torch.dtype) -> Any:
            if operator != "head_scores":
                return None

            def watched(x: Tensor, att: Tensor) -> Tensor:
                offsets.append(x.data_ptr() % 16)
                return kernel(x, att)[0]  # type: ignore[no-any-return]

            return watched

    (found,) = check(Watching("head_scores", look), CPU, [torch.float32])
    assert isinstance(found, Finding) and found.failure is None
    assert offsets and all(offset == 4 for offset in offsets)
