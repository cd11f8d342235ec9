"""A codebook that follows the rows of mini-batches: k-means by moving averages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastgraph.graphs.splitmix64 import GOLDEN, mixed
from fastgraph.nn.batch_norm import BatchNorm
from fastgraph.nn.ranks import Ranks

SMOOTHING = 1e-5
"""Laplace's, of the sizes of clusters."""


class Codebook(nn.Module):
    r"""Centroids of the rows of all nodes, and which of them each node is assigned to.

    Algorithm 3, line 8 of "Graph Transformers for Large Graphs" (arXiv 2312.11109), after "GOAT"
    (Kong et al., ICML 2023). A row is normalised by a batch normalisation without affine and
    assigned to the nearest centroid; sizes and sums of clusters are exponential moving averages,
    and a centroid is the sum by the size, which is smoothed.

    With ``variant="paper"`` centroids without nodes are dead, as all are at first: in each step
    they become rows of the batch, of which a hash of nodes and step chooses. Only nodes that
    were assigned are counted. With ``"release"`` centroids and assignments begin at random and
    none is revived, as in the authors' code.

    The state is the same on all ranks, but for assignments: each rank holds those of
    ``ceil(num_nodes / ranks)`` nodes. They are in the ``state_dict`` as an extra state, where
    ``DistributedDataParallel``, which sends buffers of rank 0 to the others, leaves them alone.
    A model in half precision has a codebook in float32.

    Attributes:
        rows: the centroids as the features are, ``[num_centroids, channels]``.
        centroids: the same, normalised.
        counts: how many nodes are assigned to each, int64 ``[num_centroids]``.

    Args:
        num_nodes: of the graph.
        num_centroids: at least 1.
        channels: of a row.
        variant: "paper" or "release".
        decay: of the moving averages.
        ranks: that train together.
    """

    rows: Tensor
    centroids: Tensor
    ema_sizes: Tensor
    ema_sums: Tensor
    counts: Tensor
    steps: Tensor

    def __init__(
        self,
        num_nodes: int,
        num_centroids: int,
        channels: int,
        *,
        variant: str = "paper",
        decay: float = 0.99,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        self.num_nodes, self.num_centroids = num_nodes, num_centroids
        self.revives, self.decay, self.ranks = variant == "paper", decay, ranks or Ranks()
        share = -(-num_nodes // self.ranks.size)
        self.first = min(self.ranks.rank * share, num_nodes)
        dtype = torch.int16 if num_centroids <= torch.iinfo(torch.int16).max else torch.int32
        start = torch.zeros if self.revives else torch.randn
        for name in ("rows", "centroids", "ema_sums"):
            self.register_buffer(name, start(num_centroids, channels))
        self.register_buffer("ema_sizes", torch.zeros(num_centroids))
        self.register_buffer("counts", torch.zeros(num_centroids, dtype=torch.int64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        if self.revives:
            self._assigned = torch.full((min(share, num_nodes - self.first),), -1, dtype=dtype)
        else:
            everything = torch.randint(num_centroids, (num_nodes,), dtype=dtype)
            self.counts = self.counted(everything)
            self._assigned = everything[self.first : self.first + share].clone()
        self.norm = BatchNorm(channels, affine=False, ranks=self.ranks)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Codebook:
        """Move and convert, as modules are; averages in half precision would not move any more."""

        def at_least_single(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            is_half = moved.is_floating_point() and moved.dtype.itemsize < 4
            return tensor.to(moved.device) if is_half else moved

        super()._apply(at_least_single, recurse)  # type: ignore[no-untyped-call]
        return self

    def counted(self, assigned: Tensor) -> Tensor:
        """How many nodes each centroid has, ``[num_centroids]``; -1 is none."""
        counts = torch.zeros(self.num_centroids + 1, dtype=torch.int64, device=assigned.device)
        for part in assigned.split(1 << 24):  # of which copies are made, while nodes may be 1e8
            counts += torch.bincount(part.int() + 1, minlength=len(counts))
        return counts[1:]

    def bias(self) -> Tensor:
        r"""The bias of scores of centroids, ``[num_centroids]``: :math:`\log(1_n P)`.

        -infinity for centroids without nodes; zeros while none has any, before the first step.
        """
        logarithms = self.counts.double().log().to(self.rows.dtype)
        return torch.where(self.counts.sum() > 0, logarithms, 0.0)

    def check(self, n_id: Tensor) -> None:
        """Raise an IndexError if ``n_id`` has no node of the graph."""
        if n_id.numel() and not 0 <= int(n_id.min()) <= int(n_id.max()) < self.num_nodes:
            bad = int(n_id[(n_id < 0) | (n_id >= self.num_nodes)][0])
            raise IndexError(f"n_id: expected nodes of 0 to {self.num_nodes - 1}, got {bad}")

    @torch.no_grad()
    def update(self, x: Tensor, n_id: Tensor) -> None:
        """Take one step with the rows of a batch; those of all ranks count as one batch.

        Buffers are replaced and not written to, since backward passes may still need them.

        Args:
            x: ``[M, channels]``; ``M`` may be zero.
            n_id: whose rows they are, int64 ``[M]``. Of a node that comes several times the last
                row decides its assignment.

        Raises:
            IndexError: ``n_id`` has no node of the graph.
        """
        self.check(n_id)
        with torch.autocast(x.device.type, enabled=False):
            x = self.norm(x.to(self.centroids.dtype))
            sizes = self.ranks.sizes(x)
            if sum(sizes) > 0:
                self._step(x, self.ranks.gather(n_id, sizes), sizes)

    def _step(self, x: Tensor, n_id: Tensor, sizes: list[int]) -> None:
        unused = self._revive(x, n_id, sum(sizes[: self.ranks.rank])) if self.revives else None
        distances = self.centroids.square().sum(1) - 2 * (x @ self.centroids.T)
        if unused is not None:
            distances.masked_fill_(unused, torch.inf)
        nearest = distances.argmin(1)
        self._average(x, nearest)
        self._assign(n_id, self.ranks.gather(nearest, sizes))
        self.steps = self.steps + 1

    def _revive(self, x: Tensor, n_id: Tensor, first: int) -> Tensor | None:
        """Put rows of the batch in the place of centroids without nodes, each row once.

        Which rows is a function of step and nodes, so that it does not depend on ranks. Returns
        the centroids for which there were no rows, as a mask, or None if all have nodes.
        """
        dead = self.counts == 0
        if not bool(dead.any()):
            return None
        place = dead.cumsum(0) - 1
        revived = dead & (place < len(n_id))
        drawn = mixed(n_id + (self.steps + 1) * GOLDEN).argsort(stable=True)
        chosen = drawn[place[revived]] - first
        mine = (chosen >= 0) & (chosen < len(x))
        new = x.new_zeros(len(chosen), x.shape[1])
        new[mine] = x[chosen[mine]]
        self.centroids = self.centroids.clone()
        self.centroids[revived] = self.ranks.sum(new)
        # What is known of the cluster begins with this batch.
        self.ema_sizes = self.ema_sizes.masked_fill(dead, 0)
        self.ema_sums = self.ema_sums.masked_fill(dead.unsqueeze(1), 0)
        return dead & ~revived

    def _average(self, x: Tensor, nearest: Tensor) -> None:
        # A product and no `index_add`, whose sums are in no fixed order on GPUs.
        members = F.one_hot(nearest, self.num_centroids).to(x.dtype).T
        found = torch.cat([members.sum(1, keepdim=True), members @ x], dim=1)
        found = (1 - self.decay) * self.ranks.sum(found)
        self.ema_sums = self.decay * self.ema_sums + found[:, 1:]
        sizes = self.decay * self.ema_sizes + found[:, 0]
        total = sizes.sum()
        smoothed = (sizes + SMOOTHING) / (total + self.num_centroids * SMOOTHING) * total
        self.ema_sizes = (
            sizes if self.revives else smoothed
        )  # the release averages what it smoothed
        self.centroids = self.ema_sums / smoothed.unsqueeze(1)
        norm = self.norm
        assert norm.running_mean is not None and norm.running_var is not None
        self.rows = self.centroids * (norm.running_var + norm.eps).sqrt() + norm.running_mean

    def _assign(self, n_id: Tensor, nearest: Tensor) -> None:
        """Note the assignments of nodes of this rank, and by how much counts of all change."""
        n_id, order = n_id.sort(stable=True)
        last = torch.searchsorted(n_id, n_id, right=True) - 1
        once = last == torch.arange(len(n_id), device=n_id.device)  # for each node
        new = nearest[order][last]
        assigned = self._assigned.to(new.device)
        place = n_id - self.first
        if self.ranks.size > 1:
            mine = (place >= 0) & (place < len(assigned))
            place, new, once = place[mine], new[mine], once[mine]
        old = assigned[place].long()
        change = torch.zeros_like(self.counts)
        change.index_add_(0, new, once.long())
        change.index_add_(0, old.clamp(min=0), -(once & (old >= 0)).long())
        self.counts = self.counts + self.ranks.sum(change)
        assigned[place] = new.to(assigned.dtype)
        self._assigned = assigned

    def get_extra_state(self) -> dict[str, Any]:
        """The assignments of the nodes of this rank, -1 where there is none."""
        assigned = self._assigned.clone()  # which steps write to; counts and centroids they replace
        return {"num_nodes": self.num_nodes, "first": self.first, "assigned": assigned}

    def gathered_extra_state(self) -> dict[str, Any]:
        """Those of all nodes, as one process would have them; all ranks must call it."""
        sizes = self.ranks.sizes(self._assigned)
        device = self.counts.device  # on which ranks can exchange
        everything = self.ranks.gather(self._assigned.to(device).int(), sizes)
        assigned = everything.to(self._assigned.dtype)
        return {"num_nodes": self.num_nodes, "first": 0, "assigned": assigned}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take the assignments of this rank from those of all nodes, or from its own.

        Raises:
            ValueError: they are of another graph, or of other nodes.
        """
        assigned, skipped = state["assigned"], self.first - state["first"]
        if state["num_nodes"] != self.num_nodes:
            raise ValueError(
                f"state_dict: expected assignments of {self.num_nodes} nodes, "
                f"got {state['num_nodes']}"
            )
        count = len(self._assigned)
        if skipped < 0 or skipped + count > len(assigned):
            raise ValueError(
                f"state_dict: expected assignments of nodes {self.first} to "
                f"{self.first + count - 1}, got {len(assigned)} from node {state['first']}; "
                "full_state_dict() makes one that any number of ranks can load"
            )
        self._assigned = assigned[skipped : skipped + count].to(self._assigned).clone()

    def extra_repr(self) -> str:
        """The sizes, as they are printed."""
        return f"{self.num_nodes}, {self.num_centroids}, {self.rows.shape[1]}"
