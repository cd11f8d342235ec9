"""Layers as they were: a message that is traced leaves no trace in the attributes of its layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fastgraph.edge_programs.recorded import Refused


@contextmanager
def unchanged(layer: nn.Module | None) -> Iterator[Callable[[Callable[[object], bool]], Any]]:
    """Restore all attributes of a layer and of its modules at the end.

    Yields:
        A function that gives the attributes that were set to what a predicate accepts, by their
        names. It raises ``Refused`` if anything else changed.
    """
    modules = dict(layer.named_modules()) if layer is not None else {}
    before = {name: dict(module.__dict__) for name, module in modules.items()}
    inside = [
        (f"{name}.{key}", value, value.copy())
        for name, attributes in before.items()
        for key, value in attributes.items()
        if isinstance(value, (dict, list, set))
    ]

    def changes(is_accepted: Callable[[object], bool]) -> dict[str, Any]:
        for name, value, content in inside:
            if not _is_same(value, content):
                raise Refused(f"it changes {name.removeprefix('.')}")
        found = {}
        for name, module in modules.items():
            now, then = module.__dict__, before[name]
            for key in now.keys() | then.keys():
                if key in now and key in then and now[key] is then[key]:
                    continue
                path = f"{name}.{key}".removeprefix(".")
                if key not in now or not is_accepted(now[key]):
                    raise Refused(f"it changes {path}")
                found[path] = now[key]
        return dict(sorted(found.items()))

    try:
        yield changes
    finally:
        for name, module in modules.items():
            module.__dict__.clear()
            module.__dict__.update(before[name])
        for _, value, content in inside:
            if not _is_same(value, content):
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(content)


def _is_same(value: Any, content: Any) -> bool:
    """True if two containers hold the same objects in the same order."""
    if len(value) != len(content):
        return False
    if isinstance(value, dict):
        pairs = zip(value.items(), content.items(), strict=True)
        return all(k is m and v is w for (k, v), (m, w) in pairs)
    if isinstance(value, set):
        return bool(value == content)
    return all(v is w for v, w in zip(value, content, strict=True))
