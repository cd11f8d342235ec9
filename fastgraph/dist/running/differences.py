"""The differences between a model on several ranks and on one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastgraph.rendering import rendered

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


class DifferenceError(RuntimeError):
    """Training on several ranks gives something else than on one process."""


@dataclass(frozen=True)
class Difference:
    """One tensor, on several ranks beside one process, at the step where they differ most.

    Attributes:
        name: ``loss``, an output (``output``, ``output[0]``), or a parameter or buffer.
        kind: ``output``, ``loss``, ``gradient``, or ``state`` for what the steps leave.
        shape: on one process.
        step: counted from 0.
        difference: the largest absolute difference divided by ``scale``; infinite where one side
            has no such tensor, or one of another shape or dtype.
        scale: the norm of all gradients for a gradient, the largest magnitude of all parameters and
            buffers for these, else that of the tensor; 1 for what is not floating point.
        worst: the index of the element that differs most.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    step: int
    difference: float
    scale: float
    worst: tuple[int, ...]


@dataclass(frozen=True)
class Gather:
    """An operation for which sharded tensors were gathered as a whole.

    Attributes:
        operation: its name.
        line: ``file:line`` of the program, else of the library that called it; empty if not known.
        times: in all steps together.
    """

    operation: str
    line: str
    times: int


@dataclass(frozen=True, repr=False)
class Validation:
    """The result of :func:`fastgraph.dist.validate`; print it.

    Attributes:
        module: class of the model.
        world_size: the number of ranks.
        steps: how many were trained.
        tolerance: what a difference may be.
        tensors: losses, outputs, gradients, then what the steps leave.
        gathers: what was gathered, most often first: right, but slower than need be.
        disagreeing: what ought to be the same on all ranks and is not, with the rank.
        sent: bytes that all ranks together have sent, of all steps.
    """

    module: str
    world_size: int
    steps: int
    tolerance: float
    tensors: tuple[Difference, ...]
    gathers: tuple[Gather, ...]
    disagreeing: tuple[str, ...]
    sent: int

    @property
    def different(self) -> tuple[Difference, ...]:
        """The tensors that differ by more than the tolerance."""
        return tuple(x for x in self.tensors if not x.difference <= self.tolerance)

    @property
    def ok(self) -> bool:
        """True if everything is as on one process, and the same on all ranks."""
        return not self.different and not self.disagreeing

    @property
    def worst(self) -> Difference:
        """The tensor that differs most."""
        return max(self.tensors, key=lambda x: x.difference)

    def raise_if_different(self) -> Validation:
        """This, if it is ``ok``.

        Raises:
            DifferenceError: it is not; with the table.
        """
        if not self.ok:
            raise DifferenceError(str(self))
        return self

    def __str__(self) -> str:
        return rendered(*self._parts())

    __repr__ = __str__

    def _parts(self) -> list[Table | Text]:
        from rich.table import Table
        from rich.text import Text

        verdict = "as on one process" if self.ok else "DIFFERS FROM ONE PROCESS"
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        head = f"{self.module} on {self.world_size} ranks, {steps} in float64: {verdict}"
        table = Table("tensor", "of", "shape", title_justify="left", caption_justify="left")
        table.add_column("difference", justify="right")
        table.add_column("step", justify="right")
        table.add_column()
        different = set(self.different)
        for x in self.tensors:
            verdict = f"at {list(x.worst)}" if x in different else "ok"
            shape = " x ".join(map(str, x.shape))
            table.add_row(x.name, x.kind, shape, f"{x.difference:.1e}", str(x.step), verdict)
        table.caption = (
            f"At the step where it is largest; ok: at most {self.tolerance:g} of the norm of all "
            "gradients for gradients, else of the largest magnitude"
        )
        parts: list[Table | Text] = [Text(head), table]
        parts += [Text(f"Not the same on all ranks: {text}") for text in self.disagreeing]
        if self.gathers:
            gathers = Table("operation", "line", title="Gathered as a whole", title_justify="left")
            gathers.add_column("times", justify="right")
            for gather in self.gathers:
                gathers.add_row(gather.operation, gather.line or "not known", str(gather.times))
            parts.append(gathers)
        else:
            parts.append(Text("Nothing was gathered as a whole."))
        parts.append(Text(f"All ranks together sent {self.sent:,} bytes."))
        return parts
