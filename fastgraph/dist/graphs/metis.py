"""METIS in a process of its own: ``python metis.py FOLDER``.

pymetis holds Python's lock while it works, and takes the process with it where the graph is not
what it must be. The folder holds ``starts.npy`` and ``neighbours.npy``, the symmetric graph by
rows, ``weights.npy`` of its nodes and ``targets.npy``, the share of each part; ``parts.npy`` is
written into it. Imports nothing of fastgraph, to start quickly.
"""

from __future__ import annotations

import sys
from array import array
from pathlib import Path

import numpy as np
import pymetis


def main(folder: Path) -> None:
    """Cut the graph in a folder by recursive bisection, which meets targets more exactly."""
    starts, neighbours, weights, targets = (
        np.load(folder / f"{name}.npy") for name in ("starts", "neighbours", "weights", "targets")
    )
    _, parts = pymetis.part_graph(
        len(targets),
        pymetis.CSRAdjacency(starts, neighbours),
        vweights=weights,
        tpwgts=array("f", targets.tolist()),
        recursive=True,
    )
    np.save(folder / "parts.npy", np.asarray(parts, dtype=np.int64))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
