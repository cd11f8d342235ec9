"""The next batch of a loader, made by a thread while the program computes on the last one.

Batches are the same as without it: the thread draws from a generator of its own, which is seeded as
torch's would be, and nothing that a program wrote runs there.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import LinkLoader, LinkNeighborLoader, NeighborLoader, NodeLoader
from torch_geometric.sampler import NeighborSampler

from fastgraph import settings
from fastgraph.machine import native
from fastgraph.pyg.batch_randomness import in_a_thread, made_again

_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler)
"""Those that draw from torch's generator no later than for the first batch.

From one of the program's, ``RandomSampler`` draws at its end, too.
"""


class Prefetched:
    """An iterator that is one batch ahead of the program from the first batch on.

    The first one is made in the program's thread, as is one that follows an error, and one that is
    made again as the program has changed the graph or the loader since the thread began with it. An
    error of the thread is raised where the program asks for the batch. The thread ends with the
    iterator.

    Args:
        loader: one for which :func:`why_not` has no reason.
        batches: its iterator.
    """

    def __init__(self, loader: Any, batches: Iterator[Any]) -> None:
        self._loader = loader
        self._batches = batches
        self._ahead: Future[Any] | None = None
        self._of_ahead: tuple[list[object], list[int]] = [], []
        self._thread = ThreadPoolExecutor(1, "fastgraph-prefetch", _use_one_core)
        self._process = os.getpid()

    def __iter__(self) -> Prefetched:
        return self

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        if self._process != os.getpid():
            raise RuntimeError(
                "a loader's iterator that prefetches cannot go on in a forked process, in which "
                "its thread does not exist"
            )
        batch = next(self._batches, _END) if self._ahead is None else self._made(self._ahead)
        if batch is _END:
            self._thread.shutdown(wait=False)
            raise StopIteration
        self._of_ahead = _read(self._loader)
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._ahead = self._thread.submit(_make, self._batches, *modes)
        return batch

    def _made(self, ahead: Future[Any]) -> Any:
        """The batch of the thread, or that of the program as it is now."""
        wait([ahead])  # one who interrupts this asks for the same batch again
        self._ahead = None
        is_end = ahead.exception() is None and ahead.result() is _END
        if is_end or _is_same(self._of_ahead, _read(self._loader)):
            return ahead.result()
        return made_again(self._batches)


_END = object()


def _read(loader: Any) -> tuple[list[object], list[int]]:
    """Of what a loader makes batches: all objects, and the versions of tensors."""
    read: list[object] = []
    input_data = loader.input_data
    for owner in (vars(_sampler(loader)), vars(input_data), *loader.data.stores):
        for key, value in owner.items():
            read += (key, *value.values()) if isinstance(value, dict) else (key, value)
    return read, [value._version for value in read if isinstance(value, Tensor)]


def _is_same(before: tuple[list[object], list[int]], after: tuple[list[object], list[int]]) -> bool:
    return before[1] == after[1] and list(map(id, before[0])) == list(map(id, after[0]))


def _sampler(loader: Any) -> Any:
    return loader.link_sampler if isinstance(loader, LinkLoader) else loader.node_sampler


def _use_one_core() -> None:
    torch.get_num_threads()  # sets the number for this thread the first time
    native.library().use_threads(1)


def _make(batches: Iterator[Any], grad: bool, inference: bool) -> Any:
    with torch.inference_mode(inference), torch.set_grad_enabled(grad), in_a_thread():
        return next(batches, _END)


def prefetched(loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
    """A loader's iterator, one batch ahead if the setting ``prefetch`` says so and it may be.

    Warns with the reason if it may not.
    """
    if not settings.current().prefetch:
        return batches
    reason = why_not(loader)
    if reason is None:
        return Prefetched(loader, batches)
    warnings.warn(f"fastgraph does not prefetch: {reason}", stacklevel=4)
    return batches


def why_not(loader: Any) -> str | None:
    """The reason why a thread may not make a loader's batches, if there is one."""
    if type(loader) not in (NeighborLoader, LinkNeighborLoader, NodeLoader, LinkLoader):
        return f"{type(loader).__name__} is not NeighborLoader or LinkNeighborLoader"
    own = _sampler(loader)
    if type(own) is not NeighborSampler:
        return f"the sampler is {type(own).__name__}, not PyG's NeighborSampler"
    if isinstance(loader, LinkLoader) and loader.neg_sampling is not None:
        return "negative samples draw from torch's generator"
    if loader.transform is not None or loader.transform_sampler_output is not None:
        return "a transform is the program's"
    if loader.num_workers > 0:
        return "workers are ahead already"
    if loader.pin_memory:
        return "memory is pinned"
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler or type(batches.sampler) not in _SAMPLERS:
        return "a sampler of torch's is the program's"
    if getattr(batches.sampler, "generator", None) is not None:
        return "a generator is the program's"
    collate = getattr(loader.collate_fn, "__func__", None)
    if collate is not type(loader).collate_fn or "filter_fn" in vars(loader):
        return "a function of the loader is the program's"
    if type(loader.data) not in (Data, HeteroData):
        return f"features are in {type(loader.data).__name__}"
    if not all(_is_plain(value) for store in loader.data.stores for value in store.values()):
        return "an attribute needs a gradient, is of inference, is not in memory, or no tensor"
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        return "a mode of torch's is active"
    if torch.get_num_threads() >= len(os.sched_getaffinity(0)):
        return f"torch's {torch.get_num_threads()} threads leave no core"
    return None


def _is_plain(value: object) -> bool:
    if isinstance(value, Tensor):
        is_here = type(value) is Tensor and value.device.type == "cpu"
        # One of inference does not say when it is written to.
        return is_here and not value.requires_grad and not value.is_inference()
    return value is None or isinstance(value, bool | int | float | str | list | tuple)
