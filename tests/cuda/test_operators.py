"""Every operator on a GPU against the same operator on the CPU in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from fastgraph import ops
from fastgraph.edge_programs.program import parse
from fastgraph.plugins.backend import accumulator
from fastgraph.registry.registry import REGISTRY
from tests.graphs import Case, all_cases, hub_edges, quantised, random_edges

# Builds the differentiable inputs, in float64 on the CPU, and the operator that takes them.
Operator = Callable[..., Tensor | tuple[Tensor | None, ...]]
Build = Callable[[Case, int, int], tuple[list[Tensor], Operator]]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def spmm(case: Case, heads: int, width: int, reduce: str) -> tuple[list[Tensor], Operator]:
    inputs = [normal(case.num_src, heads * width), normal(case.edge_index.shape[1])]

    def call(x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
        return ops.spmm(x, index, weight, num_out=case.num_dst, reduce=reduce)

    return inputs, call


def extremum(
    case: Case, heads: int, width: int, reduce: str, ties: str
) -> tuple[list[Tensor], Operator]:
    def call(x: Tensor, index: Tensor) -> Tensor:
        return ops.segment_reduce(x, index, num_out=case.num_dst, reduce=reduce, ties=ties)

    return [quantised(case.num_src, heads * width)], call


def head_scores(case: Case, heads: int, width: int) -> tuple[list[Tensor], Operator]:
    inputs = [normal(case.num_src, heads, width), normal(2, heads, width)]
    return inputs, lambda x, att, _: ops.head_scores(x, att)


def gatv2(
    case: Case, heads: int, width: int, edge_dim: int, dropout: float
) -> tuple[list[Tensor], Operator]:
    inputs = [normal(n, heads, width) for n in (case.num_src, case.num_dst, 1)]
    if edge_dim:
        inputs += [normal(case.edge_index.shape[1], edge_dim), normal(heads, edge_dim, width)]

    def call(x_src: Tensor, x_dst: Tensor, att: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        *edges, index = rest
        features = dict(zip(("edge", "weight_edge"), edges, strict=False))
        seed = torch.tensor([5]) if dropout else None
        options = {"dropout": dropout, "seed": seed, "need_weights": True, **features}
        return ops.gatv2(x_src, x_dst, att, index, **options)

    return inputs, call


def gat(case: Case, heads: int, width: int, with_edges: bool) -> tuple[list[Tensor], Operator]:
    inputs = [normal(case.num_src, heads, width), normal(case.num_src, heads)]
    inputs += [normal(case.num_dst, heads)]
    if with_edges:
        inputs.append(normal(case.edge_index.shape[1], heads))

    def call(x: Tensor, src: Tensor, dst: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor | None]:
        *edges, index = rest
        return ops.gat(x, src, dst, index, score_edge=edges[0] if edges else None)

    return inputs, call


def attention(case: Case, heads: int, width: int, edge_dim: int) -> tuple[list[Tensor], Operator]:
    inputs = [normal(case.num_dst, heads, width + edge_dim)]
    inputs += [normal(case.num_src, heads, width) for _ in range(2)]
    if edge_dim:
        inputs.append(normal(case.edge_index.shape[1], edge_dim))

    def call(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        *edges, index = rest
        options = {"edge": edges[0] if edges else None, "need_weights": True}
        return ops.attention(query, key, value, index, **options)

    return inputs, call


SUMS = (
    "x = gathered {0}\ny = row {0}\nw = edge {1}\np = parameter {0}\n"
    "t0 = add x y\nt1 = sigmoid t0\nt2 = mul w t1\nt3 = mul p x\nt4 = dot t1 t3 {1}\n"
    "sum t2\nmean t3\nsoftmax x t4\ntotal t4\nedge t4"
)
EXTREMA = "x = gathered {0}\nw = edge {1}\nt0 = mul w x\nmax t0\nmin x"


def edge_program(
    case: Case, heads: int, width: int, text: str, values: Callable[..., Tensor]
) -> tuple[list[Tensor], Operator]:
    program = parse(text.format(heads * width, heads))
    rows = {"row": (case.num_dst,), "gathered": (case.num_src,), "edge": (case.num_edges,)}
    inputs = [values(*rows.get(o.place, ()), o.width) for o in program.operands]

    def call(*given: Tensor) -> tuple[Tensor, ...]:
        *operands, index = given
        named = dict(zip(program.names, operands, strict=True))
        return ops.edge_program(program, named, index, num_in=case.num_src, num_out=case.num_dst)

    return inputs, call


OPERATORS: dict[str, Build] = {
    "spmm-sum": functools.partial(spmm, reduce="sum"),
    "spmm-mean": functools.partial(spmm, reduce="mean"),
    "max-split": functools.partial(extremum, reduce="max", ties="split"),
    "min-winner": functools.partial(extremum, reduce="min", ties="winner"),
    "head_scores": head_scores,
    "gatv2": functools.partial(gatv2, edge_dim=0, dropout=0.0),
    "gatv2-edges": functools.partial(gatv2, edge_dim=3, dropout=0.0),
    "gatv2-dropout": functools.partial(gatv2, edge_dim=0, dropout=0.4),
    "gat": functools.partial(gat, with_edges=False),
    "gat-edges": functools.partial(gat, with_edges=True),
    "attention": functools.partial(attention, edge_dim=0),
    "attention-edges": functools.partial(attention, edge_dim=3),
    "program-sums": functools.partial(edge_program, text=SUMS, values=normal),
    "program-extrema": functools.partial(edge_program, text=EXTREMA, values=quantised),
}
CASES = [*all_cases(), Case("hub_small", hub_edges(30, 1500), 30, 30)]
# On the emulator, tests/simt calls the kernels with these graphs, and with more shapes, dtypes and
# orders of threads, and tests/ops calls the operators.
REPEATS = pytest.mark.repeats
GIVEN = [
    pytest.param(case, marks=() if case.name in ("random", "hub_small") else REPEATS)
    for case in CASES
]


def results(
    inputs: Sequence[Tensor], call: Operator, case: Case, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """Outputs and gradients, back on the CPU."""
    leaves = [x.to(device, dtype).requires_grad_() for x in inputs]
    found = call(*leaves, case.edge_index.to(device))
    outputs = [t for t in (found if isinstance(found, tuple) else (found,)) if t is not None]
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(out.shape, generator=generator).to(device, dtype) for out in outputs]
    gradients = torch.autograd.grad(outputs, leaves, grads, allow_unused=True)
    zeros = (
        torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients, strict=True)
    )
    return [t.detach().cpu() for t in (*outputs, *zeros)]


def check(
    name: str, case: Case, heads: int, width: int, device: torch.device, dtype: torch.dtype
) -> None:
    inputs, call = OPERATORS[name](case, heads, width)
    inputs = [
        x.to(dtype).double() for x in inputs
    ]  # what is rounded here is not the kernels' error
    ours = results(inputs, call, case, device, dtype)
    selected = REGISTRY.selected
    REGISTRY.select("cpu")
    truth = results(inputs, call, case, torch.device("cpu"), torch.float64)
    REGISTRY.select(selected)
    # Sums of up to some thousand terms, and the rounding of the result itself.
    relative = {torch.float64: 1e-11, torch.float32: 1e-4}.get(dtype, 8 * torch.finfo(dtype).eps)
    for position, (a, b) in enumerate(zip(ours, truth, strict=True)):
        # What is known of a softmax, the last output of attention, is not rounded.
        is_stats = name.startswith(("gat", "attention")) and position == len(ours) - len(inputs) - 1
        assert a.dtype == (accumulator(dtype) if is_stats else dtype)
        error = (a.double() - b).abs()
        limit = relative * (b.abs().max() + 1) if b.numel() else 0
        assert bool((error <= limit).all()), f"result {position}: error {float(error.max())}"


@pytest.mark.parametrize("case", GIVEN, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_every_graph(name: str, case: Case, device: torch.device) -> None:
    check(name, case, 2, 12, device, torch.float32)


@REPEATS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 33), (4, 64), (1, 130), (1, 256)])
@pytest.mark.parametrize("name", OPERATORS)
def test_every_shape(
    name: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    check(name, Case("random", random_edges(20, 30, 150), 20, 30), *shape, device, dtype)


@REPEATS
@pytest.mark.parametrize("name", OPERATORS)
def test_bits_are_the_same_in_every_run(name: str, device: torch.device) -> None:
    case = CASES[-1]
    inputs, call = OPERATORS[name](case, 2, 20)
    first = results(inputs, call, case, device, torch.float32)
    for _ in range(3):
        again = results(inputs, call, case, device, torch.float32)
        assert all(map(torch.equal, first, again))
