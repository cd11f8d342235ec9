"""Checkpoints: what a training goes on from, on any number of ranks.

A checkpoint is a folder with the tensors in files of safetensors, and everything else in the
manifest.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fastgraph import manifest
from fastgraph.dist.files.nesting import NamedTensors, Spec, Value, decoded, encoded
from fastgraph.dist.ranks.agreement import on_all_ranks, on_first_rank
from fastgraph.dist.ranks.own_device import random_state, set_random_state
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor import hooks
from fastgraph.dist.tensor.layout import Layout, usual
from fastgraph.dist.tensor.sharded import ShardedTensor, leaves
from fastgraph.manifest import FileFormatError, Format, Json, Manifest, Seal, check_safetensors

FORMAT = Format("checkpoint of fastgraph.dist", 1)

_UNFINISHED = ".unfinished"


class _Parameters(OrderedDict[str, Tensor]):
    """A ``state_dict()`` of a module, of which torch keeps the versions of modules beside."""

    _metadata: OrderedDict[str, Mapping[str, int]]


class _State(NamedTuple):
    """The content of a checkpoint, of tensors or in their place of what says where they are.

    Attributes:
        model: its ``state_dict()``.
        versions: of its modules.
        optimizer: its ``state_dict()``, if one is kept.
        random: the states of generators of random numbers, by library.
        extra: of the program.
    """

    model: Mapping[str, Value]
    versions: Mapping[str, Mapping[str, int]] | None
    optimizer: Mapping[str, Value] | None
    random: Mapping[str, Value]
    extra: Value


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; the previous one is as it was."""


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: object = None,
    keep: int = 1,
) -> Path:
    """Keep the state of a training in files, from which :func:`load` goes on.

    All ranks must call it. What is kept are parameters and buffers, the state of the optimizer, and
    the random states of torch (on the CPU, and on the device of the ranks), ``random`` and numpy.
    A checkpoint is a numbered folder in ``path``: it is written under another name, flushed to
    permanent storage, and renamed, and older ones are removed after that. So whatever happens
    meanwhile, a complete one is there.

    Args:
        path: a folder for the checkpoints of one training, made if it is not there.
        model: its ``state_dict()`` is kept.
        optimizer: its ``state_dict()`` is kept, too.
        extra: anything else, such as the number of the epoch or the ``state_dict()`` of a
            scheduler: numbers, texts, booleans, ``None`` and tensors in lists, tuples and
            dictionaries.
        keep: how many checkpoints are left, the newest ones.

    Returns:
        The folder of this checkpoint.

    Raises:
        RuntimeError: there are several ranks, but :func:`fastgraph.dist.init` was not called.
        TypeError: an argument holds what cannot be kept in a file of data.
        ValueError: ``keep`` is not above 0.
        ModuleNotFoundError: ``safetensors`` is not installed.
        CheckpointError: a file could not be written.
    """
    from fastgraph.dist.files import storage  # takes half a second

    if keep < 1:
        raise ValueError(f"keep must be an integer above 0, got {keep}")
    _check(model, optimizer)
    kept = NamedTensors()
    state = model.state_dict()
    parts = _State(
        model=state,
        versions=getattr(state, "_metadata", None),
        optimizer=optimizer.state_dict() if optimizer else None,
        random=_random_states(),
        extra=extra,
    )
    content = {name: encoded(part, name, kept) for name, part in parts._asdict().items()}
    folder = Path(path)
    unfinished = None
    try:
        unfinished = on_first_rank(lambda: _begin(folder))
        storage.write(kept.tensors, unfinished)
        files: dict[str, Seal] = {}
        for sealed in on_all_ranks(lambda: _sealed(unfinished)):
            files |= sealed
        complete = on_first_rank(lambda: _finish(unfinished, content, files))
    except OSError as error:
        if unfinished is not None and WORLD.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(
            f"{folder}: no checkpoint was written, those before are as they were: {error}"
        ) from error
    on_first_rank(lambda: _remove(_numbered(folder), keep))
    return complete


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    missing_ok: bool = False,
) -> Value:
    """Go on from the newest checkpoint of a folder.

    All ranks must call it; there may be more or fewer than those that have saved. Parameters and
    the state of the optimizer are sharded as the parameters of the model are now. Files are read as
    data, whose sizes and checksums are compared before anything is changed.

    Args:
        path: what was given to :func:`save`.
        model: made as the one that was saved.
        optimizer: likewise; ``None`` leaves what was saved of it.
        missing_ok: give ``None`` where there is no checkpoint.

    Returns:
        The ``extra`` of :func:`save`.

    Raises:
        RuntimeError: there are several ranks, but :func:`fastgraph.dist.init` was not called; or
            the model has other parameters.
        ModuleNotFoundError: ``safetensors`` is not installed.
        FileNotFoundError: there is no checkpoint.
        FileFormatError: a file is cut off, corrupt, foreign or of a newer version.
        ValueError: no optimizer was saved, or one with other groups of parameters.
    """
    from fastgraph.dist.files import storage

    _check(model, optimizer)
    found = on_first_rank(lambda: _newest(Path(path)))
    if found is None:
        if missing_ok:
            return None
        raise FileNotFoundError(f"{path}: expected a folder with checkpoints, found none")
    names = sorted(found.files)
    on_all_ranks(lambda: manifest.verify(found, names[WORLD.rank :: WORLD.size]))
    specs = _decoded(found, lambda spec: spec)
    if optimizer is not None:
        if specs.optimizer is None:
            raise ValueError(f"optimizer must be None, as {found.folder} has the state of none")
        _check_groups(optimizer, specs.optimizer)
    wanted = [spec for spec in leaves(specs) if isinstance(spec, Spec)]
    tensors = storage.read(wanted, _layouts(specs, model, optimizer), found.folder)
    state = _decoded(found, lambda spec: tensors[spec.name])
    parameters = _Parameters(state.model)
    if state.versions is not None:
        parameters._metadata = OrderedDict(state.versions)
    model.load_state_dict(parameters)
    if optimizer is not None and state.optimizer is not None:
        optimizer.load_state_dict(dict(state.optimizer))
    _set_random_states(state.random)
    return state.extra


