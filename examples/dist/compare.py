"""Trains an unmodified script on one process and on several, and shows both losses.

::

    python examples/dist/compare.py --ranks 2 examples/gat.py --dataset Planetoid:Cora --root data
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys

from rich.console import Console
from rich.table import Table

_LOSS = re.compile(r"Loss: (\S+?),")


def losses(command: list[str]) -> list[float]:
    """The losses that a script prints.

    Raises:
        SystemExit: it failed, or prints none.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    found = [float(text) for text in _LOSS.findall(done.stdout)]
    if done.returncode != 0 or not found:
        sys.exit(f"{' '.join(command)} ended with {done.returncode} and printed no loss")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    given = parser.parse_args()
    script = [given.script, *given.arguments]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={given.ranks}"]
    one = losses(script)
    several = losses([*torchrun, "-m", "fastgraph.dist", "--random", "exact", *script])
    if len(one) != len(several):
        sys.exit(f"one process printed {len(one)} losses, {given.ranks} ranks {len(several)}")
    table = Table("epoch", "one process", f"{given.ranks} ranks", title=f"Losses of {given.script}")
    for epoch, (a, b) in enumerate(zip(one, several, strict=True), 1):
        table.add_row(str(epoch), f"{a:.6f}", f"{b:.6f}")
    console = Console()
    console.print(table)
    worst = max(abs(a - b) / abs(a) for a, b in zip(one, several, strict=True))
    console.print(f"They differ by {worst:.1e} of the loss at most (float32).")


if __name__ == "__main__":
    main()
