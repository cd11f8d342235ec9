"""An example plugin: a backend of its own, and a route for a layer that fastgraph does not know."""

import torch

from fastgraph import ops
from fastgraph.backends.reference import ReferenceBackend
from fastgraph.plugins.hookspecs import hookimpl
from fastgraph.plugins.refusal import Refusal
from fastgraph.plugins.route import Route
from fastgraph.routing.dispatch import replace_method

CALLS: list[str] = []


class CountingBackend:
    """The reference backend, which also remembers what it was asked for."""

    name = "counting"
    priority = -10

    def unavailable(self):
        return None

    def kernel(self, operator, device_type, dtype):
        kernel = ReferenceBackend().kernel(operator, device_type, dtype)

        def counted(*args, **kwargs):
            CALLS.append(operator)
            return kernel(*args, **kwargs)

        return counted

    def builder(self, device_type):
        CALLS.append("builder")
        return ReferenceBackend().builder(device_type)


@hookimpl
def fastgraph_backends():
    return [CountingBackend()]


class SumOfSquares(torch.nn.Module):
    """A layer of some library: sums the squares of the neighbours' features."""

    def forward(self, x, edge_index):
        return torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]] ** 2)


def plan(layer, x, edge_index):
    """A function that computes a call, or why it is left to the layer's own code."""
    if not x.is_floating_point():
        return Refusal(f"x has dtype {x.dtype}")
    return lambda: ops.spmm(x**2, edge_index)


def install(patches):
    replace_method(patches, SumOfSquares, "forward", plan)


@hookimpl
def fastgraph_routes():
    return [Route("sum of squares", __name__, install)]
