"""``python -m fastgraph.dist SCRIPT``: a rank of an unmodified script, or what starts the ranks."""

from __future__ import annotations

import argparse
import atexit
import faulthandler
import functools
import importlib
import io
import os
import random
import runpy
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeGuard

import torch

from fastgraph import enabling
from fastgraph.dist.balance.automatic import Automatic
from fastgraph.dist.balance.first_epochs import FirstEpochs
from fastgraph.dist.graphs import dgl, pyg_functions
from fastgraph.dist.graphs.partition import METHODS
from fastgraph.dist.graphs.protocols import AnyGraph, PygGraph
from fastgraph.dist.graphs.pyg import shard_as_known
from fastgraph.dist.operators.modes import MODES, current_name
from fastgraph.dist.ranks import transport, world
from fastgraph.dist.ranks.agreement import check_alike, first_rank_first
from fastgraph.dist.ranks.board import BOARD
from fastgraph.dist.ranks.counts import COUNTS
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.running import hashing
from fastgraph.dist.running.script_files import ScriptFiles
from fastgraph.dist.tensor.digests import DIGESTS
from fastgraph.dist.tensor.hooks import PATCHES
from fastgraph.interpreter import FIRST_ENTRY

if TYPE_CHECKING:
    from torch_geometric.data import Data, Dataset

# With a store that restarted ranks share with those before, most restarts with gloo fail.
STORE_OF_ITS_OWN = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"

_CLOCK = 0.02
"""Seconds by which times of files may be behind the clock."""


def starter() -> argparse.ArgumentParser:
    """The options of the process that starts the ranks."""
    made = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    made.add_argument(
        "--nproc-per-node",
        type=_above(0),
        metavar="P",
        help="start so many ranks by torchrun; without it, be one that torchrun has started, or "
        "the only one",
    )
    made.add_argument(
        "--max-restarts",
        type=_above(-1),
        metavar="N",
        help="with --nproc-per-node: how often all ranks are started again after one has died; "
        "default: 0",
    )
    return made


def _above(bound: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value <= bound:
            raise argparse.ArgumentTypeError(f"must be an integer above {bound}, got {text}")
        return value

    return number


def _weights(text: str) -> list[float] | str | None:
    if text == "uniform":
        return None
    if text == "auto":
        return text
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected auto, uniform or numbers such as 2,1, got {text!r}"
        ) from None


def _mesh(text: str) -> tuple[int, int]:
    try:
        height, width = map(int, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected rows and columns of a grid such as 2x4, got {text!r}"
        ) from None
    return height, width


def parser() -> argparse.ArgumentParser:
    """The options before the script."""
    made = argparse.ArgumentParser(
        prog="python -m fastgraph.dist",
        description="Run a training script of PyG or DGL on several processes, as if it were on "
        "one.",
        parents=[starter()],
        allow_abbrev=False,
    )
    made.add_argument("--partition", choices=METHODS, default="metis", help="default: metis")
    made.add_argument(
        "--mode",
        type=current_name,
        choices=MODES,
        default="auto",
        help="how fused operators are computed, see fastgraph.dist.shard; default: auto",
    )
    made.add_argument(
        "--mesh",
        type=_mesh,
        metavar="RxC",
        help="with --mode grid: its rows and columns; default: the most square one of all ranks",
    )
    made.add_argument(
        "--weights",
        type=_weights,
        help="share of the work of each rank, such as 2,1; uniform: equal shares, the default; "
        "auto: by the devices, measured in the first epochs and, with PyG, corrected once",
    )
    made.add_argument(
        "--random", choices=world.RANDOM_MODES, default="rows", help="see fastgraph.dist.init"
    )
    made.add_argument("--check", action="store_true", help="compare all collectives of the ranks")
    made.add_argument(
        "--timeout",
        type=_above(0),
        default=int(world.DEFAULT_TIMEOUT.total_seconds()),
        metavar="SECONDS",
        help="for a collective, after which ranks that wait end with its name and the line of the "
        "script that asked for it; default: %(default)s",
    )
    made.add_argument(
        "--rank-logs",
        type=Path,
        metavar="DIR",
        help="keep what ranks other than the first print and write, in DIR/rank-R; default: no",
    )
    made.add_argument(
        "--min-nodes",
        type=int,
        default=1000,
        help="graphs with fewer nodes stay whole on every rank; default: 1000",
    )
    made.add_argument("script", type=Path)
    made.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    return made


