"""Random numbers in the place of all that a message takes, on which its program is compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastgraph.edge_programs.called import Called
from fastgraph.edge_programs.node_counts import is_count
from fastgraph.edge_programs.relations import EdgeTypes
from fastgraph.edge_programs.traced import Argument, Index

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
