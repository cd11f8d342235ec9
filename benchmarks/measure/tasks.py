"""The work of the groups of lanes of a GPU, computed from the rows of a graph."""

from __future__ import annotations

import torch
from torch import Tensor

WINDOW = 1024
"""``kWindow`` of ``fastgraph/csrc/cuda/tasks.cu``."""
FORMER_CHUNK = 256


def listed(ptr: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """The lists of ``fastgraph/csrc/include/fastgraph/tasks.h``, as ``make_tasks`` is to make them.

    Args:
        ptr: int64 ``[rows + 1]``, delimits the rows.
        chunk: a row with more entries is cut.

    Returns:
        Row, begin, end and piece of each task, ``[tasks, 4]``, and row and pieces of each row that
        is cut, ``[rows that are cut, 4]``.
    """
    lengths, rows = ptr.diff(), torch.arange(ptr.numel() - 1)
    is_cut = lengths > chunk
    cut = rows[is_cut]
    pieces = (lengths[cut] + chunk - 1) // chunk
    ends = pieces.cumsum(0)
    cut_rows = torch.stack([cut, ends - pieces, ends, torch.zeros_like(cut)], dim=1)

    number = torch.arange(int(pieces.sum())) - (ends - pieces).repeat_interleave(pieces)
    row, of_row = cut.repeat_interleave(pieces), pieces.repeat_interleave(pieces)
    begin = ptr[row] + lengths[row] * number // of_row
    end = ptr[row] + lengths[row] * (number + 1) // of_row
    of_pieces = torch.stack([row, begin, end, torch.arange(row.numel())], dim=1)

    whole = rows[~is_cut]
    key = whole // WINDOW * (chunk + 1) + (chunk - lengths[whole])
    whole = whole[key.argsort(stable=True)]
    of_rows = torch.stack([whole, ptr[whole], ptr[whole + 1], torch.full_like(whole, -1)], dim=1)
    return torch.cat([of_pieces, of_rows]), cut_rows


def formerly(ptr: Tensor) -> Tensor:
    """Begin and end of each task, ``[tasks, 2]``, as they were without a list.

    Entries were cut at multiples of 256 in rows that are longer. Each chunk had two tasks for such
    rows, one or both of which were mostly empty, and so was that of each row that was cut.
    """
    lengths, num_entries = ptr.diff(), int(ptr[-1])
    is_long = lengths > FORMER_CHUNK
    rows = torch.stack([ptr[:-1], torch.where(is_long, ptr[:-1], ptr[1:])], dim=1)
    if not is_long.any():
        return rows
    first = torch.arange(0, num_entries, FORMER_CHUNK)
    last = (first + FORMER_CHUNK).clamp(max=num_entries)
    of_pieces = []
    for at_end, entry in ((False, first), (True, last - 1)):
        row = torch.searchsorted(ptr, entry, right=True) - 1
        is_one = is_long[row] & (ptr[row] > first if at_end else True)
        begin = torch.maximum(ptr[row], first)
        end = torch.where(is_one, torch.minimum(ptr[row + 1], last), begin)
        of_pieces.append(torch.stack([begin, end], dim=1))
    return torch.cat([torch.stack(of_pieces, dim=1).flatten(0, 1), rows])


def slots_per_entry(spans: Tensor, groups: int) -> float:
    """Entries for which a warp is busy, for each that it computes; 1 is perfect.

    The groups of a warp take a task each, and it is busy until the longest is done.

    Args:
        spans: begin and end of each task, ``[tasks, 2]``, in the order in which groups take them.
        groups: of a warp.
    """
    lengths = spans[:, 1] - spans[:, 0]
    of_warps = torch.nn.functional.pad(lengths, (0, -lengths.numel() % groups)).view(-1, groups)
    return int(of_warps.amax(dim=1).sum()) * groups / int(lengths.sum())


def gathered_per_entry(spans: Tensor, col: Tensor, groups: int) -> float:
    """Rows that blocks of so many groups read for the first time, for each entry."""
    lengths = spans[:, 1] - spans[:, 0]
    task = torch.arange(lengths.numel()).repeat_interleave(lengths)
    start = (lengths.cumsum(0) - lengths)[task]
    entry = spans[task, 0] + torch.arange(task.numel()) - start
    gathered = (task // groups) * (int(col.max()) + 1) + col[entry]
    return torch.unique(gathered).numel() / col.numel()
