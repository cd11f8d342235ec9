"""Random numbers of GraphBolt's mini-batches that are the same for any number of workers.

torch gives each worker of a loader a seed of its own, so that the same batch would be drawn
otherwise by one worker than by three, or by the program itself. Here the seed of a batch follows
from a number that the loader draws for each epoch, the same for all workers, and from the place of
the batch's items. The program's own generator is as it was after each batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torchdata.dataloader2.graph as graphs
from dgl.graphbolt.dataloader import MultiprocessingWrapper
from dgl.graphbolt.internal import calculate_range
from dgl.graphbolt.item_sampler import ItemSampler
from torchdata.datapipes.iter import IterDataPipe

from fastgraph.dgl import graphbolt_randomness as randomness
from fastgraph.dgl.graphbolt_graph import SamplingGraph


class SeededItems(IterDataPipe):  # type: ignore[misc]
    """The batches of an ``ItemSampler``, before each of which random numbers begin anew."""

    def __init__(self, datapipe: Any) -> None:
        super().__init__()
        self.datapipe = datapipe
        self._seed = 0

    def set_seed(self, seed: int) -> SeededItems:
        """Take the seed of the next epoch, which torch's loader gives to all of its workers."""
        self._seed = seed
        return self

    def __iter__(self) -> Iterator[Any]:
        first, step = _places(self.datapipe)
        for i, batch in enumerate(self.datapipe):
            randomness.begin_batch(self._seed, first + i * step)
            yield batch


class SampledBatches(IterDataPipe):  # type: ignore[misc]
    """Batches that are sampled, after each of which torch's generator is as it was before."""

    def __init__(self, datapipe: Any) -> None:
        super().__init__()
        self.datapipe = datapipe

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.datapipe)
        while True:
            with randomness.of_batches():
                batch = next(iterator, None)
            if batch is None:
                return
            yield batch


def _places(sampler: Any) -> tuple[int, int]:
    """The place of the first item that a sampler gives to this worker, and how far to the next."""
    worker = torch.utils.data.get_worker_info()
    worker_id, num_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
    if not sampler._use_indexing:  # every worker goes through all
        return 0, sampler._batch_size
    first, _, _ = calculate_range(
        *(sampler._distributed, len(sampler._item_set)),
        *(sampler._world_size, sampler._rank, num_workers, worker_id),
        *(sampler._batch_size, sampler._drop_last, sampler._drop_uneven_inputs),
    )
    return first, sampler._batch_size


class SeededWrapper(MultiprocessingWrapper):  # type: ignore[misc]
    """DGL's ``MultiprocessingWrapper``, whose batches have random numbers of their own."""

    def __init__(self, datapipe: Any, *args: Any, **kwargs: Any) -> None:
        # `replace_dp` changes what comes before a pipe, so that there must be one.
        datapipe = SampledBatches(datapipe)
        graph = graphs.traverse_dps(datapipe)
        for sampler in graphs.find_dps(graph, ItemSampler):
            graph = graphs.replace_dp(graph, sampler, SeededItems(sampler))
        super().__init__(datapipe, *args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        # Of the program's generator one number, however many torch draws for its workers.
        self.dataloader.generator = torch.Generator().manual_seed(randomness.next_seed())
        yield from self.dataloader


def install(graphbolt: ModuleType) -> None:
    """Have GraphBolt's loader seed its batches, and its graphs be read from files that it wrote."""
    dataloader: Any = graphbolt.dataloader
    dataloader.MultiprocessingWrapper = SeededWrapper
    torch.serialization.add_safe_globals([graphbolt.FusedCSCSamplingGraph, SamplingGraph])