def _check(model: object, optimizer: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer or None, got {type(optimizer).__name__}"
        )
    check_safetensors("checkpoints")
    size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    if not WORLD.is_ready and size > 1:
        raise RuntimeError("call fastgraph.dist.init() before keeping or loading a checkpoint")


def _check_groups(optimizer: Optimizer, saved: Mapping[str, Value]) -> None:
    """The optimizer has the groups of the one that was saved, which torch would check too late.

    Raises:
        ValueError: it has other groups of parameters.
    """
    groups = [len(group["params"]) for group in optimizer.param_groups]
    of_saved = [len(group["params"]) for group in saved["param_groups"]]
    if groups != of_saved:
        raise ValueError(
            f"optimizer must have groups of {of_saved} parameters, as the one that was saved, "
            f"got {groups}"
        )


def _numbered(folder: Path, suffix: str = "") -> list[Path]:
    """The folders in a folder that are named as checkpoints are, the newest first."""
    names = re.compile(rf"(\d{{6,}}){re.escape(suffix)}")
    found = [(names.fullmatch(child.name), child) for child in folder.iterdir() if child.is_dir()]
    numbers = [(int(match[1]), child) for match, child in found if match]
    return [child for _, child in sorted(numbers, reverse=True)]


def _begin(folder: Path) -> Path:
    """A new folder for the next checkpoint, under the name of an unfinished one."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in _numbered(folder, _UNFINISHED):
        shutil.rmtree(left)
    before = _numbered(folder)
    number = int(before[0].name) + 1 if before else 1
    unfinished = folder / f"{number:06}{_UNFINISHED}"
    unfinished.mkdir()
    return unfinished


def _sealed(folder: Path) -> dict[str, Seal]:
    """The checksums of this rank's share of the files."""
    files = sorted(folder.iterdir())[WORLD.rank :: WORLD.size]
    return {file.name: manifest.seal(file) for file in files}


