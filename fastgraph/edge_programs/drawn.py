"""Random numbers in the place of all that a message takes, on which its program is compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fastgraph.edge_programs.called import Called
from fastgraph.edge_programs.node_counts import is_count
from fastgraph.edge_programs.recorded import Refused
from fastgraph.edge_programs.relations import EdgeTypes
from fastgraph.edge_programs.traced import Argument, Dropout, Index

NUM_EDGES, NUM_NODES = 64, 24


@dataclass(frozen=True)
class Drawn:
    """Random numbers for a message, and a small graph.

    Edges are few, in no order, and each is there twice. Numbers are positive, or such that many are
    equal or zero.

    Attributes:
        own: what the message and its reductions take, by name, of nodes, edges or the program.
        state: the parameters and buffers of its layer.
        row: int64 ``[E]``, the aggregating node of each edge.
        gathered: int64 ``[E]``, the gathered node of each edge.
        is_positive: true for positive numbers.
        generator: of further ones.
    """

    own: dict[str, Tensor]
    state: dict[str, Tensor]
    row: Tensor
    gathered: Tensor
    is_positive: bool
    generator: torch.Generator

    @classmethod
    def of(
        cls,
        call: Called,
        arguments: Mapping[str, object],
        besides: Mapping[str, Argument],
        types: EdgeTypes | None,
        *,
        is_positive: bool,
    ) -> Drawn:
        """Numbers for a message.

        Args:
            call: of the message.
            arguments: that it takes, by name.
            besides: what its reductions take besides.
            types: of edges, if it takes some.
            is_positive: true for positive numbers.
        """
        generator = torch.Generator().manual_seed(int(is_positive))
        ends = torch.randint(NUM_NODES, (2, NUM_EDGES // 2), generator=generator, device="cpu")
        order = torch.randperm(NUM_EDGES, generator=generator, device="cpu")
        row, gathered = torch.cat([ends, ends], dim=1)[:, order]
        made = cls({}, {}, row, gathered, is_positive, generator)
        for name, a in (*arguments.items(), *besides.items()):
            if isinstance(a, Argument):
                rows = {"row": NUM_NODES, "gathered": NUM_NODES}.get(a.place, NUM_EDGES)
                shape = a.channels if a.place == "parameter" else (rows, *a.channels)
                made.own[name] = made.numbers(shape, a.dtype)
                if types is not None and name == types.name:
                    made.own[name] = torch.randint(
                        types.count, shape, generator=generator, device="cpu"
                    )
        for name, tensor in call.state().items():
            is_parameter = isinstance(tensor, nn.Parameter)
            drawn = made.numbers(tensor.shape, tensor.dtype)
            if not (is_parameter or tensor.requires_grad):  # torch may have no gradient of buffers
                drawn = drawn.detach()
            drawn._is_param = is_parameter
            made.state[name] = drawn
        return made

    def numbers(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """More of them, of float64 and with a gradient unless they are integers."""
        if not dtype.is_floating_point:
            return torch.zeros(tuple(shape), dtype=dtype, device="cpu")
        made = torch.rand(tuple(shape), generator=self.generator, dtype=torch.float64, device="cpu")
        made = made + 0.1 if self.is_positive else (made * 16).round() / 4 - 2
        return made.requires_grad_()

    def factors(self, dropout: Dropout) -> Tensor:
        """Factors of edges in the place of those that a dropout draws."""
        shape = (NUM_EDGES, *dropout.channels)
        kept = torch.rand(shape, generator=self.generator, device="cpu") >= dropout.rate
        return kept.to(torch.float64) / (1 - dropout.rate if dropout.rate < 1 else 1)

    def given(
        self, arguments: Mapping[str, object], own: Mapping[str, Tensor]
    ) -> dict[str, object]:
        """The arguments of the message, of such tensors as :attr:`own` has."""
        index = {"row": self.row, "gathered": self.gathered}
        found = dict(arguments)
        for name, a in arguments.items():
            if isinstance(a, Argument):
                found[name] = own[name][index[a.place]] if a.place in index else own[name]
            elif isinstance(a, Index):
                found[name] = index[a.place]  # Some of torch's gradients are wrong for int32.
            elif is_count(a):
                found[name] = NUM_NODES
        return found


class Dropping(TorchFunctionMode):
    """Has dropouts multiply by factors that are given, one after the other, in place of drawn ones.

    So neither is the generator of the process asked, of which other threads may draw, nor seeded.
    """

    def __init__(self, factors: Iterable[Tensor]) -> None:
        super().__init__()
        self._factors = iter(factors)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _DROPOUTS:
            return func(*args, **kwargs)
        given = _DROPOUTS[func] | dict(zip(_NAMES[func], args, strict=False)) | kwargs
        if not given[_NAMES[func][2]] or given["p"] == 0:
            return func(*args, **kwargs)
        values, factors = given["input"], next(self._factors, None)
        if factors is None or factors.shape != values.shape:
            raise Refused("it draws other random numbers on other edges")
        return values.mul_(factors) if given["inplace"] else values * factors


_NAMES = {
    F.dropout: ("input", "p", "training", "inplace"),
    torch.dropout: ("input", "p", "train"),
    torch.dropout_: ("input", "p", "train"),
}
_DROPOUTS: dict[Any, dict[str, Any]] = {
    F.dropout: {"p": 0.5, "training": True, "inplace": False},
    torch.dropout: {"inplace": False},
    torch.dropout_: {"inplace": True},
}
"""Functions of torch that drop, with their defaults."""
