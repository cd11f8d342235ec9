"""``python -m fastgraph.dist --nproc-per-node P SCRIPT``, or the same behind ``torchrun``."""

from __future__ import annotations

from fastgraph.dist.running.launch import main

if __name__ == "__main__":
    main()
