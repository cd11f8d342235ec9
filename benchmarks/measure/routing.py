"""Switching fastgraph on for a column, and proof that a column measures what it says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from fastgraph.plugins.backend import Backend, Kernel
from fastgraph.plugins.hookspecs import hookimpl, plugin_manager
from fastgraph.tune import row_order


class ColumnError(RuntimeError):
    """A column did not measure what its heading says."""


def ours_enabled() -> AbstractContextManager[None]:
    """fastgraph enabled for graphs of any size."""
    import fastgraph

    return fastgraph.enabled(min_edges=0)


def calls_routed() -> int:
    """How many calls have been routed so far, of all layers."""
    import fastgraph

    return sum(row.routed for row in fastgraph.status().rows)


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


class Counted:
    """The best backend for a device, with its calls counted: proof of what has run, and when.

    As kernels are looked up when they run, that of a backward pass too, it has to stay selected for
    as long as anything is measured. That also spares Dynamo, which forgets what it has compiled
    whenever fastgraph is switched.
    """

    name = "counted"
    priority = -1000  # on request only

    def __init__(self, backend: Backend) -> None:
        self.calls: Counter[str] = Counter()
        self._backend = backend

    def unavailable(self) -> str | None:
        return self._backend.unavailable()

    def kernel(self, operator: str, device_type: str, dtype: torch.dtype) -> Kernel | None:
        kernel = self._backend.kernel(operator, device_type, dtype)
        if kernel is None:
            return None

        def counted(*arguments: Any, **options: Any) -> Any:
            self.calls[operator] += 1
            return kernel(*arguments, **options)

        return counted

    @hookimpl
    def fastgraph_backends(self) -> list[Backend]:
        return [self]

    @contextmanager
    def enabled(self, cache_bytes: int) -> Iterator[None]:
        """fastgraph enabled with this backend, in the whole process."""
        import fastgraph

        plugin_manager().register(self)
        with fastgraph.enabled(backend=self.name, min_edges=0, cache_bytes=cache_bytes):
            yield

    @contextmanager
    def running(self) -> Iterator[None]:
        """Fail unless our kernels run in the block.

        Raises:
            ColumnError: something else computed.
        """
        before = self.calls.total()
        yield
        if self.calls.total() == before:
            raise ColumnError("our kernels should have run, but none was called")

    @contextmanager
    def standing_by(self) -> Iterator[None]:
        """Upstream's own code is in place in the block; fail if our kernels run nevertheless.

        Raises:
            ColumnError: they did.
        """
        from fastgraph.routing.switch import SWITCH

        before = self.calls.copy()
        with SWITCH.upstream():
            yield
        if self.calls != before:
            raise ColumnError(f"our kernels should not have run: {self.calls - before}")


@contextmanager
def ordering_after(uses: int) -> Iterator[None]:
    """Put the rows of a graph in order, where that helps, when it was used so many times."""
    before, row_order.USES_BEFORE_ORDERING = row_order.USES_BEFORE_ORDERING, uses
    try:
        yield
    finally:
        row_order.USES_BEFORE_ORDERING = before
