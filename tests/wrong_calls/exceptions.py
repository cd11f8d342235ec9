"""Where another ending than upstream's is meant: a page of the documentation says so, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests.wrong_calls.comparing import Difference

_IN_PLACE = "one of the variables needed for gradient computation has been modified by an inplace"


class Meant(NamedTuple):
    """Differences that are meant.

    Attributes:
        reason: in a few words, which are on the page.
        page: in ``docs``.
        covers: whether a difference is one of these.
    """

    reason: str
    page: str
    covers: Callable[[str, Difference], bool]


def _is_uncounted(library: str, found: Difference) -> bool:
    is_edited = found.case.endswith("through .data between the passes")
    return is_edited and found.kind == "computes / computes"


def _names_another_tensor(library: str, found: Difference) -> bool:
    return found.case.endswith("between the passes") and found.text.count(_IN_PLACE) == 2


def _is_wide(library: str, found: Difference) -> bool:
    layers = ("GINEConv", "GENConv, mean, edges")
    argument = "edge_attr" if library == "pyg" else "edge_feat"
    is_edited = found.case == f"{argument}: doubled between the passes"
    return is_edited and found.layer.removesuffix(", pair") in layers


def _is_copied(library: str, found: Difference) -> bool:
    is_edited = found.case == "feat: doubled between the passes"
    is_edited |= found.case == "node_feats: doubled between the passes"
    is_one = found.layer in ("NNConv", "CFConv", "EdgeConv")
    return library == "dgl" and is_edited and is_one and found.kind.endswith("/ computes")


def _is_half(library: str, found: Difference) -> bool:
    return library == "dgl" and found.case.endswith(": float16")


def _is_restricted(library: str, found: Difference) -> bool:
    # As on any graph, what `GroupRevRes` computes has no gradient by `torch.autograd.grad`.
    is_computed = found.kind.endswith(("/ computes", "/ RuntimeError in backward"))
    return found.case.endswith(": CSC alone") and is_computed


def _is_int32(library: str, found: Difference) -> bool:
    return found.case.endswith("int32") and found.kind == "computes / computes"


def _is_not_sorted(library: str, found: Difference) -> bool:
    return found.case.endswith("EdgeIndex, said to be sorted") and found.kind.endswith("/ computes")


def _has_no_ending(library: str, found: Difference) -> bool:
    # Memory that is not its own ends upstream's process, or happens to hold the same twice.
    if found.kind.startswith("died of ") and not found.kind.partition(" / ")[2].startswith("died"):
        return True
    is_read = found.layer.startswith("HEATConv") and found.case == "node_type: negative"
    return is_read or found.kind == "upstream differs from itself"


def _is_of_parallel_normals(library: str, found: Difference) -> bool:
    is_pair = found.case in ("normal: a pair", "normal: a list of two")
    return found.layer.startswith("PPFConv") and is_pair and found.kind == "computes / computes"


def _is_of_a_power(library: str, found: Difference) -> bool:
    is_integer = found.case.startswith("x: int") and found.kind == "computes / computes"
    return found.layer == "PowerMeanAggregation" and is_integer


MEANT = (
    Meant(
        "for which upstream reads memory that is not its own",
        "routed.md",
        _has_no_ending,
    ),
    Meant(
        "edits between the passes that torch does not count, as those through `.data`",
        "routed.md",
        _is_uncounted,
    ),
    Meant(
        "which of the edited tensors the error of a counted edit names",
        "routed.md",
        _names_another_tensor,
    ),
    Meant(
        "features of edges as wide as messages, edited in place between the passes",
        "routed.md",
        _is_wide,
    ),
    Meant(
        "gradients of the angle between normals that are equal",
        "routed.md",
        _is_of_parallel_normals,
    ),
    Meant("the gradient of a learned power of rows that are zeros", "routed.md", _is_of_a_power),
    Meant("an `EdgeIndex` that is said to be sorted and is not", "routed.md", _is_not_sorted),
    Meant("For int32 indices torch's own gradients", "routed.md", _is_int32),
    Meant(
        "`NNConv`, `CFConv` and `EdgeConv` keep a copy of features of nodes", "dgl.md", _is_copied
    ),
    Meant("float16 can be used on the CPU, which DGL refuses", "dgl.md", _is_half),
    Meant("graphs that are restricted to CSC", "dgl.md", _is_restricted),
)


def reason_of(library: str, found: Difference) -> str | None:
    """Why a difference is none that is to be mended; ``None`` where it is."""
    return next((one.reason for one in MEANT if one.covers(library, found)), None)