def main(words: Sequence[str] | None = None) -> None:
    """Join the other ranks, and run the script; or start the ranks."""
    words = sys.argv[1:] if words is None else list(words)
    options = parser().parse_args(words)
    if not options.script.is_file():
        parser().error(f"no such file: {options.script}")
    if options.nproc_per_node is not None:
        return start(options, words)
    if options.max_restarts is not None:
        parser().error("--max-restarts needs --nproc-per-node")
    hashing.start_again_with_common_hashes()
    _say_how_to_restart()
    faulthandler.enable()  # gloo ends the process where ranks have sent each other other sizes
    timeout = timedelta(seconds=options.timeout)
    world.init(timeout=timeout, random=options.random, check=options.check)
    hashing.check_common_hashes()
    DIGESTS.watch_script()
    seed, shard = _seed(), _sharding(options)
    shard_datasets(shard, options.min_nodes)
    dgl.shard_graphs(shard, options.min_nodes, seed)
    let_one_rank_write()
    enabling.enable()
    started = time.time() - _CLOCK
    check_alike()  # no rank goes on before all are here
    sys.argv = [str(options.script), *options.arguments]
    FIRST_ENTRY.replace(str(options.script.resolve().parent))
    if WORLD.rank != 0:
        _keep_apart(options.rank_logs, started)
    atexit.register(_say_gathers)
    _run(options.script)


def _run(script: Path) -> None:
    """Run the script; ranks whose scripts have ended compare what they have done."""
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code:
            BOARD.end()  # threads of the script may last, and others wait meanwhile
        else:
            DIGESTS.end_of_script()
        raise
    DIGESTS.end_of_script()


def _keep_apart(logs: Path | None, started: float) -> None:
    """Have this rank print and write into a folder of its own, by default a temporary one."""
    if logs is None:
        folder = Path(tempfile.mkdtemp())
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        output = Path(os.devnull)
    else:
        folder = logs.resolve() / f"rank-{WORLD.rank}"
        folder.mkdir(parents=True, exist_ok=True)
        output = folder / "output.txt"
    sys.stdout = output.open("w", buffering=1)  # for as long as the process lives
    ScriptFiles(folder / "files", started).install(PATCHES)


def _sharding(options: argparse.Namespace) -> Callable[[AnyGraph], AnyGraph]:
    """How graphs are sharded."""
    automatic, actions = None, []
    if options.weights == "auto":
        program = f"{options.script.read_text()} {options.arguments}"
        automatic = Automatic(program, options.partition)
        actions.append(automatic.correct)
    first_epochs = FirstEpochs(actions)

    def shard(data: AnyGraph) -> AnyGraph:
        weights = options.weights if automatic is None else automatic.shares(data)
        found: AnyGraph = shard_as_known(
            data,
            weights=weights,
            method=options.partition,
            mode=options.mode,
            mesh=options.mesh,
        )
        first_epochs.watch(found)
        return found

    return shard


def start(options: argparse.Namespace, words: Sequence[str]) -> None:
    """Start the ranks by ``torchrun``, which starts all of them again when one dies."""
    if "RANK" in os.environ:
        parser().error("--nproc-per-node is for the process that starts the ranks; this is a rank")
    from torch.distributed.run import main as torchrun

    before = words[: len(words) - len(options.arguments) - 1]
    _, of_ranks = starter().parse_known_args(before)
    os.environ[STORE_OF_ITS_OWN] = "1"
    hashing.for_ranks()
    torchrun(
        [
            "--standalone",
            f"--nproc-per-node={options.nproc_per_node}",
            f"--max-restarts={options.max_restarts or 0}",
            *("-m", "fastgraph.dist", *of_ranks),
            *(str(options.script), *options.arguments),
        ]
    )


