"""Values of several dtypes in one message, of which a program computes in float32 or wider."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastgraph.edge_programs.calls import aten
from fastgraph.edge_programs.dtypes import HALVES, is_narrower
from fastgraph.edge_programs.recorded import Recorded, Ref, Refused


class Precision:
    """Conversions of recorded values, as steps and within the program.

    Args:
        step: makes a step of a function, its arguments and its keyword arguments.
        dtypes: of the tensors that the message takes.
        autocast: the dtype of the autocast on the CPU under which the message runs, if any.
        rounds: true if values of half types are rounded after each operation, as upstream's are.
    """

    def __init__(
        self,
        step: Callable[..., int],
        dtypes: Iterable[torch.dtype],
        autocast: torch.dtype | None,
        rounds: bool,
    ) -> None:
        self.converts = False
        """True once a value was converted."""
        self.is_autocast = autocast is not None
        self._step, self._autocast, self._rounds = step, autocast, rounds
        self._usual = frozenset(dtypes) | ({autocast} if autocast else frozenset())
        # Steps of float32, or wider, for those of half types, by their numbers.
        self._wide: dict[int, int] = {}

    def convert(self, v: Recorded, before: torch.dtype, dtype: torch.dtype) -> Recorded:
        """The same value in another dtype: a step of it is converted, and so are its parts.

        A program rounds only what it returns.

        Raises:
            Refused: it is rounded to a dtype that is none of the message's.
        """
        self.converts = True
        if dtype is before:
            return v
        is_rounded = v.value is not None or v.maps
        if is_narrower(dtype, before) and is_rounded and dtype not in self._usual:
            raise Refused(f"it rounds values of edges to {dtype}")
        step, table = (None if n is None else self._converted(n, dtype) for n in (v.step, v.table))
        is_cast = dtype is self._autocast and before is torch.float32
        if is_cast and step is not None and v.step is not None:
            self._wide[step] = v.step
        terms = tuple((c, self.convert(piece, before, dtype)) for c, piece in v.terms)
        parts = tuple(self.convert(part, before, dtype) for part in v.parts)
        return replace(v, step=step, table=table, terms=terms, parts=parts)

    def promoted(self, tensors: Sequence[Any], values: Sequence[Any]) -> Sequence[Any]:
        """Values that are summed or concatenated, in one dtype: a linear map takes no others.

        Args:
            tensors: that they are the knowledge of. Numbers stay.
            values: as many.
        """
        dtypes = {a.dtype for a in tensors if isinstance(a, Tensor)}
        if len(dtypes) < 2:
            return values
        dtype = functools.reduce(torch.promote_types, dtypes)
        return [self.convert(v, a.dtype, dtype) for v, a in zip(values, tensors, strict=True)]

    def rounds(self, dtype: torch.dtype) -> bool:
        """True if values of a dtype are rounded after each operation."""
        return self._rounds and dtype in HALVES

    def rounded(self, v: Recorded, dtype: torch.dtype) -> Recorded:
        """A value of a half type as upstream has it, if it matters which ones are equal."""
        if v.value is None or not self.rounds(dtype):
            return v
        return replace(v, value=v.value.builder.round(v.value))

    def widening(self, dtype: torch.dtype) -> Callable[[int], int]:
        """A function that gives steps of a dtype with more digits, if it is a half type."""
        return self._in_float32 if dtype in HALVES else lambda step: step

    def keep_wide(self, steps: Iterable[int], dtype: torch.dtype) -> None:
        """Remember steps that were made of such, and stand for some of a dtype."""
        if dtype in HALVES:
            self._wide |= {step: step for step in steps}

    def narrowed(self, v: Recorded, dtype: torch.dtype) -> Recorded:
        """A step that was made of such steps, in the dtype itself."""
        if dtype not in HALVES or v.step is None:
            return v
        return replace(v, step=self._converted(v.step, dtype))

    def _in_float32(self, step: int) -> int:
        """A step in float32: what autocast narrowed as it was before."""
        if step not in self._wide:
            self.converts = True
            wide = self._converted(step, torch.float32)
            self._wide |= {step: wide, wide: wide}
        return self._wide[step]

    def _converted(self, step: int, dtype: torch.dtype) -> int:
        named: tuple[tuple[str, Any], ...] = (("dtype", dtype),)
        return self._step(aten._to_copy.default, (Ref(step),), named)
