"""``python -m tests.wrong_calls [--library dgl] [--layers NAME ...]``: a table of differences."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
import warnings
from collections import Counter

_WIDTH = 240


def main(words: list[str] | None = None) -> int:
    """Compare all calls; returns 1 if some end differently for no reason that is known."""
    parser = argparse.ArgumentParser(prog="python -m tests.wrong_calls", description=__doc__)
    parser.add_argument("--library", choices=["pyg", "dgl"], default="pyg")
    parser.add_argument("--layers", nargs="*", help="names of configurations; default: all")
    parser.add_argument("--cases", help="calls whose names contain this; default: all")
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="of processor time for a call (5)"
    )
    parser.add_argument("--all", action="store_true", help="those with a known reason, too")
    options = parser.parse_args(words)
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    warnings.simplefilter("ignore")
    from tests.wrong_calls.comparing import Difference, compared
    from tests.wrong_calls.exceptions import reason_of
    from tests.wrong_calls.forking import warm_up

    layers = importlib.import_module(f"tests.wrong_calls.{options.library}")
    warm_up()
    unknown = set(options.layers or ()) - set(layers.NAMES)
    if unknown:
        parser.error(f"--layers: names of {layers.__name__}.NAMES; got {sorted(unknown)}")
    kinds: Counter[str] = Counter()
    known: Counter[str] = Counter()
    number, began = 0, time.monotonic()

    def is_meant(found: Difference) -> bool:
        return reason_of(options.library, found) is not None

    for name in layers.NAMES if options.layers is None else options.layers:
        try:
            module, cases = layers.layer_and_cases(name)
        except ImportError as error:
            print(f"{name}: {error}", flush=True)
            continue
        cases = [case for case in cases if options.cases is None or options.cases in case.name]
        number += len(cases)
        for found in compared(name, module, cases, options.seconds, is_meant):
            reason = reason_of(options.library, found)
            if reason is not None:
                known[reason] += 1
            else:
                kinds[found.kind] += 1
            if reason is None or options.all:
                print(f"{name} | {found.case} | {found.kind}")
                for text in found.text.split("\n    ours "):
                    print(f"    {text.partition(chr(10))[0][:_WIDTH]}")
                print(*([f"    known: {reason}\n"] if reason else []), end="", flush=True)
        print(f"-- {name}: {len(cases)} calls, {time.monotonic() - began:.0f} s", file=sys.stderr)
    for title, counts in (("differences", kinds), ("known", known)):
        print(f"\n{title}: {counts.total()} of {number} calls")
        for what, count in counts.most_common():
            print(f"{count:6} {what}")
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main())
