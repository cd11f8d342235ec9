"""One run of a model: trained for a given processor time, with its curve."""

from __future__ import annotations

import copy
import time
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from measure.largegt_models import Sizes, Source, way_of

SAMPLE = 1500
"""Nodes of validation and of the test that a curve's points see."""


class Limits(NamedTuple):
    """When a run ends: at the first of these.

    Attributes:
        seconds: of training, in processor time.
        epochs: of training.
        patient: it ends when it has trained 2.5 times as long as the best model so far had, and
            for a quarter of ``seconds`` and three epochs. If not, it has no curve, but its end.
    """

    seconds: float | None = None
    epochs: float | None = None
    patient: bool = True

    def reached(self, seconds: float, epochs: float) -> bool:
        """True at the first of them."""
        return (self.seconds is not None and seconds >= self.seconds) or (
            self.epochs is not None and epochs >= self.epochs
        )


def score(logits: Tensor, y: Tensor) -> float:
    from metrics import accuracy_or_roc_auc

    return accuracy_or_roc_auc(logits.float(), y)


def sampled(ids: Tensor, seed: int) -> Tensor:
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
    return ids[order[:SAMPLE]].sort().values


def run(name: str, source: Source, sizes: Sizes, limits: Limits) -> dict[str, Any]:
    """Train one model.

    Times are those of training, loading included, without evaluation. The model that was best on
    validation is the result; the test is that of all its nodes.

    Args:
        name: one of ``MODELS``.
        source: the graph, and the seed of parameters, order, dropout, local nodes and positions.
        sizes: of model and batches.
        limits: of training.
    """
    torch.manual_seed(source.seed)
    graph = source.graph
    valid, test = ((graph.split == part).nonzero().flatten() for part in (1, 2))
    way = way_of(name, source, sizes)
    optimizer = torch.optim.Adam(way.model.parameters(), lr=sizes.lr)
    parts = [sampled(valid, 0), sampled(test, 0)]
    curve: list[tuple[float, float, float, float, float]] = []
    best, best_state, best_at = -1.0, way.model.state_dict(), 0.0
    steps, spent, next_point, loss_sum, loss_steps = 0, 0.0, 0.0, 0.0, 0
    least = (limits.seconds or 0.0) / 25
    stop, started = False, time.process_time()
    while not stop:
        way.model.train()
        for given, y in way.batches():
            optimizer.zero_grad()
            loss = F.cross_entropy(way.model(*given)[: len(y)], y)
            loss.backward()
            optimizer.step()
            steps, loss_sum, loss_steps = steps + 1, loss_sum + float(loss.detach()), loss_steps + 1
            now = spent + time.process_time() - started
            stop = limits.reached(now, steps / way.steps)
            if not stop and (now < next_point or not limits.patient):
                continue
            spent = now
            scores = [score(evaluated(way, ids), graph.y[ids]) for ids in parts]
            curve.append((steps / way.steps, spent / 60, *scores, loss_sum / loss_steps))
            loss_sum, loss_steps = 0.0, 0
            if scores[0] > best:
                best, best_at, best_state = scores[0], spent, copy.deepcopy(way.model.state_dict())
            next_point = max(spent + least, spent * 1.25)
            enough = max(2.5 * best_at, (limits.seconds or 0.0) / 4)
            if limits.patient and spent > enough and steps >= 3 * way.steps:
                stop = True
            way.model.train()
            started = time.process_time()
            if stop:
                break
    way.model.load_state_dict(best_state)
    found = score(evaluated(way, test), graph.y[test])
    return {
        "model": name,
        "seed": source.seed,
        "sizes": sizes._asdict(),
        "parameters": sum(p.numel() for p in way.model.parameters()),
        "epochs": steps / way.steps,
        "seconds": round(spent, 2),
        "best_at": round(best_at, 2),
        "valid": best,
        "test": found,
        "curve": {
            key: [round(v, 4) for v in values]
            for key, values in zip(
                ("epoch", "minutes", "valid", "test", "loss"),
                zip(*curve, strict=True),
                strict=True,
            )
        },
    }


@torch.no_grad()
def evaluated(way: Any, ids: Tensor) -> Tensor:
    way.model.eval()
    out: Tensor = way.predict(ids)
    return out
