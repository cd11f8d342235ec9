"""Random calls of the native functions: run by sanitize.py in a process with the sanitizers.

A valid call must give what the same formula gives in torch. A call with something wrong in it must
raise, or ignore what does no harm; reading or writing out of bounds ends the process. What the
functions trust is left alone: the contents of matrices that build_csr, check_csr, transpose_csr and
order_rows made, and that there is a row of x for each of their columns.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.native.calls import CALLS
from tests.native.drawing import (
    BAD_INDICES,
    BAD_OBJECTS,
    BAD_SIZES,
    OTHER_DTYPES,
    REFUSALS,
    Call,
    Draw,
    Library,
    Prepared,
)

# These take no tensor.
NOT_CALLED = {"force_panels", "max_threads", "panel_channels", "run_serially", "use_threads"}
Make = Callable[[Library, Draw], Prepared]
# Nothing that these are given is trusted.
BUILDERS = {"build_csr", "build_csr_with_loops", "check_csr"}
# Nor are these.
UNTRUSTED = {("count_tile_columns", "windows"), ("fill_tiles", "ptr")}
UNTRUSTED |= {
    (function, name)
    for function in ("check_edges", "spmm_coo", "segment_reduce_coo")
    for name in ("source", "destination")
}
UNTRUSTED |= {("edge_program", name) for name in ("slots", "instructions", "reductions")}
UNTRUSTED |= {("sample_neighbors", name) for name in ("src_type", "dst_type", "num_nodes")}
UNTRUSTED |= {("random_walk", name) for name in ("rowptr", "col", "seed")}
UNTRUSTED |= {("sample_layer", name) for name in ("colptr", "row", "seed", "edge_type")}
UNTRUSTED |= {("thin_lists", name) for name in ("ptr", "index", "nodes")}
UNTRUSTED |= {("sample_local_nodes", "nodes")}
UNTRUSTED |= {("draw_negatives", name) for name in ("colptr", "row")}
UNTRUSTED |= {
    (function, name)
    for function in ("distances_in_ranges", "distances_of_entries", "nodes_within")
    for name in ("rowptr", "col", "nodes", "first", "begin", "ptr", "key")
}
UNTRUSTED |= {("gather_tokens", name) for name in ("cache_bits", "cache_before", "nodes")}
UNTRUSTED |= {
    (name, offsets)
    for name in ("dense_attention", "dense_attention_backward")
    for offsets in ("ptr", "key_ptr", "pair_type")
}
UNTRUSTED |= {
    (f"biased_attention{which}", "bias_index") for which in ("", "_backward_dst", "_backward_src")
}
UNTRUSTED |= {
    (f"block_attention{which}", "bias_index")
    for which in ("", "_backward_queries", "_backward_keys")
}
# Nor are tensors in lists of these.
OF_LISTS = {"sample_local_nodes", "sample_neighbors", "unique_and_compact"}


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def spoiled_tensor(draw: Draw, tensor: Tensor, may_shrink: bool) -> Any:
    """A tensor like this one with something wrong about it."""
    kinds = ["object", "dtype", "more_dims", "fewer_dims", "grown", "gaps", "flipped"]
    if may_shrink and tensor.dim() and len(tensor):
        kinds += ["shrunk", "nothing"]
    if tensor.dim() >= 2:
        kinds += ["turned", "wider"]
    kind = draw.one_of(*kinds)
    if kind == "object":
        return draw.one_of(*BAD_OBJECTS)
    if kind == "dtype":
        return tensor.to(draw.one_of(*OTHER_DTYPES, torch.complex64, torch.float8_e4m3fn))
    if kind == "more_dims":
        return tensor[None] if draw.flag() else tensor[..., None]
    if kind == "fewer_dims":
        return tensor[0].clone() if len(tensor) else torch.zeros((), dtype=tensor.dtype)
    if kind == "grown":
        return torch.cat([tensor, tensor[-1:]]) if len(tensor) else tensor.new_zeros(1)
    if kind == "gaps":
        return tensor.repeat_interleave(2, -1)[..., ::2]
    if kind == "flipped":
        if tensor.dtype == torch.bfloat16:
            return tensor[:, None]
        return tensor.numpy()[::-1]
    if kind == "shrunk":
        return tensor[:-1].clone()
    if kind == "nothing":
        return tensor[:0].clone()
    if kind == "wider":
        return torch.cat([tensor, tensor[:, :1]], 1) if tensor.shape[1] else tensor.new_zeros(1, 1)
    return tensor.transpose(0, -1)


def with_bad_value(draw: Draw, tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    bad = draw.one_of(*BAD_INDICES, 0, 1)
    if tensor.is_floating_point():
        bad = draw.one_of(-1.0, 0.0, float("nan"), float("inf"))
    else:
        info = torch.iinfo(tensor.dtype)
        bad = max(info.min, min(info.max, bad))
    changed[draw.number(0, len(tensor) - 1)] = bad
    return changed


def spoiled(draw: Draw, function: str, call: Call, name: str) -> Any:
    value = call[name]
    if isinstance(value, list) and not value:
        return draw.one_of([torch.zeros(1)], [torch.zeros(1, dtype=torch.int64)], None)
    if isinstance(value, list):
        place = draw.number(0, len(value) - 1)
        item = value[place]
        if function in OF_LISTS and isinstance(item, Tensor) and len(item) and draw.flag():
            changed_list = list(value)
            changed_list[place] = with_bad_value(draw, item)
            return changed_list
        changed_tensor = (
            draw.one_of("tensor", 3, torch.zeros(3))
            if item is None
            else spoiled_tensor(draw, item, may_shrink=True)
        )
        return draw.one_of(value[1:], [*value, value[0]], [*value[:place], changed_tensor])
    if value is None:
        return draw.one_of("tensor", 3, torch.zeros(3), torch.zeros(2, 2, dtype=torch.int32))
    if not isinstance(value, Tensor):
        return draw.one_of(*BAD_SIZES, 0, int(value) + 1, int(value) - 1)
    is_looked_at = name in ("row", "col", "ptr", "index") and function in BUILDERS
    if (is_looked_at or (function, name) in UNTRUSTED) and draw.flag():
        if value.numel() == 0:
            return value
        changed = value.clone(memory_format=torch.contiguous_format).view(-1)
        # They may have been spoiled before.
        sizes = (call[s] for s in ("num_rows", "num_cols") if isinstance(call.get(s), int))
        bad = draw.one_of(*BAD_INDICES, *sizes, 0, 1)
        info = torch.iinfo(value.dtype)
        changed[draw.number(0, value.numel() - 1)] = max(info.min, min(info.max, bad))
        return changed.view(value.shape)
    # What says how many rows the gathered features should have, where they are not trusted.
    tells = {"col_scale", "rowptr_t", "score_src", "value"}
    told = name not in ("x", "x_src") or any(call.get(other) is not None for other in tells)
    return spoiled_tensor(draw, value, told)


def longs(values: Tensor | np.ndarray) -> Tensor:
    return torch.as_tensor(values if isinstance(values, Tensor) else values.copy()).long()


def is_matrix(call: Call) -> bool:
    """True if arguments that check_csr has accepted describe a compressed matrix."""
    ptr, index = longs(call["ptr"]), longs(call["index"])
    spans = int(ptr[0]) == 0 and int(ptr[-1]) == index.numel() and bool((ptr.diff() >= 0).all())
    return spans and within(index, call["num_cols"])


def within(index: Tensor, size: int) -> bool:
    return bool(((index >= 0) & (index < size)).all())


def valid_call(lib: Library, make: Make, data: st.DataObject) -> None:
    draw = Draw(data)
    call, check = make(lib, draw)
    lib("force_panels", draw.one_of(-1, 1, 40))
    with threads(draw.one_of(1, 2, 4)):
        result = lib(make.__name__, *call.values())
    check(result)


def invalid_call(lib: Library, make: Make, data: st.DataObject) -> None:
    draw, function = Draw(data), make.__name__
    call, _ = make(lib, draw)
    names = {draw.one_of(*call)}
    if function in BUILDERS and draw.flag():
        names.add(draw.one_of(*call))
    for name in sorted(names):
        call[name] = spoiled(draw, function, call, name)
    arguments = list(call.values())
    if draw.number(0, 30) == 0:
        arguments = arguments[: draw.number(0, len(arguments) - 1)]
    with threads(draw.one_of(1, 2, 4)):
        try:
            lib(function, *arguments)
        except REFUSALS:
            return
    # Accepted: then whatever was changed must still describe a graph.
    assert len(arguments) == len(call)
    if function == "check_csr":
        assert is_matrix(call)
    if function in ("build_csr", "build_csr_with_loops"):
        row, col = longs(call["row"]), longs(call["col"])
        kept = row != col if function == "build_csr_with_loops" else slice(None)
        assert within(row[kept], call["num_rows"])
        assert within(col[kept], call["num_cols"])


def repeat(body: Callable[..., None], lib: Library, make: Make, times: int, start: int) -> None:
    """Run a random call many times, the same ones for the same start."""

    # Smaller failing calls would not be worth the time: they are small already.
    @settings(
        max_examples=times,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @seed(start)
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        body(lib, make, data)

    run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path)
    parser.add_argument("journal", type=Path, help="file that holds the call in progress")
    parser.add_argument("--examples", type=int, required=True, help="calls of each kind")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("NUMBER", "OF"))
    options = parser.parse_args()
    exported = re.findall(rb"\0__tvm_ffi_(\w+)\0", options.library.read_bytes())
    left_out = {name.decode() for name in exported} - NOT_CALLED - {make.__name__ for make in CALLS}
    if left_out or not exported:
        raise SystemExit(f"functions that nothing here calls: {sorted(left_out)}")
    lib = Library(options.library, options.journal)
    number, parts = options.part
    for make in CALLS[number::parts]:
        repeat(valid_call, lib, make, options.examples, options.seed)
        repeat(invalid_call, lib, make, 2 * options.examples, options.seed)
    print(f"{lib.num_calls} calls, {lib.num_refused} refused")


if __name__ == "__main__":
    main()
