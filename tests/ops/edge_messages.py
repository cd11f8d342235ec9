"""Messages as edge programs and in torch, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.nn.aggr import StdAggregation, VarAggregation
from torch_geometric.utils import softmax

from fastgraph import ops
from fastgraph.edge_programs.builder import Builder, Value
from fastgraph.edge_programs.program import Program
from tests.graphs import Case, quantised


class Both(NamedTuple):
    """A value of a program, and what torch computes for each edge."""

    value: Value
    tensor: Tensor


class Message:
    """A program and the same in torch, side by side.

    Args:
        case: the graph.
        transpose: whether edges are reversed.
        values: makes the operands, of a shape and a seed.
    """

    def __init__(
        self,
        case: Case,
        transpose: bool = False,
        values: Callable[..., Tensor] = quantised,
    ) -> None:
        self.case, self.transpose, self._values = case, transpose, values
        self.builder = Builder()
        self.operands: dict[str, Tensor] = {}
        self.outputs: list[tuple[str, Value] | tuple[str, Value, Value]] = []
        self.expected: list[Tensor] = []
        src, dst = case.edge_index.long()
        self.gathered, self.row = (dst, src) if transpose else (src, dst)
        self.num_in, self.num_out = case.num_src, case.num_dst
        if transpose:
            self.num_in, self.num_out = self.num_out, self.num_in

    def operand(self, place: str, width: int) -> Both:
        name = f"{place}_{len(self.operands)}"
        rows = {"row": self.num_out, "gathered": self.num_in, "edge": self.case.num_edges}
        shape = (width,) if place == "parameter" else (rows[place], width)
        tensor = self._values(*shape, seed=len(self.operands) + 7).requires_grad_()
        self.operands[name] = tensor
        by_edge = {
            "row": lambda: tensor[self.row],
            "gathered": lambda: tensor[self.gathered],
            "edge": lambda: tensor,
            "parameter": lambda: tensor.expand(self.case.num_edges, -1),
        }[place]()
        return Both(self.builder.operand(name, place, width), by_edge)  # type: ignore[arg-type]

    def constant(self, number: float) -> Both:
        tensor = torch.full((self.case.num_edges, 1), number, dtype=torch.float64)
        return Both(self.builder.constant(number), tensor)

    def apply(self, operation: str, *given: Both | float) -> Both:
        both = [g if isinstance(g, Both) else self.constant(g) for g in given]
        width = max(b.value.width for b in both)
        tensors = [spread(b.tensor, width) for b in both]
        value = self.builder.apply(operation, *(b.value for b in both))
        return Both(value, TORCH[operation](*tensors))

    def product(self, x: Both, width: int, *, is_transposed: bool = False) -> Both:
        """The product of a value with a matrix, which is a new operand."""
        depth = x.value.width
        matrix = self.operand("parameter", depth * width)
        tensor = list(self.operands.values())[-1]
        own = tensor.view(width, depth).t() if is_transposed else tensor.view(depth, width)
        value = self.builder.product(x.value, matrix.value, width, is_transposed=is_transposed)
        return Both(value, x.tensor @ own)

    def outer(self, x: Both, y: Both) -> None:
        """Add the sum of outer products of two values."""
        self.outputs.append(("outer", x.value, y.value))
        self.expected.append((x.tensor.t() @ y.tensor).flatten())

    def weigh(self, both: Both, score: Both) -> None:
        """Add the sum of values weighted by the softmax of scores."""
        self.outputs.append(("softmax", both.value, score.value))
        weight = spread(softmax(score.tensor, self.row, num_nodes=self.num_out), both.value.width)
        zeros = both.tensor.new_zeros(self.num_out, both.value.width)
        self.expected.append(zeros.index_add(0, self.row, weight * both.tensor))

    def reduce(self, reduction: str, both: Both) -> None:
        self.outputs.append((reduction, both.value))
        index = self.row.unsqueeze(-1).expand_as(both.tensor)
        zeros = both.tensor.new_zeros(self.num_out, both.value.width)
        if reduction == "edge":
            out = both.tensor * 1
        elif reduction == "total":
            out = both.tensor.sum(0)
        elif reduction in ("var", "std"):
            aggregate = VarAggregation() if reduction == "var" else StdAggregation()
            out = aggregate(both.tensor, self.row, dim_size=self.num_out)
        elif reduction in ("sum", "mean"):
            out = zeros.scatter_add(0, index, both.tensor)
            if reduction == "mean":
                count = torch.bincount(self.row, minlength=self.num_out).clamp(min=1)
                out = out / count.unsqueeze(-1)
        else:
            out = zeros.scatter_reduce(0, index, both.tensor, f"a{reduction}", include_self=False)
        self.expected.append(out)

    @property
    def program(self) -> Program:
        return self.builder.program(*self.outputs)

    @property
    def used(self) -> dict[str, Tensor]:
        return {name: self.operands[name] for name in self.program.names}

    def run(self, **changes: Tensor) -> tuple[Tensor, ...]:
        return ops.edge_program(
            self.program,
            self.used | changes,
            self.case.edge_index,
            num_in=self.num_in,
            num_out=self.num_out,
            transpose=self.transpose,
        )

    def check(self, *, twice: bool = False) -> None:
        """Outputs, all gradients and, if asked, gradients of these."""
        found, leaves = self.run(), list(self.used.values())
        ours, theirs = of_all(leaves, found, 1), of_all(leaves, self.expected, 1)
        close(found, self.expected)
        first, other = (
            torch.autograd.grad(
                y, leaves, create_graph=twice, allow_unused=True, materialize_grads=True
            )
            for y in (ours, theirs)
        )
        close(first, other)
        if twice:
            second, others = (
                torch.autograd.grad(of_all(leaves, g, 5), leaves) for g in (first, other)
            )
            close(second, others)


def objective(outputs: Sequence[Tensor], seed: int) -> Tensor:
    """A number that is nonlinear in all outputs, so that gradients of gradients are not zero."""
    total = outputs[0].new_zeros(())
    for k, out in enumerate(outputs):
        generator = torch.Generator().manual_seed(seed + k)
        factor = torch.randn(out.shape, generator=generator, dtype=out.dtype)
        total = total + (out * factor).sum() + (out * out * factor).sum() / 8
    return total


def of_all(leaves: Sequence[Tensor], outputs: Sequence[Tensor], seed: int) -> Tensor:
    """The same beside what depends on every leaf, as gradients may depend on none."""
    return objective(outputs, seed) + 0 * torch.stack([leaf.sum() for leaf in leaves]).sum()


def close(ours: Sequence[Tensor], theirs: Sequence[Tensor], **options: float) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **(options or {"rtol": 1e-9, "atol": 1e-9}))


def spread(tensor: Tensor, width: int) -> Tensor:
    return tensor.repeat_interleave(width // tensor.shape[1], dim=1)


def compared(compare: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda a, b: compare(a.detach(), b.detach()).double()


TORCH: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "pow": torch.pow,
    "atan2": torch.atan2,
    "eq": compared(torch.eq),
    "ne": compared(torch.ne),
    "lt": compared(torch.lt),
    "le": compared(torch.le),
    "where": lambda m, a, b: torch.where(m.detach() != 0, a, b),
    "clamp": lambda x, low, high: x.clamp(float(low.min()), float(high.max())) if x.numel() else x,
    "neg": torch.neg,
    "abs": torch.abs,
    "sign": torch.sign,
    "sqrt": torch.sqrt,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "sin": torch.sin,
    "cos": torch.cos,
    "erf": torch.erf,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "relu": F.relu,
    "leaky_relu": lambda x, slope: F.leaky_relu(x, 0.25),
    "elu": lambda x, alpha: F.elu(x, 1.5),
}


def ordinary(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def assert_bits_of_threads(message: Message, threads: int) -> None:
    """Assert that results and all gradients have the same bits as of one thread."""
    leaves = list(message.used.values())

    def results() -> list[Tensor]:
        out = message.run()
        return [*out, *torch.autograd.grad(objective(out, 0), leaves)]

    torch.set_num_threads(1)
    expected = results()
    torch.set_num_threads(threads)
    for ours, theirs in zip(results(), expected, strict=True):
        assert torch.equal(ours, theirs)
