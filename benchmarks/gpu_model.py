"""Predict what the CUDA kernels take on GPUs that nobody has run them on.

    FASTGRAPH_DATA=... python benchmarks/gpu_model.py

Needs no GPU: instructions, loads and waits of each kernel's loop come from the table that the build
is compared with (``tests/cuda/registers.json``), idle lanes from the degrees of the graphs, and the
rest from data sheets (``fastgraph/tune/gpus.py``); ``measure/model.py`` puts them together. Where
``benchmarks/results`` holds measurements of ``benchmarks/gpu.py``, predictions are compared with
them. Results go to ``benchmarks/results/<date>-gpu-model.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "cuda" / "registers.json"
WIDTHS = (64, 128, 256, 512)


def main() -> None:
    sys.path.insert(0, str(ROOT))  # where fastgraph is not installed
    from measure.graphs import default_graphs, load
    from measure.model_report import compared, degrees, launches, markdown, predicted
    from measure.model_slots import ORDERS
    from measure.output import RESULTS, write

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--table", type=Path, default=TABLE, help="default: that of the build")
    has_list = (ROOT / "fastgraph" / "csrc" / "cuda" / "tasks.cu").exists()
    order = "tasks" if has_list else "rows"
    add("--order", choices=ORDERS[:2], default=order, help="how warps get rows; default: as now")
    add("--graphs", nargs="+", default=default_graphs(), metavar="GRAPH")
    add("--measured", type=Path, default=RESULTS, help="folder with results of gpu.py")
    add("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args()

    text = options.table.read_bytes()
    table = json.loads(text)
    graphs = {name: degrees(load(name)) for name in options.graphs}
    cells = predicted(table, graphs, options.order, WIDTHS)
    results = {
        "label": "predicted, never measured",
        "command": shlex.join(["python", "benchmarks/gpu_model.py", *sys.argv[1:]]),
        "table": hashlib.sha256(text).hexdigest()[:16],
        "order": options.order,
        "cells": cells,
        "launches": launches(cells),
        "compared": compared(cells, sorted(options.measured.glob("*-gpu*.json"))),
    }
    print(
        f"written to {write(options.out, 'gpu-model', results, markdown(results, graphs, table))}"
    )


if __name__ == "__main__":
    main()
