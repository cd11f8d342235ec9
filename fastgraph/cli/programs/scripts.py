"""Running a program plain and under fastgraph, each in fresh processes, and comparing the runs."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fastgraph.cli import runner
from fastgraph.cli.programs.child import Order
from fastgraph.routing.status import Status, StatusRow
from fastgraph.settings import Settings

Side = Literal["plain", "fastgraph"]

COMMANDS: dict[Side, str] = {"plain": "python", "fastgraph": "python -m fastgraph"}
"""The ways in which each side runs a program, in the order in which they are shown."""

# Steps while caches fill, memory is first touched and graphs are sorted.
WARM_UP = 2

_POLL_SECONDS = 0.1

# Decided here for each side; comparing every call would be timed as well.
_SWITCHES = ("FASTGRAPH", "FASTGRAPH_COMPARE")


class RunError(RuntimeError):
    """A run ended with another exit code than 0; ``run`` has its output."""

    def __init__(self, run: Run) -> None:
        super().__init__(f"the {run.side} run ended with exit code {run.exit_code}")
        self.run = run


@dataclass(frozen=True)
class Step:
    """One optimizer step; one call of ``backward`` in programs whose steps cannot be seen.

    Attributes:
        time: when it ended, in seconds on the child's clock.
        loss: mean of the losses whose ``backward`` led to it; ``None`` if it had none.
        peak: most bytes in memory since the step before; since the start, where the operating
            system cannot tell.
    """

    time: float
    loss: float | None
    peak: int


@dataclass(frozen=True)
class Run:
    """One run of the program.

    Attributes:
        side: plain python, or under fastgraph.
        shift: which of the seeds, from 0.
        exit_code: as the operating system gives it; negative for a signal.
        seconds: from start to end, imports included.
        peak_bytes: most memory that was resident at a time, or allocated on GPUs if it used any.
        on_gpu: whether it used any.
        output: what it printed, to either stream.
        steps: its optimizer steps.
        layers: fastgraph's status at its end; empty if it was killed.
        dropping: classes of attention layers with a route whose dropout was active.
        compiled: whether torch compiled anything, calls of which that status does not count.
    """

    side: Side
    shift: int
    exit_code: int
    seconds: float
    peak_bytes: int
    on_gpu: bool
    output: str
    steps: tuple[Step, ...]
    layers: tuple[StatusRow, ...]
    dropping: tuple[str, ...]
    compiled: bool

    @property
    def step_seconds(self) -> list[float]:
        """Time from each step to the next, without the first ones."""
        times = [step.time for step in self.steps]
        return [b - a for a, b in itertools.pairwise(times)][_warm_up(len(times) - 1) :]

    @property
    def losses(self) -> list[float]:
        """The loss of each step that has one."""
        return [step.loss for step in self.steps if step.loss is not None]

    def last_lines(self, count: int) -> list[str]:
        """The end of its output, blank lines left out."""
        return [line for line in self.output.splitlines() if line.strip()][-count:]


def _warm_up(intervals: int) -> int:
    return min(WARM_UP, max(0, intervals - 1))


@dataclass(frozen=True)
class LossDifference:
    """The largest difference of two runs' losses at the same step.

    Attributes:
        absolute: the difference.
        relative: the difference divided by the larger of both losses.
        step: where, from 1.
        steps: how many steps were compared.
    """

    absolute: float
    relative: float
    step: int
    steps: int


@dataclass(frozen=True)
class Spread:
    """Final losses of one side over the seeds."""

    mean: float
    deviation: float
    seeds: int


@dataclass(frozen=True)
class ScriptComparison:
    """A program plain and under fastgraph.

    Attributes:
        title: the program and its arguments.
        runs: in the order in which they ran.
        huge_pages: whether fastgraph's runner asked torch for huge pages and plain python did not.
    """

    title: str
    runs: tuple[Run, ...]
    huge_pages: bool

    def of(self, side: Side) -> list[Run]:
        """The runs of one side with the first seed."""
        return [run for run in self.runs if run.side == side and run.shift == 0]

    def step_seconds(self, side: Side) -> float | None:
        """Median time of a step; ``None`` where fewer than two steps were seen."""
        seconds = [s for run in self.of(side) for s in run.step_seconds]
        return statistics.median(seconds) if seconds else None

    def peak_bytes(self, side: Side) -> int:
        """Median over the repeats of the peak memory."""
        return int(statistics.median(run.peak_bytes for run in self.of(side)))

    @property
    def dropping(self) -> tuple[str, ...]:
        """Routed attention layers whose dropout was active, so that steps cannot be compared.

        Of compiled layers nobody knows whether they were routed; most are.
        """
        runs = self.of("fastgraph")
        names = {name for run in runs for name in run.dropping}
        routed = {row.layer for row in self.status if row.routed}
        if any(run.compiled for run in runs):
            routed |= names - {row.layer for row in self.status}
        return tuple(sorted(names & routed))

    @property
    def status(self) -> tuple[StatusRow, ...]:
        """Fastgraph's status at the end of its first run."""
        return self.of("fastgraph")[0].layers

    @property
    def loss_difference(self) -> LossDifference | None:
        """Between the first run of each side; ``None`` where no losses were seen."""
        return difference(self.of("plain")[0], self.of("fastgraph")[0])

    @property
    def plain_difference(self) -> LossDifference | None:
        """Between the first two plain runs: what the program does not reproduce itself."""
        plain = self.of("plain")
        return difference(plain[0], plain[1]) if len(plain) > 1 else None

    def final_losses(self, side: Side) -> Spread | None:
        """Final losses over the seeds; ``None`` unless several ran and had losses."""
        by_seed = {r.shift: r.losses[-1] for r in self.runs if r.side == side and r.losses}
        if len(by_seed) < 2:
            return None
        values = list(by_seed.values())
        return Spread(statistics.fmean(values), statistics.stdev(values), len(values))


