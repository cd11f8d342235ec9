"""One checkout of fastgraph, which runs the layers that it is asked for.

    CHECKOUT/.venv/bin/python benchmarks/measure/checkout_steps.py THREADS

Reads a JSON list on each line of its input, a method of :class:`Layers` and its arguments, and
answers with one line. Knows of fastgraph only what all checkouts have in common.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from measure.graphs import load
from measure.layers import LAYERS, without_linear

_USES_BEFORE_ORDER_IS_SETTLED = 40
"""Kernels put the rows of a graph in order after some thirty uses of it."""


class Layers:
    """The layer that is being measured, and its inputs."""

    def begin(self, graph: str, layer: str, channels: int, bare: bool) -> dict[str, str]:
        """Build it, run it until nothing is left to be decided, and tell what it computes.

        Args:
            graph, layer: names.
            channels: of inputs and outputs.
            bare: forward of message passing alone, without gradients.

        Returns:
            SHA-256 of the output, and of every gradient.
        """
        data, case = load(graph), LAYERS[layer]
        options = dict(case.propagate_options) if bare else {}
        module = case.build(channels, **options)
        self._layer = without_linear(module) if bare else module
        torch.manual_seed(0)
        self._x = torch.randn(data.num_nodes, channels, requires_grad=not bare)
        self._edge_index = data.edge_index
        self._bare = bare
        self._grad: Tensor | None = None
        self.step()
        for _ in range(_USES_BEFORE_ORDER_IS_SETTLED):
            self._forward()
        out = self.step()
        gradients = {
            "x": self._x.grad,
            **{name: parameter.grad for name, parameter in self._layer.named_parameters()},
        }
        found = {"output": out, **{f"gradient of {name}": g for name, g in gradients.items()}}
        return {name: _digest(tensor) for name, tensor in found.items() if tensor is not None}

    def turn(self, steps: int) -> list[float]:
        """Seconds of each step, after one that is not counted."""
        seconds = []
        for step in range(steps + 1):
            start = time.perf_counter()
            self.step()
            if step:
                seconds.append(time.perf_counter() - start)
        return seconds

    def step(self) -> Tensor:
        """Forward, and backward unless bare."""
        if self._bare:
            return self._forward()
        self._x.grad = None
        self._layer.zero_grad(set_to_none=True)
        out: Tensor = self._layer(self._x, self._edge_index)
        if self._grad is None:
            torch.manual_seed(1)
            self._grad = torch.randn_like(out)
        out.backward(self._grad)
        return out.detach()

    def _forward(self) -> Tensor:
        with torch.no_grad():
            out: Tensor = self._layer(self._x, self._edge_index)
        return out


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def main() -> None:
    import fastgraph

    torch.set_num_threads(int(sys.argv[1]))
    warnings.simplefilter("ignore")
    fastgraph.enable(min_edges=0)
    layers = Layers()
    _answer({"package": fastgraph.__file__})
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        _answer(getattr(layers, method)(*arguments))


def _answer(value: Any) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
