"""Tensors in files of safetensors, by ``torch.distributed.checkpoint``.

Each tensor is written once. Sharded ones are written by all ranks, in the order of their global
rows: before, consecutive rows come together, as ``DTensor`` has them. So files do not depend on
the partition, and any number of ranks reads its share of them.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fastgraph.dist.files.nesting import Spec
from fastgraph.dist.ranks.own_device import HOST
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.exchange import take
from fastgraph.dist.tensor.layout import Layout
from fastgraph.dist.tensor.memo import Recent, on_host
from fastgraph.dist.tensor.sharded import ShardedTensor
from fastgraph.manifest import FileFormatError


def write(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write tensors on any device into a folder, flushed to permanent storage.

    Raises:
        OSError: on all ranks, where one of them could not write.
    """
    stored = {name: _as_stored(x) for name, x in tensors.items()}
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        with _without_warning():
            save(stored, storage_writer=writer, no_dist=WORLD.size == 1)
    except CheckpointException as error:
        raise OSError(_reason(error)) from error


def read(
    specs: Iterable[Spec], layouts: Mapping[str, tuple[Layout, int]], folder: Path
) -> dict[str, Tensor]:
    """Read tensors from a folder, into memory of the host.

    Args:
        specs: of the tensors.
        layouts: how to shard some of them, and along which dimension, by name.
        folder: that was given to :func:`write`, by any number of ranks.

    Raises:
        FileFormatError: on all ranks, where files have other tensors.
    """
    stored: dict[str, Tensor] = {}
    for spec in specs:
        shape = list(spec.shape)
        if spec.name in layouts:
            _, axis = layouts[spec.name]
            shape[axis] = _even(shape[axis]).mine
            stored[spec.name] = _part(
                torch.empty(shape, dtype=spec.dtype, device=HOST), spec.shape, axis
            )
        else:
            stored[spec.name] = torch.empty(shape, dtype=spec.dtype, device=HOST)
    reader = HuggingFaceStorageReader(str(folder))
    try:
        with _without_warning():
            load(stored, storage_reader=reader, no_dist=WORLD.size == 1)
    except CheckpointException as error:
        raise FileFormatError(
            f"{folder}: expected the tensors that its manifest names, got {_reason(error)}"
        ) from error
    for name, (rows, axis) in layouts.items():
        part = stored[name]
        local = part.to_local() if isinstance(part, DTensor) else part
        stored[name] = ShardedTensor(take(local, axis, rows.position, _even(rows.n)), rows, axis)
    return stored


@contextlib.contextmanager
def _without_warning() -> Iterator[None]:
    """Let torch not say that a single process has no process group, which is meant so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _as_stored(x: Tensor) -> Tensor:
    if not isinstance(x, ShardedTensor):
        return on_host(x).contiguous()
    local = on_host(take(x.local, x.axis, _even(x.rows.n).position, x.rows))
    return _part(local.contiguous(), x.shape, x.axis)


_evens = Recent()


def _even(n: int) -> Layout:
    """Consecutive rows on each rank, as ``DTensor`` cuts them; one layout for all tensors."""

    def make() -> Layout:
        rows = -(-n // WORLD.size)
        cuts = [min(rank * rows, n) for rank in range(WORLD.size + 1)]
        counts = [stop - start for start, stop in pairwise(cuts)]
        return Layout(torch.arange(cuts[WORLD.rank], cuts[WORLD.rank + 1], device=HOST), n, counts)

    return _evens.get((n, WORLD.size), make)


def _part(local: Tensor, shape: torch.Size, axis: int) -> Tensor:
    """The rows of this rank of a tensor of which each has consecutive ones."""
    if WORLD.size == 1:
        return local
    mesh = init_device_mesh("cpu", (WORLD.size,))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, [Shard(axis)], run_check=False, shape=shape, stride=stride
    )


def _reason(error: CheckpointException) -> str:
    found = ((rank, failure[0]) for rank, failure in sorted(error.failures.items()))
    return "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, e in found)