def _finish(unfinished: Path, content: dict[str, Json], files: dict[str, Seal]) -> Path:
    manifest.write(unfinished, FORMAT, content, files)
    complete = unfinished.with_suffix("")
    unfinished.rename(complete)
    manifest.sync_folder(complete.parent)
    return complete


def _remove(folders: Sequence[Path], keep: int) -> None:
    """Remove all checkpoints but the first ones, and nothing else."""
    for folder in folders[keep:]:
        try:
            manifest.read(folder, FORMAT)
        except FileFormatError:
            continue  # of something else, whose name is a number, too
        # Renamed before, lest there be one that looks complete and lacks files.
        shutil.rmtree(folder.rename(folder.with_suffix(_UNFINISHED)))


def _newest(path: Path) -> Manifest | None:
    """The newest checkpoint of a folder, or the one that is the folder."""
    if path.exists() and not path.is_dir():
        raise FileFormatError(f"{path}: expected a folder with checkpoints, got a file")
    folder = path
    if not (path / manifest.NAME).exists():
        # An empty folder is something else's: checkpoints are complete before they get their names.
        numbered = [
            child for child in (_numbered(path) if path.exists() else []) if any(child.iterdir())
        ]
        if not numbered:
            return None
        folder = numbered[0]
    found = manifest.read(folder, FORMAT)
    others = {file.name for file in folder.iterdir()} - {manifest.NAME, *found.files}
    if others:
        raise FileFormatError(f"{folder}: expected the files {sorted(found.files)}, got {others}")
    return found


def _random_states() -> dict[str, object]:
    states = {"torch": torch.get_rng_state(), "python": random.getstate()}
    of_device = random_state(WORLD.device)
    if of_device is not None:
        states[WORLD.device.type] = of_device
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, words, *rest = numpy.random.get_state()
        states["numpy"] = (name, torch.from_numpy(words.astype("int64")), *rest)
    return states


def _set_random_states(states: Mapping[str, Value]) -> None:
    torch.set_rng_state(states["torch"])
    if WORLD.device.type in states:  # of ranks that had devices of this kind
        set_random_state(WORLD.device, states[WORLD.device.type])
    random.setstate(states["python"])
    if "numpy" in states and "numpy" in sys.modules:
        name, words, *rest = states["numpy"]
        sys.modules["numpy"].random.set_state((name, words.numpy().astype("uint32"), *rest))


def _decoded(found: Manifest, tensor: Callable[[Spec], object]) -> _State:
    try:
        return _State(**{key: decoded(value, tensor) for key, value in found.content.items()})
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        file = found.folder / manifest.NAME
        raise FileFormatError(f"{file}: expected the content of a checkpoint: {error!r}") from error


def _layouts(
    specs: _State, model: nn.Module, optimizer: Optimizer | None
) -> dict[str, tuple[Layout, int]]:
    """How to shard what is read, by name: as the parameters of the model are now."""
    found: dict[str, tuple[Layout, int]] = {}

    def like(spec: object, x: Tensor) -> None:
        if isinstance(spec, Spec) and isinstance(x, ShardedTensor) and spec.shape == x.shape:
            found[spec.name] = x.rows, x.axis

    for key, current in model.state_dict().items():
        like(specs.model.get(key), current)
    if optimizer is not None and specs.optimizer is not None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            for spec in leaves(specs.optimizer["state"].get(index, {})):
                like(spec, parameter)
    for spec in leaves(specs.extra):
        if isinstance(spec, Spec) and spec.axis is not None and WORLD.is_ready:
            hooks.install()
            found[spec.name] = usual(spec.shape[spec.axis]), spec.axis
    return found
