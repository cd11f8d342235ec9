"""Gradients of parameters, which are summed over ranks together at the end of a backward pass.

A sum over ranks takes about as long for one small gradient as for all of them. So a gradient that
autograd would do nothing with but add it to ``.grad`` waits for the others of its backward pass, as
in the buckets of DistributedDataParallel. Every other gradient is summed when it comes: one that a
hook, ``torch.autograd.grad`` or a second derivative wants. Whoever can look at a gradient finds it
whole.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import Node

from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.world import WORLD

SMALL = 2**18
"""Bytes of a gradient that waits at most: the sum of a larger one takes its bytes, not messages."""

TOGETHER = 2**22
"""Bytes that are summed together at most."""

_LEAF = "torch::autograd::AccumulateGrad"

_LINEAR = frozenset(
    (
        *(
            f"{name}Backward0"
            for name in (
                *("Add", "Cat", "Clone", "Expand", "Neg", "Permute", "Select", "Slice", "Split"),
                *("Squeeze", "Stack", "Sub", "Sum", "T", "ToCopy", "Transpose", "Unbind"),
                *("UnsafeView", "Unsqueeze", "View"),
            )
        ),
        *("SqueezeBackward1", "SumBackward1"),
    )
)
"""Autograd nodes that move elements or add them up, as layers derive weights from parameters.

Their backward pass needs no tensor but the gradient and is linear in it, so that it can run twice:
without the gradient in the pass at whose end that gradient is summed, then with it.
"""

WATCHED = "fastgraph.dist: watched"
"""In the metadata of autograd nodes: somebody gets the gradient of what the node has made."""

Leaf = Any  # the node of a leaf, AccumulateGrad, which torch has no type for


class _Pass:
    """The gradients that wait for the end of a backward pass."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Tensor]] = []

    def add(self, x: Tensor, grad: Tensor) -> None:
        """Have the gradient of a tensor wait."""
        self._waiting.append((x, grad))

    def finish(self) -> None:
        """Sum all of them over ranks, and let autograd do with them what it would have done."""
        for kind in dict.fromkeys((grad.dtype, grad.device) for _, grad in self._waiting):
            waiting = [pair for pair in self._waiting if (pair[1].dtype, pair[1].device) == kind]
            for bundle in bundles([grad.nbytes for _, grad in waiting]):
                _sum(waiting[bundle])


_PASSES: weakref.WeakValueDictionary[int, _Pass] = weakref.WeakValueDictionary()
"""By the number that autograd has given them. It alone keeps them, until they end or fail."""


def is_small(grad: Tensor) -> bool:
    """True if a gradient is one of those that wait, unless somebody looks at it.

    All of these are summed in the order of ranks, so that they have the same bits if they do not.
    """
    return grad.layout == torch.strided and grad.nbytes <= SMALL


def may_wait(x: Tensor) -> bool:
    """True if the gradient of a tensor can wait: it is a leaf, or elements of leaves and sums."""
    node = x.grad_fn
    if x.is_leaf or node is None:
        return x.is_leaf
    return all(name == _LEAF or name in _LINEAR for name in (n.name() for n in _from(node)))


def waits(x: Tensor, node: Node, grad: Tensor) -> bool:
    """True if a gradient has been left for the end of the backward pass that is running.

    Args:
        x: a replicated tensor that :func:`may_wait`, and that each rank has used on its own rows.
        node: of autograd, that the gradient of ``x`` goes to.
        grad: what this rank has of it.
    """
    if not _can_wait(x, node, grad):
        return False
    number = torch._C._current_graph_task_id()
    running = _PASSES.get(number)
    if running is None:
        running = _PASSES[number] = _Pass()
        Variable._execution_engine.queue_callback(running.finish)
    running.add(x, grad)
    return True


def bundles(sizes: Sequence[int]) -> Iterator[slice]:
    """Which of some gradients, in their order, are summed together.

    Args:
        sizes: bytes of each.
    """
    first, total = 0, 0
    for position, size in enumerate(sizes):
        if position > first and total + size > TOGETHER:
            yield slice(first, position)
            first, total = position, 0
        total += size
    if sizes:
        yield slice(first, len(sizes))


def _can_wait(x: Tensor, node: Node, grad: Tensor) -> bool:
    if WORLD.size == 1 or torch.is_grad_enabled():  # as with create_graph=True
        return False
    if not is_small(grad) or _is_watched(x):
        return False
    return all(_can_have_its_gradient_later(one) for one in _from(node))


def _can_have_its_gradient_later(node: Leaf) -> bool:
    if node.name() != _LEAF:
        return WATCHED not in node.metadata
    x: Tensor = node.variable
    return x.requires_grad and not _is_watched(x) and _accumulates(node)


def _from(node: Node) -> Iterator[Node]:
    """A node of autograd and those that its gradient goes to, each once."""
    left, seen = [node], {node}
    while left:
        node = left.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                left.append(following)


def _is_watched(x: Tensor) -> bool:
    """True if somebody gets the gradient of a tensor while the backward pass is running."""
    return bool(x._backward_hooks or x._post_accumulate_grad_hooks or x.retains_grad)


def _accumulates(leaf: Node) -> bool:
    """True if the backward pass adds to the gradient of a leaf, given by its node.

    ``torch.autograd.grad`` gives it to its caller instead.
    """
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError as error:
        if "autograd.grad()" not in str(error):
            raise
        return False


def _sum(waiting: Sequence[tuple[Tensor, Tensor]]) -> None:
    tensors, gradients = zip(*waiting, strict=True)
    summed = transport.all_reduce_in_order(torch.cat([grad.flatten() for grad in gradients]))
    parts = summed.split([grad.numel() for grad in gradients])
    # Autograd copies what a leaf gets of these parts, but keeps what is a view of them.
    whole = [
        (part if x.is_leaf else part.clone()).view(grad.shape)
        for x, grad, part in zip(tensors, gradients, parts, strict=True)
    ]
    torch.autograd.backward(tensors, whole)
