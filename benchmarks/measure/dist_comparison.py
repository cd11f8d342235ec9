"""A comparison of a script's first steps on ranks with those on one process, and its table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from measure.report import machine_lines

TOLERANCE = 1e-12
"""Of the norm of all losses, of each gradient, and of all parameters."""


def compared(
    expected: dict[str, Any], of_ranks: list[dict[str, Any]], same_text: bool
) -> dict[str, Any]:
    """How far the ranks are off.

    Args:
        expected: the record of one process.
        of_ranks: those of the ranks.
        same_text: whether both printed the same.

    Returns:
        Differences of all losses, of the first and of all gradients, and of the parameters after
        the last step, each relative to the norm of what is expected, the worst of all ranks; how
        many values of parameters nobody ever wrote; how many choices of nodes there were, and how
        many of these were other ones, or of another order; the gathers of rank 0; and how many
        bytes all ranks sent.
    """
    pairs = [(expected, found) for found in of_ranks]
    gradients = [
        [_off(a, b) for a, b in zip(e["gradients"], f["gradients"], strict=True)] for e, f in pairs
    ]
    return {
        "steps": len(expected["losses"]),
        "losses": max(_off(_vector(e["losses"]), _vector(f["losses"])) for e, f in pairs),
        "first gradient": max((found[0] for found in gradients if found), default=0.0),
        "gradients": max((max(found) for found in gradients if found), default=0.0),
        "parameters": max(_off(*_written(_joined(e), _joined(f))) for e, f in pairs),
        "never written": int(_joined(expected).isnan().sum()),
        "choices": [
            len(expected["choices"]),
            sum(
                not torch.equal(a, b)
                for a, b in zip(expected["choices"], of_ranks[0]["choices"], strict=True)
            ),
        ],
        "same text": same_text,
        "gathers": of_ranks[0]["gathers"],
        "sent": sum(sum(found["sent"].values()) for found in of_ranks),
        "is sharded": any(any(found["sent"].values()) for found in of_ranks),
    }


def _vector(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _joined(record: dict[str, Any]) -> Tensor:
    parameters = [p.reshape(-1).double() for p in record["parameters"]]
    return torch.cat([torch.empty(0, dtype=torch.float64), *parameters])


def _written(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Values other than those that both left as ``torch.empty`` gave them, marked as NaN."""
    if a.shape != b.shape:
        return a, b
    kept = ~(a.isnan() & b.isnan())
    return a[kept], b[kept]


def _off(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    norm = float(a.norm())
    off = float((a - b).abs().max()) if a.numel() else 0.0
    return off / norm if norm else off


def is_exact(cell: dict[str, Any]) -> bool:
    """True if nothing differs by more than rounding."""
    keys = ("losses", "gradients", "parameters")
    return "error" not in cell and all(cell[key] <= TOLERANCE for key in keys)


def markdown(results: dict[str, Any]) -> str:
    """The table, and how many scripts are exact and gather nothing."""
    ranks = [str(size) for size in results["ranks"]]
    rows = [
        "| script | ranks | losses | first gradient | all gradients | parameters | text "
        "| gathered before, in the first step, in each further one |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- | --- |",
    ]
    exact = without = 0
    for name, cells in results["scripts"].items():
        for size, cell in cells.items():
            if "error" in cell:
                last = cell["error"].strip().splitlines()[-1:] or ["failed"]
                rows.append(f"| `{name}` | {size} | {last[0][:100]} | | | | | |")
                continue
            figures = " | ".join(
                f"{cell[key]:.0e}"
                for key in ("losses", "first gradient", "gradients", "parameters")
            )
            if cell["never written"]:
                figures += f" ({cell['never written']:,} never written)"
            text = "same" if cell["same text"] else "differs"
            rows.append(f"| `{name}` | {size} | {figures} | {text} | {_gathers(cell)} |")
        found = [cells.get(size, {"error": ""}) for size in ranks]
        if all(is_exact(cell) and cell["is sharded"] for cell in found):
            exact += 1
            without += not any(cell["gathers"][1] or cell["gathers"][2] for cell in found)
    head = [
        f"# Unmodified scripts on {', '.join(ranks)} ranks",
        "",
        f"{exact} of {len(results['scripts'])} are exact on all of them: losses, gradients and "
        f"parameters of up to {results['steps']} steps differ by at most {TOLERANCE:g} of their "
        f"norm from those of one process. {without} of these gather nothing in a step and the "
        "evaluation between two.",
        "",
    ]
    command = ["", f"    {results['command']}", ""]
    parts = [*head, *rows, *_on_choices(results), *command, *machine_lines(results["machine"])]
    return "\n".join(parts)


def _on_choices(results: dict[str, Any]) -> list[str]:
    """Lines that explain the rows of scripts that choose nodes."""
    found = []
    for name, cells in results["scripts"].items():
        counts = [
            f"{cell['choices'][1]} ({size})"
            for size, cell in cells.items()
            if "error" not in cell and cell["choices"][0]
        ]
        if counts:
            total = max(cell["choices"][0] for cell in cells.values() if "error" not in cell)
            found.append(
                f"`{name}` chooses nodes by their scores {total} times; choices that are others, "
                f"or have another order, than those of one process: {', '.join(counts)}. "
                "*Rounded otherwise*: one process, each result of message passing one unit in the "
                "last place larger or smaller. *Same choices*: those of one process are imposed."
            )
    return ["", *found] if found else []


def _gathers(cell: dict[str, Any]) -> str:
    if not cell["is sharded"]:
        return "nothing is sharded"
    further = max(cell["steps"] - 1, 1)
    before, first, rest = cell["gathers"]
    texts = [
        ", ".join(f"{name} {times}" for name, times in sorted(before.items())),
        ", ".join(f"{name} {times}" for name, times in sorted(first.items())),
        ", ".join(f"{name} {times / further:.3g}" for name, times in sorted(rest.items())),
    ]
    return "; ".join(text or "-" for text in texts) if any(texts) else "none"
