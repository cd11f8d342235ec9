"""Pairs of a program's replicated tensor and the sharded one made of it, edited together.

On one process the graph holds the program's own tensor. So an edit of one of the two is one of the
other, and a sharded tensor has the gradient of its original. All ranks have the same original, and
see the same edits: those that torch counts at the next operation, others by its content, at the
next operation on its rows. All of it is read, features of a graph once for each layer that takes
them, as nothing less tells of a row that NumPy has written.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastgraph.dist.ranks import transport
from fastgraph.dist.ranks.own_device import HOST
from fastgraph.dist.tensor.contents import flat
from fastgraph.dist.tensor.layout import Layout
from fastgraph.dist.tensor.memo import count_edit, fingerprint, watch_edits

if TYPE_CHECKING:
    from fastgraph.dist.tensor.sharded import ShardedTensor

State = tuple[int, int, torch.Size, torch.dtype]


class _Pair:
    """A replicated tensor and the rows of it that this rank keeps.

    Attributes:
        original: the replicated tensor, for as long as the program has it.
        local: the rows, for as long as they are used.
        rows: which these are.
        axis: the dimension of which they are.
        state: of the original, when both held the same.
        content: likewise, its fingerprint; ``None`` on a device, for whose values the host would
            have to wait.
    """

    def __init__(self, original: Tensor, local: Tensor, rows: Layout, axis: int) -> None:
        self.original, self.local = weakref.ref(original), weakref.ref(local)
        self.rows, self.axis = rows, axis
        self._are_alike(original)

    def _are_alike(self, original: Tensor) -> None:
        self.state = _state(original)
        self.content = fingerprint(original) if original.device == HOST else None

    def follow(self) -> None:
        """Have the rows changed as the original was, as far as torch has counted its edits."""
        original, local = self.original(), self.local()
        if original is not None and local is not None and _state(original) != self.state:
            self._copy(original, local)

    def confirm(self) -> None:
        """Have the rows changed as the original was where torch has not counted it."""
        original, local = self.original(), self.local()
        if original is None or local is None or self.content is None:
            return
        if not self.content.confirms([flat(original)]):
            self._copy(original, local)

    def _copy(self, original: Tensor, local: Tensor) -> None:
        if original.shape[self.axis] != self.rows.n or original.dtype != local.dtype:
            raise RuntimeError(
                "a tensor that a graph had taken was given another shape or dtype; assign it to "
                "the graph again"
            )
        if original.grad_fn is not None:
            raise RuntimeError(
                "a tensor that a graph had taken was changed by an operation whose gradient is "
                "recorded; assign it to the graph again"
            )
        with torch.no_grad():
            rows = self.rows.position_on(original.device)
            local.copy_(original.index_select(self.axis, rows))
        count_edit(local)
        self._are_alike(original)

    def write_back(self, local: Tensor) -> bool:
        """Have the original changed as its rows were; all ranks together.

        Returns:
            True if a rank still has the original.
        """
        original = self.original()
        if transport.agree(original is None):
            return False
        parts = transport.all_gather(local.detach().movedim(self.axis, 0), self.rows.counts)
        if original is not None:
            with torch.no_grad():
                order = self.rows.order_on(parts.device)
                original.copy_(parts.index_select(0, order).movedim(0, self.axis))
            self._are_alike(original)
        return True


PAIRS: dict[int, _Pair] = {}
"""By the object that stands for the storage of the rows."""


def tie(original: Tensor, sharded: ShardedTensor) -> None:
    """Have a replicated tensor and a sharded one that was made of it be edited together."""
    if original.is_inference():
        return
    local = sharded.local
    storage = local.untyped_storage()
    name = id(storage)
    PAIRS[name] = _Pair(original, local, sharded.rows, sharded.axis)
    weakref.finalize(storage, PAIRS.pop, name, None).atexit = False
    watch_edits(local)


def follow() -> None:
    """Have all rows changed as their originals were since; all ranks together."""
    for pair in list(PAIRS.values()):
        pair.follow()


def confirm(parts: Iterable[Tensor]) -> None:
    """The same for these parts of sharded tensors, where torch has not counted an edit."""
    if PAIRS:
        for part in parts:
            pair = PAIRS.get(id(part.untyped_storage()))
            if pair is not None:
                pair.confirm()


def write_back(edited: Tensor) -> None:
    """Have an original changed as the rows of this rank were; all ranks together."""
    name = id(edited.untyped_storage())
    pair = PAIRS.get(name)
    local = None if pair is None else pair.local()
    if pair is not None and local is not None and not pair.write_back(local):
        del PAIRS[name]


def leaf_of(local: Tensor) -> Tensor | None:
    """The original that accumulates the gradient of these very rows, if there is one."""
    pair = PAIRS.get(id(local.untyped_storage())) if PAIRS and local.grad_fn else None
    original = None if pair is None or pair.local() is not local else pair.original()
    return original if original is not None and original.is_leaf else None


def _state(x: Tensor) -> State:
    return x._version, x.untyped_storage()._cdata, x.shape, x.dtype
