"""Runs a script as it is, and keeps what its first steps of training computed.

    python benchmarks/measure/dist_recorder.py FILE STEPS script.py [arguments]

It is itself a script that ``python -m fastgraph.dist`` can run; each rank writes ``FILE.<rank>``.
"""

from __future__ import annotations

import functools
import os
import pickle
import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch_geometric import seed_everything
from torch_geometric.data import Dataset, InMemoryDataset

sys.path.insert(0, str(Path(__file__).parents[1]))

from measure import choices, stand_ins


class Recorder:
    """The values that a script has computed so far.

    Attributes:
        steps: after how many backward passes the script is ended.
        losses: of each backward pass.
        gradients: of each step of an optimizer, of all its parameters one after the other.
        optimizers: in the order of their first steps.
        gathers: how many whole tensors were gathered by name: before the first step, in the first,
            in all others.
        choices: of nodes, by pooling.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.losses: list[float] = []
        self.gradients: list[Tensor] = []
        self.optimizers: list[Optimizer] = []
        self.gathers: list[Counter[str]] = []
        self.choices = choices.watch(whole)

    def install(self) -> None:
        """Watch backward passes and optimizers."""
        backward = Tensor.backward

        def watched(loss: Tensor, *args: Any, **options: Any) -> None:
            if len(self.losses) == self.steps:
                raise SystemExit(0)
            if len(self.losses) < 2:
                self.gathers.append(_gathers())
            self.losses.append(float(loss.detach()))
            backward(loss, *args, **options)

        Tensor.backward = watched  # type: ignore[assignment]
        register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if all(optimizer is not known for known in self.optimizers):
            self.optimizers.append(optimizer)
        found = [p.grad for p in _parameters(optimizer) if p.grad is not None]
        self.gradients.append(torch.cat([whole(grad).detach().reshape(-1) for grad in found]))

    def save(self, path: Path) -> None:
        """Write a file."""
        before, *rest = [*self.gathers, _gathers()]
        first = rest[0] - before if rest else Counter()
        record = {
            "losses": self.losses,
            "gradients": self.gradients,
            "parameters": [whole(p).detach() for o in self.optimizers for p in _parameters(o)],
            "gathers": [dict(before), dict(first), dict(rest[-1] - rest[0] if rest else {})],
            "sent": _sent(),
            "choices": self.choices,
        }
        # Not by torch.save, which one rank does for all.
        path.write_bytes(pickle.dumps(record))


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def whole(x: Tensor) -> Tensor:
    """A tensor with all rows."""
    if "fastgraph.dist" not in sys.modules:
        return x
    from fastgraph.dist import whole as gathered

    found: Tensor = gathered(x)
    return found


def _gathers() -> Counter[str]:
    if "fastgraph.dist" not in sys.modules:
        return Counter()
    from fastgraph.dist import COUNTS

    return Counter(COUNTS.gathers)


def _sent() -> dict[str, int]:
    if "fastgraph.dist" not in sys.modules:
        return {}
    from fastgraph.dist import COUNTS

    return dict(COUNTS.sent)


def _doubled(dataset: type[Dataset]) -> None:
    """Datasets give float64, before their transforms."""
    get = dataset.get

    def doubled(self: Any, index: int) -> Any:
        convert = lambda x: x.double() if x.dtype == torch.float32 else x  # noqa: E731
        return get(self, index).apply(convert)

    dataset.get = doubled


def _mark_what_is_empty() -> None:
    """Memory that ``torch.empty`` gives is NaN, and so the same on all processes until written."""
    empty = torch.empty

    @functools.wraps(empty)
    def marked(*args: Any, **options: Any) -> Tensor:
        out = empty(*args, **options)
        with torch.no_grad():
            return out.fill_(float("nan")) if out.is_floating_point() else out

    torch.empty = marked


def main() -> None:
    path, steps, script, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    _doubled(InMemoryDataset)
    _mark_what_is_empty()
    if choices.ROUNDING in os.environ:
        choices.round_otherwise()
    stand_ins.install()
    recorder = Recorder(int(steps))
    recorder.install()
    seed_everything(0)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    recorder.save(Path(f"{path}.{os.environ.get('RANK', '0')}"))


if __name__ == "__main__":
    main()
