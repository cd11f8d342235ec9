"""``python -m fastgraph context``: context features for LargeGT's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


def write_features(
    graph: Path, features: Path, out: Path, hops: int, dtype: str, memory: str, resume: bool
) -> int:
    """Write context features into a folder.

    Args:
        graph: as for ``python -m fastgraph tokens``.
        features: an ``.npy`` file ``[nodes, channels]``, which is mapped.
        out: the folder.
        hops: how often they are aggregated.
        dtype: in which they are computed and kept.
        memory: how much may be allocated.
        resume: whether what is in the folder is finished.

    Returns:
        The exit status.

    Raises:
        click.ClickException: a file or an option is not what it must be.
    """
    from fastgraph.cli.tokens import progress_bar, read_lists
    from fastgraph.tokens import write_context
    from fastgraph.tokens.hop_features import DTYPES

    try:
        lists, given = read_lists(graph), _mapped(features)
        with progress_bar(quiet=False) as progress:
            bar = progress.add_task("rows, by part and panel", total=None)
            found = write_context(
                *(lists, given, out),
                hops=hops,
                dtype=DTYPES[dtype],
                memory=memory,
                resume=resume,
                progress=lambda done, total: progress.update(bar, completed=done, total=total),
            )
    except (ValueError, TypeError, IndexError, OSError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(
        f"{out}: {found.num_nodes:,} rows of {found.hops + 1} x {found.channels} in {dtype}, "
        f"{found.nbytes / 2**30:.2f} GiB; {found.num_nan:,} NaN"
    )
    return 0


def _mapped(file: Path) -> Any:
    import numpy as np

    try:
        return np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{file}: expected a whole .npy file: {error}") from error
