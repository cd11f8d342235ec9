"""``python -m tests.parity.seeded [--stand-ins] SCRIPT [ARGS]``: the same random numbers each time.

With ``--stand-ins`` random graphs are in place of the data sets of PyG's examples.
"""

from __future__ import annotations

import os
import random
import runpy
import sys
from importlib import import_module

from wrapt import register_post_import_hook

random.seed(0)
register_post_import_hook(lambda torch: torch.manual_seed(0), "torch")
register_post_import_hook(lambda numpy: numpy.random.seed(0), "numpy")
del sys.argv[0]
if sys.argv[0] == "--stand-ins":
    del sys.argv[0]
    import_module("tests.parity.stand_in_data").install()
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
runpy.run_path(sys.argv[0], run_name="__main__")
