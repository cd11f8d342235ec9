"""The Auto Tuner: below which density pairs of clusters lose their edges, by the loss."""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fastgraph.layers.arguments import check_choices, check_integers, check_kinds

FACTORS = (0.0, 1.0, 1.5, 5.0, 7.0, 10.0, math.inf)
"""Of the density of the graph, for 8 clusters; the last one stands for a density of 1."""

CLUSTERS = 8
"""For which the factors were chosen: a pair of a cluster and itself has at most as many times the
density of the graph, on average, as there are clusters."""

START = 1

MEMORY = 0.9
"""The share of the last average in the next one."""


class AutoTuner:
    r"""A threshold of density that follows the loss, once for each epoch (TorchGT, section III-D).

    With :math:`F_t = 0.9 F_{t-1} + 0.1 L_t` of the losses, which begins with the first, and
    :math:`LDR_t = (F_{t-1} - F_t) / e_t`, by the seconds :math:`e_t` of the epoch, the threshold is
    raised to the next of :data:`FACTORS` if :math:`LDR_t \ge LDR_{t-\delta}`, and lowered to the
    one before otherwise. TorchGT prints :math:`(F_t - F_{t-1}) / e_t`, which rises where the loss
    falls more slowly, against its own text, by which edges should come back then:
    ``sign="printed"`` has that.

    With several ranks all call :meth:`step`, and go on with what rank 0 has decided: epochs take
    each of them another time. Checkpoints need :meth:`state_dict`, as they do of a
    :class:`Schedule`.

    Args:
        delta: epochs between the two rates, at least 1.
        sign: "text" or "printed".
        group: default: all ranks of ``torch.distributed``, where it is initialised.

    Attributes:
        index: of the factor now, 0 to 6; at first 1, the density of the graph.
        average: :math:`F_t`, ``None`` before the first epoch.
        seconds: of epochs.

    Raises:
        ValueError: an argument is none of these.
    """

    def __init__(
        self, *, delta: int = 10, sign: str = "text", group: dist.ProcessGroup | None = None
    ) -> None:
        check_integers(delta=delta)
        if group is not None:  # torch may be built without distribution
            check_kinds(dist.ProcessGroup, group=group)
        check_choices(sign=(sign, ("text", "printed")))
        self.delta, self.sign, self._group = delta, sign, group
        self.index = START
        self.average: float | None = None
        self.seconds: list[float] = []
        self._rates: list[float] = []  # of the last epochs, delta + 1 of them

    def __deepcopy__(self, memo: dict[int, Any]) -> AutoTuner:
        copy = AutoTuner(delta=self.delta, sign=self.sign, group=self._group)
        copy.load_state_dict(self.state_dict())  # a group is no value
        return copy

    @property
    def factor(self) -> float:
        """Of the density of the graph, for 8 clusters; infinite for a density of 1."""
        return FACTORS[self.index]

    def step(self, loss: float | Tensor, seconds: float) -> float:
        """Go on after an epoch.

        Args:
            loss: of the epoch, a number or a tensor of one.
            seconds: that it took, above 0, on any clock.

        Returns:
            The factor for the next epoch.

        Raises:
            ValueError: rank 0, or this process alone, has a loss that is not finite, or no time.
        """
        loss = loss.detach() if isinstance(loss, Tensor) else loss
        state = self._next(float(loss), float(seconds))
        if dist.is_available() and dist.is_initialized():
            # Errors, too: the others would wait for what a failed rank does not send.
            decided = [state]
            first = 0 if self._group is None else dist.get_global_rank(self._group, 0)
            dist.broadcast_object_list(decided, first, self._group)
            (state,) = decided
        if isinstance(state, str):
            raise ValueError(state)
        self.load_state_dict(state)
        return self.factor

    def _next(self, loss: float, seconds: float) -> dict[str, Any] | str:
        """The state after an epoch, or what is wrong with it."""
        if not math.isfinite(loss):
            return f"loss: expected a finite number, got {loss}"
        if not 0 < seconds < math.inf:
            return f"seconds: expected the time of an epoch, above 0, got {seconds}"
        index, average, rates = self.index, loss, list(self._rates)
        if self.average is not None:
            average = MEMORY * self.average + (1 - MEMORY) * loss
            fallen = self.average - average
            rates.append((fallen if self.sign == "text" else -fallen) / seconds)
            rates = rates[-self.delta - 1 :]
            if len(rates) > self.delta:
                index += 1 if rates[-1] >= rates[0] else -1
        index = min(max(index, 0), len(FACTORS) - 1)
        epochs = [*self.seconds, seconds]
        return {"index": index, "average": average, "rates": rates, "seconds": epochs}

    def state_dict(self) -> dict[str, Any]:
        """The state for checkpoints: threshold, average, rates and the times of epochs."""
        return {
            "index": self.index,
            "average": self.average,
            "rates": list(self._rates),
            "seconds": list(self.seconds),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the epoch that a checkpoint was made after.

        Raises:
            ValueError: that is no state.
        """
        if missing := {"index", "average", "rates", "seconds"} - set(state):
            raise ValueError(f"state: expected one of an AutoTuner, got none of {sorted(missing)}")
        index, average = state["index"], state["average"]
        if type(index) is not int or not 0 <= index < len(FACTORS):
            raise ValueError(f"index: expected 0 to {len(FACTORS) - 1}, got {index!r}")
        numbers = [*state["rates"], *state["seconds"], *([] if average is None else [average])]
        wrong = [number for number in numbers if not math.isfinite(number)]
        if wrong:
            raise ValueError(f"state: expected finite numbers, got {wrong[0]}")
        self.index, self.average = index, average
        self._rates, self.seconds = list(state["rates"]), list(state["seconds"])

    def __repr__(self) -> str:
        return f"AutoTuner(delta={self.delta}, sign={self.sign!r})"


def densities(graph: float, clusters: int) -> tuple[float, ...]:
    """The thresholds of a graph, in ascending order.

    Args:
        graph: its density, edges by pairs of nodes, 0 to 1.
        clusters: how many it has. The factors are those of 8, for others in proportion.
    """
    scale = graph * clusters / CLUSTERS
    return (*(min(factor * scale, 1.0) for factor in FACTORS[:-1]), 1.0)
