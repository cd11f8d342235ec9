"""``python -m fastgraph``: run a program with fastgraph enabled, or describe the installation."""

from __future__ import annotations

from fastgraph.cli.main import main

if __name__ == "__main__":
    main()
