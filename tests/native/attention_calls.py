"""A valid call of each native function of attention with random arguments, and a check."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

import torch
from torch import Tensor

from fastgraph.backends import reference
from fastgraph.plugins.backend import FLOATING, accumulator
from tests.native.drawing import (
    Call,
    Draw,
    Library,
    Prepared,
    assert_all_near,
    assert_equal,
    built,
    transposed,
)


class Attention:
    """An attention operator on random inputs, and what the reference makes of them in float64.

    Gradients are computed where they are compared, as those of most calls are not.
    """

    def __init__(self, lib: Library, draw: Draw, operator: str) -> None:
        self.operator = operator
        in_ascending_order = built(lib, draw)
        self.graph = graph = draw.in_any_order(in_ascending_order)
        self.flipped = draw.in_any_order(transposed(lib, in_ascending_order))
        # Of the folded projection of edges half types are rounded, and not used.
        is_projected = operator == "edge_attention"
        dtype = draw.one_of(*FLOATING[:2]) if is_projected else draw.element()
        heads, width = draw.number(0, 4), draw.width()
        if operator == "biased_attention" and draw.flag():
            heads = draw.one_of(8, 33)  # with vectors of heads, and more than batches have
        edge_dim = draw.one_of(None, None, 0, 1, 3, 16, 20)

        def features(count: int, *shape: int) -> Tensor:
            return draw.features(dtype, count, *shape)

        edge = None if edge_dim is None else features(graph.num_edges, edge_dim)
        self.inputs: dict[str, Tensor | None]
        if operator == "gatv2":
            self.inputs = {
                "x_src": features(graph.num_cols, heads, width),
                "x_dst": features(graph.num_rows, heads, width),
                "att": features(1, heads, width),
                "edge": edge,
                "weight_edge": None if edge is None else features(heads, edge_dim, width),
            }
        elif operator == "gat":
            self.inputs = {
                "x": features(graph.num_cols, heads, width),
                "score_src": features(graph.num_cols, heads),
                "score_dst": features(graph.num_rows, heads),
                "score_edge": draw.maybe(features(graph.num_edges, heads)),
            }
        else:
            of_edges = 0 if is_projected else edge_dim or 0
            self.inputs = {
                "query": features(graph.num_rows, heads, width + of_edges),
                "key": features(graph.num_cols, heads, width),
                "value": features(graph.num_cols, heads, width),
                "edge": edge,
            }
            if is_projected:
                weight = None if edge is None else features(heads, edge_dim, width)
                self.inputs["weight_edge"] = weight
            if operator == "biased_attention":
                self.inputs |= self._biases(draw, dtype, heads)
        given = [tensor for tensor in self.inputs.values() if _is_feature(tensor)]
        self.special = draw.with_specials(draw.one_of(*given))
        self.options = {
            # A power of 2, so that scores have no roundings.
            "scale" if "query" in self.inputs else "slope": 0.25,
            "dropout": draw.one_of(0.0, 0.0, 0.3, 1.0),
            "seed": draw.number(-(2**63), 2**63 - 1),
        }
        self.wide = [t.double() if _is_feature(t) else t for t in self.inputs.values()]
        out, stats, alpha = getattr(reference, operator)(
            graph, *self.wide, False, *self.options.values(), True
        )
        self.grad = draw.features(dtype, *out.shape)
        self.alpha = draw.maybe(draw.features(dtype, *alpha.shape))
        self.exact_stats, self.stats = stats, stats.to(accumulator(dtype))
        self.grad_logsum = draw.maybe(draw.features(self.stats.dtype, *stats.shape[:2]))
        nodes = draw.one_of(1, len(out))
        self.addend = draw.maybe(draw.features(dtype, nodes, *out.shape[1:]))
        out = out if self.addend is None else out + self.addend.double()
        self.results = {"out": out, "stats": stats, "alpha": alpha}
        # A product of two rows, or the projection of an edge's. Where 8,800 edges join two hubs the
        # reference itself, in float32, is wrong by four fifths of the bound that this alone gives.
        of_hub = int(torch.bincount(graph.col).max()) / 2048 if graph.num_edges else 0.0
        self.magnitude = 4.0 * (1 + width) * (1 + (edge_dim or 0)) * (1 + of_hub)

    def gradients(self) -> dict[str, Tensor]:
        """Those of the reference, which take longer than all else that is drawn."""
        found = getattr(reference, f"{self.operator}_backward")(
            self.graph,
            self.grad.double(),
            None if self.alpha is None else self.alpha.double(),
            None if self.grad_logsum is None else self.grad_logsum.double(),
            *self.wide,
            self.exact_stats,
            False,
            *self.options.values(),
        )
        return {f"grad_{name}": g for name, g in zip(self.inputs, found, strict=True)}

    def _biases(self, draw: Draw, dtype: torch.dtype, heads: int) -> dict[str, Tensor | None]:
        """None, that of edges, that of their types, or both."""
        edges, types = self.graph.num_edges, draw.one_of(1, 5, 30, 700)
        bias = draw.maybe(draw.features(dtype, edges, heads))
        integers = (torch.int16, torch.int32, torch.int64, *([torch.uint8] if types < 256 else []))
        index = draw.maybe(draw.integers(0, types, edges).to(draw.one_of(*integers)))
        table = None if index is None else draw.features(dtype, types, heads)
        return {"bias": bias, "table": table, "bias_index": index}

    def forward(self) -> Prepared:
        outputs = {
            "out": torch.full_like(self.grad, 77.0),
            "stats": torch.full_like(self.stats, 77.0),
            "alpha": None if self.alpha is None else torch.full_like(self.alpha, 77.0),
        }
        addend = {"addend": self.addend}
        call = self.graph.arguments | self.inputs | self.options | outputs | addend
        return call, lambda _: self._check(outputs, lambda: self.results, 1)

    def backward(self) -> Prepared:
        return self._backward(self.graph.arguments | self.flipped.arguments_t, {}, self.inputs)

    def backward_dst(self, *names: str) -> Prepared:
        numbers, edge = 2, self.inputs.get("edge")
        x = self.inputs.get("x_dst")  # of additive scores, which leave a bit for each channel
        if x is not None and edge is not None and edge.shape[1] > 0:
            numbers += -(-x.shape[2] // (8 * self.stats.itemsize))
        between = self.stats.new_full((*self.results["alpha"].shape, numbers), 77.0)
        return self._backward(self.graph.arguments, {"between": between}, names)

    def backward_src(self, lib: Library, function: str, *names: str) -> Prepared:
        others = [n for n in self.inputs if n not in (*names, "bias_index")]
        call, _ = self.backward_dst(*others)
        lib(f"{function}_backward_dst", *call.values())
        return self._backward(self.flipped.arguments_t, {"between": call["between"]}, names)

    def _backward(self, matrices: Call, between: Call, names: Iterable[str]) -> Prepared:
        """The call that writes the gradients of the named inputs, with its check."""
        outputs = {f"grad_{name}": self._gradient(name) for name in names}
        given = {"stats": self.stats, "grad": self.grad, "grad_alpha": self.alpha}
        given |= {"grad_logsum": self.grad_logsum, **between}
        call = matrices | self.inputs | self.options | given | outputs
        return call, lambda _: self._check(outputs, self.gradients, self.magnitude)

    def _gradient(self, name: str) -> Tensor | None:
        tensor = self.inputs[name]
        if tensor is None:
            return None
        if name == "edge":
            # These two write it, and each head of the others adds to it.
            before = 77.0 if self.operator in ("gatv2", "edge_attention") else 0.0
            return torch.full_like(tensor, before, dtype=self.stats.dtype)
        return torch.full_like(tensor, 77.0)

    def _check(
        self,
        outputs: dict[str, Tensor | None],
        expected: Callable[[], dict[str, Tensor]],
        magnitude: float,
    ) -> None:
        if not self.special:
            assert_all_near(outputs, expected(), magnitude)


def _is_feature(x: Tensor | None) -> TypeGuard[Tensor]:
    """True for what is there and differentiable."""
    return x is not None and x.is_floating_point()


def gatv2(lib: Library, draw: Draw) -> Prepared:
    return Attention(lib, draw, "gatv2").forward()


def gatv2_backward_dst(lib: Library, draw: Draw) -> Prepared:
    return Attention(lib, draw, "gatv2").backward_dst("x_dst", "att", "edge", "weight_edge")


def gatv2_backward_src(lib: Library, draw: Draw) -> Prepared:
    return Attention(lib, draw, "gatv2").backward_src(lib, "gatv2", "x_src")


def gat(lib: Library, draw: Draw) -> Prepared:
    return Attention(lib, draw, "gat").forward()


def gat_backward(lib: Library, draw: Draw) -> Prepared:
    return Attention(lib, draw, "gat").backward()


def attention(lib: Library, draw: Draw) -> Prepared:
    return Attention(lib, draw, "attention").forward()


def attention_backward_dst(lib: Library, draw: Draw) -> Prepared:
    return Attention(lib, draw, "attention").backward_dst("query", "edge")


def attention_backward_src(lib: Library, draw: Draw) -> Prepared:
    return Attention(lib, draw, "attention").backward_src(lib, "attention", "key", "value")


def edge_attention(lib: Library, draw: Draw) -> Prepared:
    return Attention(lib, draw, "edge_attention").forward()


def edge_attention_backward_dst(lib: Library, draw: Draw) -> Prepared:
    names = ("query", "edge", "weight_edge")
    return Attention(lib, draw, "edge_attention").backward_dst(*names)


def edge_attention_backward_src(lib: Library, draw: Draw) -> Prepared:
    made = Attention(lib, draw, "edge_attention")
    return made.backward_src(lib, "edge_attention", "key", "value")


def biased_attention(lib: Library, draw: Draw) -> Prepared:
    return Attention(lib, draw, "biased_attention").forward()


def biased_attention_backward_dst(lib: Library, draw: Draw) -> Prepared:
    names = ("query", "edge", "bias", "table")
    return Attention(lib, draw, "biased_attention").backward_dst(*names)


def biased_attention_backward_src(lib: Library, draw: Draw) -> Prepared:
    made = Attention(lib, draw, "biased_attention")
    return made.backward_src(lib, "biased_attention", "key", "value")


def head_scores(lib: Library, draw: Draw) -> Prepared:
    dtype, heads, width = draw.element(), draw.number(0, 4), draw.width()
    nodes, count = draw.number(0, draw.one_of(5, 600)), draw.number(0, 3)
    x, att = draw.features(dtype, nodes, heads, width), draw.features(dtype, count, heads, width)
    special = draw.with_specials(x)
    scores = torch.full((count, nodes, heads), 77.0, dtype=dtype)

    def check(_: Any) -> None:
        if not special:
            assert_equal(scores, reference.head_scores(x.double(), att.double()))

    return {"x": x, "att": att, "scores": scores}, check


def head_scores_backward(lib: Library, draw: Draw) -> Prepared:
    call, _ = head_scores(lib, draw)
    x, att, scores = call.values()
    special = not bool(x.isfinite().all())
    grad = draw.features(scores.dtype, *scores.shape)
    addend = draw.maybe(draw.features(x.dtype, *x.shape))
    grad_x, grad_att = torch.full_like(x, 77.0), torch.full_like(att, 77.0)

    def check(_: Any) -> None:
        if not special:
            wide = (x.double(), att.double(), grad.double())
            other = None if addend is None else addend.double()
            expected = reference.head_scores_backward(*wide, addend=other)
            assert_equal(grad_x, expected[0])
            assert_equal(grad_att, expected[1])

    given = {"x": x, "att": att, "grad": grad, "addend": addend}
    return given | {"grad_x": grad_x, "grad_att": grad_att}, check


ATTENTION_CALLS = (
    gatv2,
    gatv2_backward_dst,
    gatv2_backward_src,
    gat,
    gat_backward,
    attention,
    attention_backward_dst,
    attention_backward_src,
    edge_attention,
    edge_attention_backward_dst,
    edge_attention_backward_src,
    biased_attention,
    biased_attention_backward_dst,
    biased_attention_backward_src,
    head_scores,
    head_scores_backward,
)
