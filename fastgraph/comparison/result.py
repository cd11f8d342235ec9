"""The result of comparing one call with upstream."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from fastgraph.comparison.cost import Cost
from fastgraph.comparison.errors import ROUNDINGS, TensorError
from fastgraph.comparison.means import MeanDifference
from fastgraph.comparison.upstream_path import UpstreamPath
from fastgraph.rendering import rendered
from fastgraph.routing.status import StatusRow


@dataclass(frozen=True, repr=False)
class Comparison:
    """One call of a module through upstream and through fastgraph.

    Attributes:
        module: class of the module.
        factor: our error may be this many times upstream's own.
        tensors: errors of outputs, then gradients of inputs, then gradients of parameters.
        means: differences of means over several seeds; empty unless attention dropout is active.
        upstream: cost of upstream's forward and backward pass.
        ours: cost of our forward and backward pass.
        memory_measure: what ``peak_bytes`` is.
        upstream_paths: what upstream did in each layer.
        routing: by layer class, calls that were routed, that fell back, and why.
        inconclusive: why float64 cannot serve as the truth, if it cannot.
        notes: what else must be known to read this.
    """

    module: str
    factor: float
    tensors: tuple[TensorError, ...]
    means: tuple[MeanDifference, ...]
    upstream: Cost
    ours: Cost
    memory_measure: str
    upstream_paths: tuple[UpstreamPath, ...]
    routing: tuple[StatusRow, ...]
    inconclusive: str | None
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True if every error and every difference of means is within its limit."""
        agree = all(error.ok for error in self.tensors) and all(mean.ok for mean in self.means)
        return agree and self.inconclusive is None

    @property
    def worst(self) -> TensorError:
        """The tensor whose error is largest compared with its limit."""
        return max(self.tensors, key=lambda tensor: tensor.share)

    @property
    def speed_up(self) -> float:
        """Upstream's median time divided by ours."""
        return self.upstream.seconds / self.ours.seconds

    def __str__(self) -> str:
        return rendered(*self._parts())

    __repr__ = __str__

    def _parts(self) -> list[Table | Text]:
        verdict = "agrees with upstream" if self.ok else "DIFFERS FROM UPSTREAM"
        if self.inconclusive is not None:
            verdict = f"INCONCLUSIVE: {self.inconclusive}"
        parts: list[Table | Text] = [
            Text(f"{self.module}: {verdict}"),
            self._error_table(),
        ]
        if self.means:
            parts.append(self._mean_table())
        parts.append(self._cost_table())
        if self.upstream_paths:
            parts.append(self._path_table())
        if self.routing:
            parts.append(self._routing_table())
        parts += [Text(f"Note: {note}.") for note in self.notes]
        return parts

    def _error_table(self) -> Table:
        table = _table(
            "Error against float64, relative to the largest magnitude",
            "tensor",
            "of",
            "shape",
            ">upstream",
            ">ours",
            ">ratio",
            "",
        )
        for error in self.tensors:
            table.add_row(
                error.name,
                error.kind,
                " x ".join(map(str, error.shape)),
                f"{error.upstream:.2e}",
                f"{error.ours:.2e}",
                f"{error.ratio:.2f}",
                "ok" if error.ok else f"worst at {list(error.worst)}",
            )
        table.caption = (
            f"ok: at most {self.factor:g} times upstream's own error and {ROUNDINGS} roundings"
        )
        return table

    def _mean_table(self) -> Table:
        table = _table(
            "Means over seeds: ours against upstream's, relative to its norm",
            "tensor",
            ">difference",
            ">expected by chance",
            "",
        )
        for mean in self.means:
            table.add_row(
                mean.name,
                f"{mean.difference:.2e}",
                f"{mean.by_chance:.2e}",
                "ok" if mean.ok else f"above {mean.limit:.2e}",
            )
        return table

    def _cost_table(self) -> Table:
        table = _table("Forward and backward", "", ">median time", ">peak memory", ">timed")
        for name, cost in (("upstream", self.upstream), ("ours", self.ours)):
            peak = "not known" if cost.peak_bytes is None else f"{cost.peak_bytes / 2**20:.1f} MiB"
            table.add_row(name, f"{cost.seconds * 1e3:.3f} ms", peak, str(cost.samples))
        table.caption = f"{self.speed_up:.2f} times as fast. Memory: {self.memory_measure}."
        return table

    def _path_table(self) -> Table:
        table = _table("What upstream ran", "layer", "class", "graph", "by")
        for path in self.upstream_paths:
            how = "message_and_aggregate" if path.fused else "a message for each edge"
            table.add_row(path.layer or "(the module)", path.kind, path.graph, how)
        return table

    def _routing_table(self) -> Table:
        table = _table("What fastgraph routed", "class", ">routed", ">fell back", "because")
        for row in self.routing:
            reasons = "; ".join(row.reasons)
            table.add_row(row.layer, str(row.routed), str(row.fell_back), reasons)
        return table


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left")
    for heading in headings:
        table.add_column(
            heading.removeprefix(">"), justify="right" if heading.startswith(">") else "left"
        )
    return table
