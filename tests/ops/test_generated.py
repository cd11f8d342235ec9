"""Which edge programs get a kernel of their own on GPUs; ``tests/simt`` runs such kernels."""

from __future__ import annotations

import pytest
import torch

from fastgraph.backends import generated
from fastgraph.backends.generated import GeneratedKernels
from fastgraph.edge_programs.lowering import Code, lower
from fastgraph.edge_programs.program import parse
from fastgraph.edge_programs.source import cuda_source, prelude

SUM = "x = gathered {0}\ny = row {0}\nt0 = mul x y\nsum t0"


def code_of(text: str) -> Code:
    return lower(parse(text), rounds=False).code


INTERPRETED = {
    "a product": "x = gathered 6\np = parameter 24\nt0 = product x p 4\nsum t0",
    "a sum of outer products": "x = gathered 6\ny = row 6\nouter x y",
    "a sum over tiles": "x = gathered 6\nt0 = sum_tiles x 2\nsum t0",
    "heads of three channels": "x = gathered 33\nt0 = fold x 11\nsum t0",
    "heads in two layouts": (
        "x = gathered 12\ny = gathered 16\nt0 = fold x 4\nt1 = fold y 4\nt2 = mul t0 t1\nsum t2"
    ),
    "more than registers hold": "x = gathered 4096\nt0 = fold x 1\nt1 = mul t0 x\nsum t1",
}


@pytest.mark.parametrize("text", INTERPRETED.values(), ids=INTERPRETED)
def test_what_is_interpreted(text: str) -> None:
    assert cuda_source(code_of(text), torch.float32) is None


@pytest.mark.parametrize(
    ("width", "pack", "chunks"), [(64, 4, 1), (6, 2, 1), (7, 1, 1), (256, 4, 1), (600, 4, 3)]
)
def test_vectors_are_as_wide_as_rows_let_them_be(width: int, pack: int, chunks: int) -> None:
    source = cuda_source(code_of(SUM.format(width)), torch.float32)
    assert source is not None and source.chunks == chunks
    assert (f"load<{pack}>(operand0" in source.text) == (pack > 1)


def test_every_number_of_float64_is_written_as_it_is() -> None:
    for number in (0.1, -1e-310, 1e300, float("inf"), float("-inf"), float("nan")):
        text = f"x = gathered 4\nt0 = constant {number!r}\nt1 = mul x t0\nsum t1"
        source = cuda_source(code_of(text), torch.float64)
        assert source is not None
        written = "infinity<A>()" if number - number != 0 else f"A({number.hex()})"
        assert written in source.text


def test_each_program_is_compiled_once_for_a_dtype() -> None:
    compiled: list[str] = []

    def load(source: str, device: torch.device) -> int:
        compiled.append(source)
        return len(compiled)

    kernels = GeneratedKernels(load)
    first, second = code_of(SUM.format(8)), code_of(SUM.format(16))
    x = torch.zeros(4)
    found = [kernels(code, like) for code in (first, second) for like in (x, x, x.double())]
    assert [kernel and kernel.address for kernel in found] == [1, 1, 2, 3, 3, 4]
    assert all(source.startswith(prelude()) for source in compiled)


def test_nothing_is_compiled_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = GeneratedKernels(lambda source, device: 1)
    code, x = code_of(SUM.format(8)), torch.zeros(4)
    with monkeypatch.context() as patch:
        patch.setattr(generated, "is_capturing", lambda *tensors: True)
        assert kernels(code, x) is None
    assert kernels(code, x) is not None  # not remembered


def test_without_a_compiler_all_programs_are_interpreted() -> None:
    def load(source: str, device: torch.device) -> int:
        raise AssertionError("there is no compiler")

    assert GeneratedKernels(load, lambda: False)(code_of(SUM.format(8)), torch.zeros(4)) is None
