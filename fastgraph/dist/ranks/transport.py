"""The collectives of torch.distributed that everything else is made of, counted and checked.

Every rank must issue the same collectives in the same order. Nothing else in this package calls
``torch.distributed`` for tensors.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from fastgraph.dist.ranks import board
from fastgraph.dist.ranks.board import BOARD, Asked, Rows
from fastgraph.dist.ranks.counts import COUNTS
from fastgraph.dist.ranks.own_device import HOST
from fastgraph.dist.ranks.phases import RECORDER, Clock, Spent
from fastgraph.dist.ranks.watchdog import WATCHDOG
from fastgraph.dist.ranks.world import WORLD, CollectiveError, RanksDivergedError, line_of_program

_AT_ONCE = 2**20
"""Bytes for all ranks, up to which a rank sends the whole of a tensor to each: messages that leave
together take less than those of a ring, which follow one another.
"""

_LARGE = 2**20
"""Bytes of a tensor on each rank, from which on several are sent one after the other.

Together they take fewer messages, and memory for copies of all of them at once.
"""

_PATIENCE = timedelta(seconds=3)
"""For which a rank waits before it looks at the board, again and again."""

# torch 2.13 has given the function another name.
_gather_parts = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


Value = TypeVar("Value")
Step = Callable[[], dist.Work | None]
"""Begins a collective, and gives what can be waited for unless it has waited itself."""


class Group(NamedTuple):
    """Some of the ranks, in ascending order, and this rank among them.

    All ranks issue the collectives of their groups together: groups that exist side by side have
    the same size.

    Attributes:
        ranks: which ranks these are.
        rank: the place of this one among them.
        handle: that of ``torch.distributed``; ``None`` for all ranks.
    """

    ranks: Sequence[int]
    rank: int
    handle: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)


def all_reduce(x: Tensor) -> Tensor:
    """The sum of the tensors of all ranks, which have one shape; the same bits on all of them.

    Sums of booleans and of small integers are of int64, as those of torch are.
    """
    integer = x.dtype == torch.bool
    out = x.detach().to(torch.int64 if integer else x.dtype, copy=True)
    out = out.contiguous()
    if WORLD.size > 1:
        sent = out.nbytes * 2 * (WORLD.size - 1) // WORLD.size
        reduce = lambda: dist.all_reduce(out, async_op=True)  # noqa: E731
        _issue("all_reduce", x.shape, x.dtype, sent, reduce, device=x.device)
    return out


def all_reduce_in_order(x: Tensor) -> Tensor:
    """:func:`all_reduce`, whose sums are taken in the order of ranks.

    So their bits do not depend on where in a tensor they are; gloo begins with another rank in each
    part of it. Small tensors take fewer messages than gloo's ring, too.
    """
    size = WORLD.size
    if size <= 2 or not x.numel():  # two numbers have one sum
        return all_reduce(x)
    flat = x.detach().flatten()
    if x.nbytes * size <= _AT_ONCE:
        return _sum_of_parts(flat.expand(size, -1).contiguous(), x.shape).view(x.shape)
    length = -(-len(flat) // size)
    parts = pad(flat, (0, size * length - len(flat))).view(size, length)
    whole = all_gather(_sum_of_parts(parts, x.shape), [length] * size)
    return whole[: len(flat)].view(x.shape)


def _sum_of_parts(parts: Tensor, shape: Sequence[int]) -> Tensor:
    """The sum of the ranks' parts for this one; of ``parts`` each rank gets a row."""
    received = torch.empty_like(parts)
    sent = parts[1:].nbytes
    given, taken = as_bytes(parts), as_bytes(received)
    exchange = lambda: dist.all_to_all_single(taken, given, async_op=True)  # noqa: E731
    _issue("all_reduce", shape, parts.dtype, sent, exchange, device=parts.device)
    total = received[0] + received[1]
    for part in received[2:]:
        total += part
    return total


def sum_of_sparse(x: Tensor) -> Tensor:
    """:func:`all_reduce` of sparse tensors in coordinate format: the entries of all ranks."""
    x = x.detach().coalesce()
    index, values = x.indices().t().contiguous(), x.values()
    counts = all_gather(torch.tensor([len(values)], device=HOST), [1] * WORLD.size).tolist()
    entries = all_gather(index, counts).t(), all_gather(values, counts)
    options: dict[str, Any] = {"check_invariants": False, "device": x.device}
    return torch.sparse_coo_tensor(*entries, x.shape, **options).coalesce()


