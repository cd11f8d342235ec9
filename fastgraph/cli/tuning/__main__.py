"""The process that runs a script: ``python -m fastgraph.cli.tuning FILE SCRIPT [ARGS]...``."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from fastgraph.cli.tuning.recording import record

if __name__ == "__main__":
    file, script, *arguments = sys.argv[1:]
    program = record(Path(script), arguments)
    Path(file).write_bytes(pickle.dumps(program))
