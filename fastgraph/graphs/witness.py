"""Fingerprints and copies that confirm that tensors hold what they held when a cache was filled.

Versions of tensors do not tell: torch counts neither what fused optimizers, compiled code,
collectives and other libraries write, nor what goes through ``.data`` or numpy.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fastgraph.machine import native


class StaleGraphError(RuntimeError):
    """Tensors on a GPU were edited where torch does not count it; results since then are NaN."""


class Witness(Protocol):
    """A fingerprint or copy of the content of some tensors."""

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        ...

    @property
    def bits(self) -> tuple[int, ...] | None:
        """Bits that tell the content from any other, of each tensor, if they are known."""
        ...

    def confirms(self, tensors: Sequence[Tensor]) -> bool:
        """True if these tensors, of the same shapes and dtypes, hold the same.

        Raises:
            StaleGraphError: they did not at an earlier call, as has been found out since.
        """
        ...


class Checksum:
    """64 bits of each tensor on the CPU, computed at the speed at which it can be read."""

    nbytes = 0

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._expected = _checksums(tensors)

    @property
    def bits(self) -> tuple[int, ...]:
        """The bits, of one tensor after the other."""
        return tuple(self._expected)

    def confirms(self, tensors: Sequence[Tensor]) -> bool:
        """True if the checksums are the same; that they are by chance takes 2^32 edits or more."""
        return _checksums(tensors) == self._expected


class Held:
    """The indices that a graph holds, in its own dtypes, in place of a checksum at first.

    A graph that is used once needs none. At the second use the checksum is made, for all others.

    Args:
        held: int32 or int64, on the CPU, one for each tensor. Nobody edits them.
    """

    nbytes = 0

    def __init__(self, held: Sequence[Tensor]) -> None:
        self._held = held
        self._checksum: Checksum | None = None

    @property
    def bits(self) -> tuple[int, ...] | None:
        """Those of the checksum, once it is made."""
        return None if self._checksum is None else self._checksum.bits

    def confirms(self, tensors: Sequence[Tensor]) -> bool:
        """True if the tensors hold the same numbers."""
        if self._checksum is not None:
            return self._checksum.confirms(tensors)
        # Before the comparison: what is edited after it must not be taken for what was compared.
        checksum = Checksum(tensors)
        if not all(map(native.library().same_indices, tensors, self._held)):
            return False
        self._checksum = checksum
        return True


class Copies:
    """The tensors themselves once more. Comparing them waits for their device."""

    bits = None

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copies = [tensor.detach().clone() for tensor in tensors]
        self.nbytes = sum(copy.nbytes for copy in self._copies)

    def confirms(self, tensors: Sequence[Tensor]) -> bool:
        """True if all are equal."""
        return all(map(torch.equal, tensors, self._copies))


class Guard:
    """Sums over each tensor on a GPU, compared there: the host does not wait, and says yes.

    Where that was wrong, the results of the operator that asked become NaN on the stream
    (:func:`spoil_stale_results`), and the next question on these tensors raises. A question costs a
    kernel for each tensor, and another one for each result.

    Args:
        tensors: on one GPU.
        library: the native library for it.
    """

    bits = None

    def __init__(self, tensors: Sequence[Tensor], library: Any) -> None:
        self._library = library
        like = tensors[0]
        counts = [_num_sums(tensor) for tensor in tensors]
        self._expected, self._found = (
            like.new_empty(sum(counts), dtype=torch.int64) for _ in range(2)
        )
        self._parts = self._found.split(counts)  # by tensor
        for tensor, part in zip(tensors, self._expected.split(counts), strict=True):
            library.sum_content(tensor.contiguous(), part)
        self._name = next(_NAMES)
        slots = _slots(like.is_cuda)
        self._seen = slots[self._name % len(slots)]
        self._operator = ""
        self.nbytes = 2 * self._expected.nbytes

    def confirms(self, tensors: Sequence[Tensor]) -> bool:
        """Always, for now."""
        if self._seen.item() == self._name:
            raise StaleGraphError(
                f"edges, or their weights, were changed where torch does not count it (by a fused "
                f"optimizer, through .data, by compiled code, ...) before a call of "
                f"{self._operator or 'an operator'}. Its results are NaN. The next call works on "
                "what the tensors hold now"
            )
        for tensor, part in zip(tensors, self._parts, strict=True):
            self._library.sum_content(tensor.contiguous(), part)
        _CALLS.guards.append(self)
        return True

    def spoil(self, operator: str, results: Sequence[Tensor]) -> None:
        """Make floating-point results NaN, on the stream, if the content had changed."""
        self._operator = operator
        values = [result for result in results if result.is_floating_point()]
        # What has no such results is to raise at the next question all the same.
        for result in values or [self._found.new_empty(0, dtype=torch.float32)]:
            self._library.spoil_if_changed(
                self._found, self._expected, self._seen, self._name, result
            )


_NAMES = itertools.count(1)
"""Numbers of guards, none of which is used twice."""

_MOST_SUMS = 1024
_ELEMENTS_OF_SUM = 512  # at least, so that few sums are compared for a small tensor


def _num_sums(tensor: Tensor) -> int:
    return min(max(1, -(-tensor.numel() // _ELEMENTS_OF_SUM)), _MOST_SUMS)


@functools.cache
def _slots(is_cuda: bool) -> tuple[Tensor, ...]:
    """Memory of the host where a GPU writes the numbers of guards whose tensors had changed.

    It is never freed, since a kernel may write there after its guard is gone: a number that no
    guard has any more, to which none listens.
    """
    return torch.zeros(1024, 1, dtype=torch.int64, pin_memory=is_cuda, device="cpu").unbind()


class _Calls(threading.local):
    """The guards that the operator which this thread computes has asked."""

    def __init__(self) -> None:
        self.guards: list[Guard] = []


_CALLS = _Calls()


def spoil_stale_results(operator: str, results: Any) -> None:
    """Have results of an operator become NaN where a guard finds that they are stale.

    Args:
        operator: its name.
        results: a tensor, or a sequence of tensors.
    """
    if _CALLS.guards:
        guards, _CALLS.guards = _CALLS.guards, []
        for guard in guards:
            guard.spoil(operator, [results] if isinstance(results, Tensor) else results)


def witness_of(
    tensors: Sequence[Tensor], *, may_raise: bool, held: Sequence[Tensor] | None = None
) -> Witness:
    """The cheapest witness for tensors on one device.

    Args:
        tensors: of any shapes.
        may_raise: whether their content is to stay, so that it is an error if it does not.
        held: as for :class:`Held`, where what is remembered of indices has them.
    """
    device = tensors[0].device
    if device.type == "cpu" and native.is_available():
        return Checksum(tensors) if held is None else Held(held)
    if device.type == "cuda" and may_raise and native.why_cuda_unavailable() is None:
        return Guard(tensors, native.cuda_library())
    return Copies(tensors)


def _checksums(tensors: Sequence[Tensor]) -> list[int]:
    # Rows of a matrix are read one by one, which takes ten times as long where they are short.
    checksum, found = native.library().checksum, []
    for tensor in tensors:  # one mostly, for which a comprehension would take longer
        found.append(checksum(tensor.view(-1) if tensor.is_contiguous() else tensor))
    return found