def all_gather(x: Tensor, counts: Sequence[int]) -> Tensor:
    """The rows of all ranks in the order of ranks, of which rank ``r`` has ``counts[r]``.

    A new tensor. Through gloo, which gathers parts of one size only, rows are padded to the longest
    part.
    """
    x = x.detach()
    if WORLD.size == 1:
        return x.clone(memory_format=torch.contiguous_format)
    if not _is_of_host(x.device):
        return _gathered_rows(x, counts)
    longest = max(counts)
    padded = x.new_zeros((longest, *x.shape[1:]))
    padded[: len(x)] = x
    received = x.new_empty((WORLD.size * longest, *x.shape[1:]))
    sent = padded.nbytes * (WORLD.size - 1)
    if padded.numel():
        given, taken = as_bytes(padded), as_bytes(received)
        _issue(
            "all_gather",
            (sum(counts), *x.shape[1:]),
            x.dtype,
            sent,
            lambda: _gather_parts(taken, given, async_op=True),
            device=x.device,
        )
    starts = range(0, WORLD.size * longest, longest) if longest else [0] * WORLD.size
    return torch.cat([received[s : s + c] for s, c in zip(starts, counts, strict=True)])


def _gathered_rows(x: Tensor, counts: Sequence[int]) -> Tensor:
    """:func:`all_gather` by a library that takes parts of any sizes."""
    received = x.new_empty((sum(counts), *x.shape[1:]))
    if received.numel():
        given, parts = as_bytes(x.contiguous()), list(as_bytes(received).split(list(counts)))
        gather = lambda: dist.all_gather(parts, given, async_op=True)  # noqa: E731
        sent = given.nbytes * (WORLD.size - 1)
        _issue("all_gather", received.shape, x.dtype, sent, gather, device=x.device)
    return received


def all_to_all(
    x: Tensor,
    sends: Sequence[int],
    receives: Sequence[int],
    into: Tensor | None = None,
    group: Group | None = None,
) -> Tensor:
    """Rows for each rank, ``sends[r]`` of them for rank ``r``; gives those from each rank.

    ``into`` is contiguous memory for the result. In a group ``r`` is a place in it.
    """
    return begin_all_to_all(x, sends, receives, into, group).wait()


def all_to_all_together(
    tensors: Sequence[Tensor],
    sends: Sequence[int],
    receives: Sequence[int],
    into: Sequence[Tensor] | None = None,
    group: Group | None = None,
) -> list[Tensor]:
    """:func:`all_to_all` of several tensors, whose rows are sent beside each other.

    So they take the messages of one. What is sent and received is copied, as bytes: dtypes may
    differ. A single tensor is not.
    """
    if len(tensors) == 1:
        only = None if into is None else into[0]
        return [all_to_all(tensors[0], sends, receives, only, group)]
    sizes = [x.shape[1:].numel() * x.element_size() for x in tensors]
    packed = torch.cat([as_bytes(x.contiguous()) for x in tensors], 1)
    parts = all_to_all(packed, sends, receives, group=group).split(sizes, 1)
    found = into
    if found is None:
        found = [x.new_empty((sum(receives), *x.shape[1:])) for x in tensors]
    for out, part in zip(found, parts, strict=True):
        as_bytes(out).copy_(part)
    return list(found)


def sends_in_turns(sizes: Sequence[int], ranks: int) -> bool:
    """True if tensors are sent one after the other, and not together.

    Args:
        sizes: bytes of each on all ranks.
        ranks: how many there are.
    """
    return sum(sizes) >= _LARGE * len(sizes) * ranks


def begin_all_to_all(
    x: Tensor,
    sends: Sequence[int],
    receives: Sequence[int],
    into: Tensor | None = None,
    group: Group | None = None,
) -> Exchange:
    """:func:`all_to_all`, which goes on while this rank does other things.

    All ranks must begin it, and other collectives, in the same order. ``x`` must not be changed
    before the end.
    """
    x = x.detach().contiguous()
    out = x.new_empty((sum(receives), *x.shape[1:])) if into is None else into
    exchange = Exchange(x, out)
    if (WORLD.size if group is None else group.size) == 1:
        out.copy_(x)
    elif x.shape[1:].numel():
        exchange.begin(sends, receives, group)
    return exchange


