"""``torchrun --nproc-per-node P -m fastgraph.dist SCRIPT``."""

from __future__ import annotations

from fastgraph.dist.launch import main

if __name__ == "__main__":
    main()