def _say_how_to_restart() -> None:
    """``torchrun`` itself can only be told before it starts."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    if restarts and os.environ.get("RANK") == "0" and os.environ.get(STORE_OF_ITS_OWN) != "1":
        print(
            f"fastgraph.dist: restarts may fail: set {STORE_OF_ITS_OWN}=1 before torchrun, or let "
            "`python -m fastgraph.dist --nproc-per-node P --max-restarts N` start it",
            file=sys.stderr,
        )


def _seed() -> int:
    """Programs without a seed get one; all ranks must draw the same numbers."""
    seed: int = transport.broadcast(random.SystemRandom().randrange(2**31))
    torch.manual_seed(seed)
    random.seed(seed)
    importlib.import_module("numpy").random.seed(seed)
    return seed


def _say_gathers() -> None:
    if WORLD.rank == 0 and COUNTS.gathers:
        names = ", ".join(f"{name} ({times})" for name, times in COUNTS.gathers.most_common())
        print(f"fastgraph.dist gathered whole tensors for: {names}", file=sys.stderr)


def shard_datasets(shard: Callable[[AnyGraph], AnyGraph], min_nodes: int) -> None:
    """Have graphs sharded where programs get them.

    These are the single graph of a dataset, and a ``Data`` that the program itself makes. Datasets
    of several graphs stay whole on every rank.
    """
    from torch_geometric.data import Data, Dataset, HeteroData

    pyg_functions.install()  # before the script imports some of them by name
    get = Dataset.__getitem__

    def fits(data: object) -> TypeGuard[PygGraph]:
        if WORLD.is_alone or not isinstance(data, (Data, HeteroData)) or "batch" in data:
            return False
        large = (data.num_nodes or 0) >= min_nodes and bool(data.num_edges)
        return large and _is_plain(data)

    def sharded(value: object) -> object:
        if isinstance(value, tuple):
            return tuple(map(sharded, value))
        return shard(value) if fits(value) else value

    @functools.wraps(get)
    def getitem(self: Dataset, index: object) -> object:
        value = get(self, index)
        return sharded(value) if len(self) == 1 and not isinstance(value, Dataset) else value

    PATCHES.replace(Dataset, "__getitem__", getitem)
    for name in ("_download", "_process"):
        PATCHES.replace(Dataset, name, _by_one_rank(getattr(Dataset, name)))
    PATCHES.replace(
        Data,
        "__init__",
        _sharding_own(Data.__init__, lambda data: shard(data) if fits(data) else data),
    )


def _by_one_rank(upstream: Callable[[Dataset], None]) -> Callable[[Dataset], None]:
    """A step that makes the files of a dataset: rank 0 takes it, and the others find its files."""

    @functools.wraps(upstream)
    def step(self: Dataset) -> None:
        if WORLD.is_alone:  # a dataset that is made of another one
            return upstream(self)

        def action() -> None:
            reload = self.force_reload
            self.force_reload = reload and WORLD.rank == 0
            try:
                upstream(self)
            finally:
                self.force_reload = reload

        first_rank_first(action)

    return step


def _sharding_own(
    upstream: Callable[..., None], sharded: Callable[[Data], Data]
) -> Callable[..., None]:
    """``Data.__init__``, after which a graph that the program makes itself is sharded."""

    @functools.wraps(upstream)
    def init(self: Data, *args: object, **kwargs: object) -> None:
        upstream(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        if caller not in ("torch_geometric", "copy", "fastgraph", "torch"):
            found = sharded(self)
            if found is not self:
                for key, value in found.to_dict().items():
                    self[key] = value

    return init


def _is_plain(data: PygGraph) -> bool:
    """True if no tensor of a graph is sharded already, as of one that the program itself made."""
    values = (value for store in data.stores for value in store.values())
    return all(type(value) is torch.Tensor for value in values if isinstance(value, torch.Tensor))


def let_one_rank_write() -> None:
    """``torch.save``: all ranks take part in gathering, and the first one writes."""
    save: Callable[..., None] = torch.save

    @functools.wraps(save)
    def save_once(
        obj: object, f: str | os.PathLike[str] | IO[bytes], *args: object, **kwargs: object
    ) -> None:
        if WORLD.is_alone:
            return save(obj, f, *args, **kwargs)
        is_file = isinstance(f, (str, os.PathLike))
        save(obj, io.BytesIO() if is_file and WORLD.rank != 0 else f, *args, **kwargs)
        if is_file:
            transport.barrier()

    PATCHES.replace(torch, "save", save_once)