class Exchange:
    """An all-to-all that is going on."""

    def __init__(self, given: Tensor, received: Tensor) -> None:
        self._given, self._received = given, received
        self._work: dist.Work | None = None
        self._asked = Asked(0, "")
        self._recorded: tuple[Spent, Clock] | None = None

    def begin(self, sends: Sequence[int], receives: Sequence[int], group: Group | None) -> None:
        """Issue the collective."""
        rank, handle = (WORLD.rank, None) if group is None else (group.rank, group.handle)
        ranks = range(WORLD.size) if group is None else group.ranks
        x = self._given
        given, taken = as_bytes(x), as_bytes(self._received)

        def collective() -> None:
            self._work = dist.all_to_all_single(
                taken, given, list(receives), list(sends), group=handle, async_op=True
            )

        sent = x.shape[1:].numel() * x.element_size() * (sum(sends) - sends[rank])
        rows = Rows(ranks, sends, receives)
        self._asked = _issue(
            "all_to_all", x.shape[1:], x.dtype, sent, collective, device=x.device, rows=rows
        )
        if RECORDER.collectives is not None:
            self._recorded = RECORDER.collectives[-1], RECORDER.clock

    def wait(self) -> Tensor:
        """The tensor that was received, once it is here."""
        if self._work is None:
            return self._received
        if self._recorded is None:
            _wait(self._work, self._asked)
        else:  # what the rank did meanwhile counts as computing
            spent, clock = self._recorded
            since = clock.now()
            _wait(self._work, self._asked)
            spent.spans.append((since, clock.now()))
        self._work = None
        return self._received


def table_of(row: Tensor) -> Tensor:
    """The rows of all ranks, ``[ranks, len(row)]``; for what ranks check, and not counted."""
    found = row.new_empty(WORLD.size * len(row))
    asked = _ask("all_gather", row.shape, row.dtype, row.device)
    _finish(lambda: _gather_parts(found, row, async_op=True), asked)
    return found.view(WORLD.size, -1)


def agree(value: bool) -> bool:
    """True if ``value`` is true on all ranks.

    What depends on the rows of one rank must be agreed on before anything is done about it: ranks
    that go different ways wait for each other forever.
    """
    if WORLD.size == 1:
        return value
    return int(all_reduce(torch.tensor(int(not value), device=HOST))) == 0


def barrier() -> None:
    """Wait for all ranks."""
    if WORLD.size > 1:
        # That of torch may be one of devices, for which no host waits.
        meet = lambda: dist.all_reduce(torch.zeros(1, device=HOST), async_op=True)  # noqa: E731
        _issue("barrier", (), None, 0, meet)


def broadcast(value: Value) -> Value:
    """The object of rank 0."""
    if WORLD.size == 1:
        return value
    is_mine = WORLD.rank == 0
    data = _pickled(value) if is_mine else torch.empty(0, dtype=torch.uint8, device=HOST)
    size = torch.tensor([len(data)], device=HOST)

    def content() -> dist.Work | None:
        nonlocal data
        if not is_mine:
            data = data.new_empty(int(size))
        work: dist.Work | None = dist.broadcast(data, 0, async_op=True)
        return work

    sizes = lambda: dist.broadcast(size, 0, async_op=True)  # noqa: E731
    _issue("broadcast", (), None, 0, sizes, content)
    return value if is_mine else pickle.loads(data.numpy().tobytes())


def gather_objects(value: Value) -> list[Value]:
    """The objects of all ranks, in their order."""
    found = [value]
    if WORLD.size > 1:
        found.clear()
        _issue("gather_objects", (), None, 0, lambda: found.extend(_gathered(value)))
    return found


def _gathered(value: Value) -> list[Value]:
    data = _pickled(value)
    sizes = torch.empty(WORLD.size, dtype=torch.int64, device=HOST)
    asked = _ask("objects", (), None)
    _finish(
        lambda: _gather_parts(sizes, torch.tensor([len(data)], device=HOST), async_op=True), asked
    )
    longest = int(sizes.max())
    given, taken = pad(data, (0, longest - len(data))), data.new_empty(WORLD.size * longest)
    _finish(lambda: _gather_parts(taken, given, async_op=True), asked)
    parts = zip(taken.view(WORLD.size, -1), sizes.tolist(), strict=True)
    return [pickle.loads(part[:size].numpy().tobytes()) for part, size in parts]