def difference(first: Run, second: Run) -> LossDifference | None:
    """The largest difference of losses, step by step."""
    pairs = list(zip(first.losses, second.losses, strict=False))
    if not pairs:
        return None
    gaps = [abs(a - b) if a == a and b == b else float("inf") for a, b in pairs]
    step = max(range(len(gaps)), key=gaps.__getitem__)
    size = max(abs(pairs[step][0]), abs(pairs[step][1]))
    relative = gaps[step] / size if size else gaps[step]
    return LossDifference(gaps[step], relative, step + 1, len(pairs))


@dataclass(frozen=True)
class Plan:
    """How to compare a program.

    Attributes:
        target: the program.
        options: how fastgraph is enabled.
        repeats: runs of each side, in alternating order.
        seeds: seeds on each side where attention dropout is active.
        seed: for torch, numpy and random, before the program starts.
        name: what to call the program; by default it is its command line.
    """

    target: runner.Target
    options: runner.Options = field(default_factory=runner.Options)
    repeats: int = 1
    seeds: int = 5
    seed: int = 0
    name: str = ""

    @property
    def title(self) -> str:
        """The name of the program, or the program and its arguments."""
        if self.name:
            return self.name
        first = {"module": ["-m", self.target.value], "code": ["-c", self.target.value]}
        words = first.get(self.target.kind, [self.target.value])
        return shlex.join([*words, *self.target.arguments])


def compare_script(
    plan: Plan, progress: Callable[[str], None] = lambda text: None
) -> ScriptComparison:
    """Run a program both ways as often as planned.

    Args:
        plan: what to run.
        progress: told in words what is running.

    Raises:
        RunError: a run ended with another exit code than 0.
        ValueError: ``FASTGRAPH=0`` is set, a variable is invalid, or a number of runs is below 1.
    """
    if Settings.from_environment().enabled is False:
        raise ValueError("FASTGRAPH=0 switches fastgraph off: there is nothing to compare")
    for name in ("repeats", "seeds"):
        if getattr(plan, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(plan, name)}")
    runs: list[Run] = []
    sides = list(COMMANDS)

    def run_both(shift: int, *, reverse: bool) -> None:
        for side in reversed(sides) if reverse else sides:
            run = run_once(plan, side, shift, progress)
            if run.exit_code != 0:
                raise RunError(run)
            runs.append(run)

    def result() -> ScriptComparison:
        return ScriptComparison(
            plan.title, tuple(runs), huge_pages=runner.HUGE_PAGES not in os.environ
        )

    for repeat in range(plan.repeats):
        run_both(0, reverse=repeat % 2 == 1)
    if result().dropping:
        for shift in range(1, plan.seeds):
            run_both(shift, reverse=shift % 2 == 1)
    return result()


def run_once(plan: Plan, side: Side, shift: int, progress: Callable[[str], None]) -> Run:
    """Run the program in a fresh process.

    Args:
        plan: what to run.
        side: plain, or under fastgraph.
        shift: which of the seeds.
        progress: told in words how far it is.
    """
    name = COMMANDS[side]
    if shift:
        name += f", seed {plan.seed + shift}"
    with tempfile.TemporaryDirectory(prefix="fastgraph-") as folder:
        events, output = Path(folder, "events.jsonl"), Path(folder, "output.txt")
        events.touch()
        order = Order(str(events), plan.seed + shift, shift, plan.target, plan.options)
        command = [sys.executable, "-m", "fastgraph.cli.programs.child", order.to_json()]
        start = time.perf_counter()
        with output.open("wb") as stream, _child(command, side, stream) as process:
            while True:
                pid, status, usage = os.wait4(process.pid, os.WNOHANG)
                if pid:
                    break
                progress(f"{name} {plan.title}: {_steps_so_far(events)} steps")
                time.sleep(_POLL_SECONDS)
            process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - start
        found = [json.loads(line) for line in events.read_text().splitlines()]
        text = output.read_text(errors="replace")
    ends: list[dict[str, Any]] = [event for event in found if event["kind"] == "end"]
    end: dict[str, Any] = (
        ends[0]
        if ends
        else {"peak": 0, "on_gpu": False, "layers": [], "dropping": [], "compiled": False}
    )
    unit = 1 if sys.platform == "darwin" else 1024
    return Run(
        side=side,
        shift=shift,
        exit_code=process.returncode,
        seconds=seconds,
        peak_bytes=end["peak"] or usage.ru_maxrss * unit,
        on_gpu=end["on_gpu"],
        output=text,
        steps=tuple(
            Step(event["time"], event["loss"], event["peak"])
            for event in found
            if event["kind"] == "step"
        ),
        layers=tuple(
            StatusRow(**{**row, "reasons": Counter(row["reasons"])}) for row in end["layers"]
        ),
        dropping=tuple(end["dropping"]),
        compiled=end["compiled"],
    )


@contextmanager
def _child(command: list[str], side: Side, stream: Any) -> Iterator[subprocess.Popen[bytes]]:
    environment = {k: v for k, v in os.environ.items() if k not in _SWITCHES}
    if side == "plain":
        environment["FASTGRAPH"] = "0"
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=stream,
        stderr=subprocess.STDOUT,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            process.wait()


def _steps_so_far(events: Path) -> int:
    return events.read_bytes().count(b'"kind": "step"')


def status_of(rows: tuple[StatusRow, ...]) -> Status:
    """A status that prints as ``fastgraph.status()`` did at the end of a run."""
    status = Status()
    for row in rows:
        found = status.named(row.layer)
        found.routed, found.fell_back = row.routed, row.fell_back
        found.reasons.update(row.reasons)
    return status
