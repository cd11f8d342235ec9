"""A rank that :func:`fastgraph.dist.ranks.spawning.run_on_ranks` has started."""

from __future__ import annotations

import pickle
import sys
from datetime import timedelta
from pathlib import Path

import torch

import fastgraph.dist
from fastgraph.dgl import fix_import
from fastgraph.dist.ranks import ending
from fastgraph.dist.ranks.world import join


def main(folder: Path, timeout: float, rank: int, world_size: int) -> None:
    """Join the others by a file, do the call, leave its result in a file."""
    torch.set_num_threads(1)
    ending.watched()
    join(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    fastgraph.dist.init()
    fix_import()  # as in the process that has sent models and graphs of DGL
    path, function, arguments = pickle.loads((folder / "call").read_bytes())
    sys.path[:] = path
    try:
        result = function(*arguments)
    except BaseException as error:
        ending.fail(error)
        raise
    (folder / f"result-{rank}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
