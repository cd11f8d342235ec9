"""Wrapping the functions that a profile times, and putting the originals back."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from wrapt import register_post_import_hook

from fastgraph.profiling.profile import GATHERING, SAMPLING, Key, Profile, Span
from fastgraph.upstream import label_of

_PLACES: dict[str, dict[str, str]] = {
    # By module, its methods and what they do.
    "torch.utils.data.dataloader": {"_BaseDataLoaderIter.__next__": SAMPLING},
    "torch_geometric.loader.node_loader": {"NodeLoader.filter_fn": GATHERING},
    "torch_geometric.loader.link_loader": {"LinkLoader.filter_fn": GATHERING},
    "dgl.dataloading.dataloader": {"_PrefetchingIter.__next__": GATHERING},
    "dgl.heterograph": {
        "DGLGraph.update_all": "function",
        "DGLGraph.apply_edges": "function",
    },
}

_MARK = "fastgraph.profile"
"""In the metadata of a node of the graph of gradients: the profile in which a layer returned it."""

_running: list[Profile] = []
_restore: list[tuple[Any, str, Any, Any]] = []
_awaited: set[str] = set()


@contextmanager
def profile() -> Iterator[Profile]:
    """Profile what runs within: by layer and source line, and by sampling, gathering, computing.

    Yields:
        The profile, whose table is complete after the block; ``print(p)`` shows it, and its rows
        are ``p.rows``.

    Raises:
        RuntimeError: another profile is being taken.
    """
    taken = begin()
    try:
        yield taken
    finally:
        end(taken)


def begin() -> Profile:
    """Begin a profile, until :func:`end`.

    Raises:
        RuntimeError: another one is being taken.
    """
    if _running:
        raise RuntimeError("a profile is being taken already: end it before another begins")
    taken = Profile()
    _running.append(taken)
    _replace(nn.Module, "__call__", _layer_call)
    for name in ("backward", "grad"):
        _replace(torch.autograd, name, _backward_call)
    for name in _PLACES:
        if name not in _awaited:
            _awaited.add(name)
            register_post_import_hook(_after_import, name)  # calls at once where it is imported
        else:
            _install_in(name)
    taken.start()
    return taken


def end(taken: Profile) -> None:
    """End a profile and put the wrapped functions back; without effect where it has ended."""
    if taken not in _running:
        return
    taken.stop()
    _running.remove(taken)
    while _restore:
        owner, name, original, ours = _restore.pop()
        if getattr(owner, name) is ours:  # or else another has wrapped it, and keeps ours, idle
            setattr(owner, name, original)


def _after_import(module: ModuleType) -> None:
    if _running:
        _install_in(module.__name__)


def _install_in(module: str) -> None:
    found = sys.modules.get(module)
    for place, kind in _PLACES[module].items():
        owner, name = place.split(".")
        if found is not None and hasattr(found, owner):
            timed = functools.partial(_timed, kind, name)
            _replace(getattr(found, owner), name, timed)


def _replace(owner: Any, name: str, wrap: Callable[[Callable[..., Any], Profile], Any]) -> None:
    original = getattr(owner, name)
    ours = functools.wraps(original)(wrap(original, _running[0]))
    _restore.append((owner, name, original, ours))
    setattr(owner, name, ours)


def _timed(kind: str, name: str, call: Callable[..., Any], taken: Profile) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not taken.is_running:
            return call(*args, **kwargs)
        span = taken.enter(kind, name if kind == "function" else "")
        try:
            return call(*args, **kwargs)
        finally:
            taken.leave(span)

    return timed


def _layer_call(call: Callable[..., Any], taken: Profile) -> Callable[..., Any]:
    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not taken.is_running:
            return call(module, *args, **kwargs)
        span = taken.enter("layer", label_of(type(module)))
        try:
            found = call(module, *args, **kwargs)
            if span.key is not None:
                _follow(taken, span.key, taken.outer(), (args, kwargs), found)
            return found
        finally:
            taken.leave(span)

    return called


def _follow(taken: Profile, key: Key, outer: list[Span], given: Any, found: Any) -> None:
    """Have the backward pass say when it comes to a layer, and when it leaves it.

    A node that one layer returned and the next one takes belongs to the first: the next one is
    left where the first is come to. What comes after a layer within others belongs to them.
    """
    entered = {node for node in map(_node, tree_leaves(found)) if node is not None}
    left = {node for node in map(_node, tree_leaves(given)) if node is not None}
    for node in (n for n in entered - left if not _is_marked(n, taken)):
        node.metadata[_MARK] = taken
        node.register_prehook(lambda _: taken.backward_at(key))
    for node in (n for n in left if not _is_marked(n, taken)):
        node.register_prehook(lambda _: taken.backward_at(_innermost(outer)))


def _is_marked(node: Any, taken: Profile) -> bool:
    return node.metadata.get(_MARK) is taken


def _innermost(spans: list[Span]) -> Key | None:
    """The key of the innermost listed call; that of an outer one may be known after it was made."""
    return next((span.key for span in reversed(spans) if span.key is not None), None)


def _node(value: object) -> Any:
    return value.grad_fn if isinstance(value, Tensor) else None


def _backward_call(call: Callable[..., Any], taken: Profile) -> Callable[..., Any]:
    def passed(*args: Any, **kwargs: Any) -> Any:
        if not taken.is_running:
            return call(*args, **kwargs)
        begun = taken.backward_begins()
        try:
            return call(*args, **kwargs)
        finally:
            taken.backward_ends(begun)

    return passed