def _pickled(value: object) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def as_bytes(x: Tensor) -> Tensor:
    """A contiguous tensor as rows of bytes, so that every dtype can be sent by every library.

    Strides of dimensions of a single element or none can be any, and are put right.
    """
    size = x.shape[1:].numel()
    return x.as_strided((len(x), size), (size, 1)).view(torch.uint8)


def _issue(
    kind: str,
    shape: Sequence[int],
    dtype: torch.dtype | None,
    sent: int,
    *steps: Step,
    device: torch.device = HOST,
    rows: Rows | None = None,
) -> Asked:
    """Begin each step of a collective and wait for it, if it gives what can be waited for."""
    if WORLD.is_alone:
        raise RanksDivergedError(
            f"rank {WORLD.rank} of {WORLD.size}: {kind} of {list(shape)} {dtype} at "
            f"{line_of_program()}, while ranks work one by one, as on the files of a dataset"
        )
    if WORLD.is_forked:
        raise RuntimeError(
            f"a fork of rank {WORLD.rank}, such as a worker of a data loader, uses a sharded "
            f"tensor at {line_of_program()}; give it fastgraph.dist.whole(tensor)"
        )
    COUNTS.calls[kind] += 1
    COUNTS.sent[kind] += sent
    is_recorded = RECORDER.collectives is not None
    since = RECORDER.clock.now() if is_recorded else None
    asked = _ask(kind, shape, dtype, device, rows)
    if WORLD.check:
        _compare(f"{asked.what} at {line_of_program()}")
    for step in steps:
        _finish(step, asked)
    if is_recorded:
        RECORDER.add(sent, since)
    return asked


def _ask(
    kind: str,
    shape: Sequence[int],
    dtype: torch.dtype | None,
    device: torch.device = HOST,
    rows: Rows | None = None,
) -> Asked:
    """Count a collective, of which all ranks ask for the same."""
    return BOARD.ask(f"{kind} of {list(shape)} {dtype}", _is_of_host(device), rows)


def _is_of_host(device: torch.device) -> bool:
    """True if the host waits for what is on a device to be sent, as gloo does the sending."""
    return device == HOST or WORLD.through == "gloo"


def _wait(work: dist.Work, asked: Asked) -> None:
    """Wait for a collective that was begun, or have the device wait, which has an order of its own.

    Raises:
        RanksDivergedError: from the board, which is looked at now and then.
        CollectiveError: from the board, or the collective did not end, as after a time-out.
    """
    if not asked.is_of_host:
        watched = WATCHDOG.waits(asked)
        try:
            work.wait()
        finally:
            WATCHDOG.was_told(watched)
        return
    since, told_at = time.monotonic(), 0.0
    while True:
        was_completed = work.is_completed()
        try:
            work.wait(_PATIENCE)
        except RuntimeError as error:
            # What ended during the wait may have ended well, just after the patience did.
            if was_completed:
                raise _unfinished(asked, error) from error
        else:
            return
        if work.is_completed():
            continue
        BOARD.look(asked)
        waited = time.monotonic() - since
        if waited >= max(board.SECONDS_OF_SILENCE, 2 * told_at):
            told_at = waited
            _tell(asked, waited)


def _tell(asked: Asked, waited: float) -> None:
    """Tell people for whom this rank waits, who may do something for long, or never come."""
    if missing := BOARD.missing(asked):
        ranks = ", ".join(f"rank {rank}" for rank in missing)
        print(
            f"fastgraph.dist: rank {WORLD.rank} of {WORLD.size} has waited {waited:.0f} s for "
            f"{asked.what} at {line_of_program()}; not there: {ranks}",
            file=sys.stderr,
            flush=True,
        )


def _finish(step: Step, asked: Asked) -> None:
    try:
        work = step()
        if work is not None:
            _wait(work, asked)
    except (RanksDivergedError, CollectiveError):
        raise
    except RuntimeError as error:
        raise _unfinished(asked, error) from error


def _unfinished(asked: Asked, error: RuntimeError) -> CollectiveError:
    gone = BOARD.gone()
    return CollectiveError(
        f"rank {WORLD.rank} of {WORLD.size}: {asked.what}, called at {line_of_program()}, did not "
        f"end: {f'{gone}; ' if gone else ''}{error}"
    )


def _compare(fingerprint: str) -> None:
    found = _gathered(fingerprint)
    if len(set(found)) > 1:
        listed = "\n".join(f"  rank {rank}: {print_}" for rank, print_ in enumerate(found))
        raise RanksDivergedError(f"ranks ask for different collectives:\n{listed}")
