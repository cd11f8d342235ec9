"""``python -m tests.parity.seeded SCRIPT [ARGS]``: with the same random numbers each time."""

from __future__ import annotations

import os
import random
import runpy
import sys

from wrapt import register_post_import_hook

random.seed(0)
register_post_import_hook(lambda torch: torch.manual_seed(0), "torch")
register_post_import_hook(lambda numpy: numpy.random.seed(0), "numpy")
del sys.argv[0]
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
runpy.run_path(sys.argv[0], run_name="__main__")
