"""``python -m tests.parity.seeded [OPTIONS] SCRIPT [ARGS]``: the same random numbers each time.

Options come before the script: with ``--stand-ins`` random graphs are in place of the data sets of
PyG's examples, with ``--sampler`` PyG has our sampler, and nothing else of ours unless the runner
brings it, and with ``--epochs=N`` a loop of the script over ``range(1, ...)``, as PyG's examples
count epochs, ends after ``N``.
"""

from __future__ import annotations

import os
import random
import runpy
import sys
from collections.abc import Callable
from importlib import import_module

from wrapt import register_post_import_hook


def at_most(epochs: int) -> Callable[..., range]:
    """``range`` of which counts from 1 end after so many."""

    def few(*bounds: int) -> range:
        counted = range(*bounds)
        return counted[:epochs] if len(bounds) == 2 and bounds[0] == 1 else counted

    return few


def main(words: list[str]) -> None:
    """Run a script as if it had been called by its name."""
    random.seed(0)
    register_post_import_hook(lambda torch: torch.manual_seed(0), "torch")
    register_post_import_hook(lambda numpy: numpy.random.seed(0), "numpy")
    names = {}
    while words[0].startswith("--"):
        option, _, value = words.pop(0).partition("=")
        if option == "--stand-ins":
            import_module("tests.parity.stand_in_data").install()
        elif option == "--sampler":
            import_module("fastgraph.pyg").fix_sampling()
        elif option == "--epochs":
            names["range"] = at_most(int(value))
        else:
            raise ValueError(f"options must be those of the module, got {option}")
    sys.argv[:] = words
    sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
    runpy.run_path(words[0], names, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
