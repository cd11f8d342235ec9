"""A recorder of the collectives of ranks, which must issue the same ones in one order.

It sits below everything of fastgraph, in the functions of ``torch.distributed``. A rank that asks
for another collective than the others need not hang where tests are small: gloo pairs messages of
the same size, whatever they are for.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

FOLDER = "TESTS_COLLECTIVES"
"""The variable that names the folder in which ranks leave what they have issued."""

_LIBRARIES = ("fastgraph", "torch", "torch_geometric", "dgl", "functools", "contextlib", "runpy")

# The position of the group among the arguments.
_KINDS = {
    "all_reduce": 2,
    "all_gather_into_tensor": 2,
    "all_gather_single": 2,
    "all_to_all_single": 4,
    "all_gather_object": 2,
    "broadcast_object_list": 2,
    "broadcast": 2,
    "barrier": 0,
    "new_group": None,
}

Entry = dict[str, Any]


def install() -> None:
    """Record from now on, before fastgraph is imported, if the variable says where."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        return
    path, waiting = Path(folder, os.environ["RANK"]), list[str]()
    for kind, place in _KINDS.items():
        upstream = getattr(dist, kind, None)
        if upstream is not None:
            setattr(dist, kind, _recorded(upstream, kind, place, path, waiting))


def _recorded(
    upstream: Callable[..., Any], kind: str, place: int | None, path: Path, waiting: list[str]
) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def collective(*args: Any, **kwargs: Any) -> Any:
        given = args[place] if place is not None and len(args) > place else kwargs.get("group")
        ranks = dist.get_process_group_ranks(given or dist.group.WORLD)
        sizes = [_size(value, kind) for value in args[: None if place is None else place]]
        entry = {"ranks": ranks, "kind": kind, "sizes": sizes, "line": _line()}
        waiting.append(json.dumps(entry) + "\n")
        # At once, lest it be lost with the rank; later, where a test limits the size of files.
        with contextlib.suppress(OSError), path.open("a") as file:
            file.write("".join(waiting))
            file.flush()
            waiting.clear()
        return upstream(*args, **kwargs)

    return collective


def _size(value: Any, kind: str) -> Any:
    """A part of a collective that ranks must agree on; nothing for objects, which are any."""
    if isinstance(value, Tensor):
        return [list(value.shape), str(value.dtype)]
    is_told = kind in ("all_to_all_single", "new_group")
    return list(value) if is_told and isinstance(value, (list, tuple, range)) else None


_GENERATED = re.compile(r"(_propagate|_edge_updater)_\w+(?=\.py$)")


def _line() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "")
        if name != __name__ and name.partition(".")[0] not in _LIBRARIES:
            break
        frame = frame.f_back
    # PyG writes methods of layers into files whose names end at random.
    file = _GENERATED.sub(r"\1", Path(frame.f_code.co_filename).name)
    return f"{file}:{frame.f_lineno}"


def read(folder: Path, ranks: int) -> list[list[Entry]]:
    """The collectives of each rank, in its order."""
    paths = [folder / str(rank) for rank in range(ranks)]
    return [
        [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        for path in paths
    ]


def difference(records: Sequence[Sequence[Entry]]) -> str:
    """The first place where ranks of one communicator ask for different things, or nothing."""
    communicators = {tuple(entry["ranks"]) for record in records for entry in record}
    for members in sorted(communicators):
        of_ranks = {
            rank: [entry for entry in records[rank] if tuple(entry["ranks"]) == members]
            for rank in members
        }
        first = of_ranks[members[0]]
        for rank, entries in of_ranks.items():
            for number in range(max(len(first), len(entries))):
                pair = [e[number] if number < len(e) else None for e in (first, entries)]
                if not _match(*pair, members.index(rank)):
                    return (
                        f"collective {number} of ranks {list(members)}: rank {members[0]} asks for "
                        f"{pair[0]}, rank {rank} for {pair[1]}"
                    )
    return ""


def _match(one: Entry | None, other: Entry | None, place: int) -> bool:
    """True if the first rank of a group and that at a place issue the same collective."""
    if one is None or other is None:
        return False
    uneven = len(one["sizes"]) == 4 and None not in one["sizes"]
    if one["kind"] != "all_to_all_single" or not uneven:
        return one == other
    if (one["kind"], one["line"]) != (other["kind"], other["line"]):
        return False
    (*_, receives, sends), (*_, others_receive, others_send) = one["sizes"], other["sizes"]
    return bool(sends[place] == others_receive[0] and receives[place] == others_send[0])
