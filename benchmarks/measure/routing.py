"""Switching fastgraph on for a column, and proof that a column measures what it says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn


class ColumnError(RuntimeError):
    """A column did not measure what its heading says."""


def ours_enabled() -> AbstractContextManager[None]:
    """fastgraph enabled for graphs of any size."""
    import fastgraph

    return fastgraph.enabled(min_edges=0)


def _calls(module: nn.Module) -> tuple[int, int]:
    import fastgraph

    names = {cls.__name__ for cls in type(module).__mro__}
    rows = [row for row in fastgraph.status().rows if row.layer.rpartition(".")[2] in names]
    return sum(row.routed for row in rows), sum(row.fell_back for row in rows)


@contextmanager
def expect_routed(module: nn.Module) -> Iterator[None]:
    """Fail unless the module was routed in the block, and never fell back.

    Raises:
        ColumnError: upstream's own code ran.
    """
    routed, fell_back = _calls(module)
    yield
    routed_after, fell_back_after = _calls(module)
    if routed_after == routed or fell_back_after != fell_back:
        import fastgraph

        raise ColumnError(
            f"{type(module).__name__} should have been routed, but {routed_after - routed} calls "
            f"were and {fell_back_after - fell_back} fell back\n{fastgraph.status()}"
        )


@contextmanager
def expect_upstream(module: nn.Module) -> Iterator[None]:
    """Fail if fastgraph saw a call of the module in the block, or is enabled.

    Raises:
        ColumnError: fastgraph was involved.
    """
    import fastgraph

    before = _calls(module)
    yield
    if fastgraph.is_enabled() or _calls(module) != before:
        raise ColumnError(f"{type(module).__name__} should have run upstream's code alone")
