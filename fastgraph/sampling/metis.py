"""METIS in a process of its own: ``python metis.py FOLDER MANNER``.

pymetis holds Python's lock while it works, and takes the process with it where the graph is not
what it must be. Each folder in the folder holds ``starts.npy`` and ``neighbours.npy``, the
symmetric graph by rows, and ``targets.npy``, the share of each part; ``weights.npy`` of its nodes
may be there. ``parts.npy`` is written into it. The manner is ``recursive``, by bisection, which
meets targets more exactly, or ``kway``. Imports nothing of fastgraph, to start quickly.
"""

from __future__ import annotations

import sys
from array import array
from pathlib import Path

import numpy as np
import pymetis


def cut(folder: Path, manner: str) -> None:
    """Cut the graph in a folder."""
    starts, neighbours, targets = (
        np.load(folder / f"{name}.npy") for name in ("starts", "neighbours", "targets")
    )
    weights = folder / "weights.npy"
    _, parts = pymetis.part_graph(
        len(targets),
        pymetis.CSRAdjacency(starts, neighbours),
        vweights=np.load(weights) if weights.exists() else None,
        tpwgts=array("f", targets.tolist()),
        recursive=manner == "recursive",
    )
    np.save(folder / "parts.npy", np.asarray(parts, dtype=np.int64))


if __name__ == "__main__":
    for found in sorted(Path(sys.argv[1]).iterdir()):
        cut(found, sys.argv[2])
