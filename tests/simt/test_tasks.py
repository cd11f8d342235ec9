"""The lists of tasks, made by the emulator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastgraph.backends.tasks import CHUNK, SMALL_CHUNK, Tasks, count_cuts
from tests.cuda.test_benchmark import measure
from tests.simt.backend import emulator
from tests.simt.compared import graph_of

rows_of = Tasks(lambda: emulator().functions)


def lengths(*of_rows: int, size: int = 0, most: int = 0) -> Tensor:
    """Those given, and behind them ``size`` more below ``most``."""
    others = torch.randint(max(most, 1), (size,), generator=torch.Generator().manual_seed(0))
    return torch.cat([torch.tensor(of_rows, dtype=torch.int64), others])


ROWS = {
    "none": lengths(),
    "one": lengths(3),
    "one long": lengths(1000),
    "no entries": lengths(0, 0, 0),
    "at the bounds": lengths(64, 65, 63, 0, 128, 129, 256, 257, 512, 513),
    "all long": lengths(*range(300, 320)),
    "all alike": lengths(*[4] * 40),
    "windows": lengths(size=2100, most=9),
    "hubs in windows": torch.cat([lengths(70, 5000, size=1030, most=70), lengths(900, 0, 65)]),
}


def made(of_rows: Tensor, chunk: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """The delimiters of the rows, and what the emulated kernels list of them."""
    ptr = torch.cat([torch.zeros(1, dtype=torch.int64), of_rows.cumsum(0)])
    pieces = (of_rows + chunk - 1) // chunk
    num_cut, num_pieces = int((pieces > 1).sum()), int(pieces[pieces > 1].sum())
    found = torch.full((of_rows.numel() + num_pieces, 4), -7, dtype=torch.int32)
    emulator().seed(seed)
    emulator().functions.make_tasks(ptr, chunk, num_cut, found)
    num_tasks = len(found) - num_cut
    return ptr, found[:num_tasks], found[num_tasks:]


@pytest.mark.parametrize("chunk", [1, SMALL_CHUNK, CHUNK])
@pytest.mark.parametrize("name", ROWS)
def test_lists(name: str, chunk: int) -> None:
    ptr, found, cut_rows = made(ROWS[name] if chunk > 1 else ROWS[name][:50] % 60, chunk)
    row, begin, end, piece = found.long().unbind(1)
    # Every entry once, in the row that it stands in, and every row at least once.
    entries = torch.cat([torch.arange(b, e) for b, e in zip(begin, end, strict=True)] or [begin])
    assert torch.equal(entries.sort().values, torch.arange(int(ptr[-1])))
    assert torch.equal(torch.unique(row), torch.arange(ptr.numel() - 1))
    assert (
        (ptr[row] <= begin).all() and (end <= ptr[row + 1]).all() and (end - begin <= chunk).all()
    )
    # Pieces are numbered as they stand, in the order of their rows' entries, and none is empty.
    num_pieces = int((piece >= 0).sum())
    assert torch.equal(piece[:num_pieces], torch.arange(num_pieces))
    assert (piece[num_pieces:] == -1).all() and (begin[:num_pieces] < end[:num_pieces]).all()
    for number, first, last, _ in cut_rows.tolist():
        assert last - first >= 2 and (row[first:last] == number).all()
        assert begin[first] == ptr[number] and end[last - 1] == ptr[number + 1]
        assert torch.equal(begin[first + 1 : last], end[first : last - 1])
    # And in the order that is wanted.
    expected = measure("tasks").listed(ptr, chunk)
    assert torch.equal(found.long(), expected[0]) and torch.equal(cut_rows.long(), expected[1])


@pytest.mark.parametrize("name", ["at the bounds", "hubs in windows"])
def test_lists_do_not_depend_on_the_order_of_threads(name: str) -> None:
    first, *others = (made(ROWS[name], SMALL_CHUNK, seed) for seed in range(4))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(("name", "most"), [("cut", SMALL_CHUNK), ("hub", CHUNK)])
def test_a_small_graph_is_cut_into_smaller_pieces(name: str, most: int) -> None:
    rows = rows_of(graph_of(name), torch.empty(0), transpose=False)
    assert rows.order is not None
    lengths = rows.order[: len(rows.order) - rows.num_cut, 1:3].diff()
    assert most // 2 < lengths.max() <= most


def test_numbers_that_are_counted_are_those_that_are_listed() -> None:
    ptr, found, cut_rows = made(ROWS["hubs in windows"], SMALL_CHUNK)
    num_cut, num_pieces = map(int, count_cuts(ptr, 0))
    assert (num_cut, num_pieces) == (len(cut_rows), int((found[:, 3] >= 0).sum()))


def test_tasks_are_listed_once_for_each_grouping() -> None:
    graph = graph_of("cut")
    before = graph.nbytes
    found = [rows_of(graph, torch.empty(0), transpose=t).order for t in (False, True, False, True)]
    assert found[0] is found[2] and found[1] is found[3] and found[0] is not found[1]
    assert graph.nbytes == before + sum(t.nbytes for t in found[:2] if t is not None)


def test_what_was_listed_in_inference_mode_serves_training() -> None:
    graph = graph_of("random")
    with torch.inference_mode():
        order = rows_of(graph, torch.empty(0), transpose=False).order
    assert order is not None and not order.is_inference()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda a: a | {"chunk": 0}, r"chunk must be in \[1, 256\], got 0"),
        (lambda a: a | {"chunk": 257}, r"chunk must be in \[1, 256\], got 257"),
        (lambda a: a | {"cut": -1}, "list 3 rows and .* with -1 that are cut"),
        (lambda a: a | {"cut": 2}, r"of those that are cut, got shape \[6, 4\] with 2"),
        (lambda a: a | {"tasks": a["tasks"][:2]}, r"list 3 rows .* got shape \[2, 4\]"),
        (lambda a: a | {"tasks": a["tasks"].long()}, "tasks must be int32, got int64"),
        (lambda a: a | {"tasks": a["tasks"][:, :3].contiguous()}, r"shape \[6, 4\], got \[6, 3\]"),
        (lambda a: a | {"tasks": torch.empty(28).int()[1:25].view(6, 4)}, "aligned to 16 bytes"),
        (lambda a: a | {"ptr": a["ptr"].int()}, "rowptr must be int64, got int32"),
        (lambda a: a | {"ptr": a["ptr"][:0]}, "rowptr must hold at least one value"),
    ],
)
def test_bad_input(change: Callable[[dict[str, object]], dict[str, object]], text: str) -> None:
    arguments = {
        "ptr": torch.tensor([0, 0, 130, 131]),
        "chunk": SMALL_CHUNK,
        "cut": 1,
        "tasks": torch.empty(6, 4).int(),
    }
    with pytest.raises((ValueError, TypeError), match=text):
        emulator().functions.make_tasks(*change(arguments).values())


def test_kernels_refuse_a_matrix_without_tasks() -> None:
    rows = graph_of("random").by_destination
    x, out = torch.ones(12, 4), torch.empty(12, 4)
    with pytest.raises(ValueError, match="tasks must be a tensor on this device, got None"):
        emulator().functions.spmm(*rows.arguments, None, None, None, x, out)
