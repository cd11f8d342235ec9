"""Wrappers that take the parameters of the functions in whose place they are.

A wrapper with ``*args`` and ``**kwargs`` packs the arguments of every call into a tuple and a
dictionary, to unpack them at once. A layer goes through up to five wrappers, and on a tiny graph it
takes 30 us in all, so that this would show. So their code is made for the parameters.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

Left = Callable[..., list[Any] | bool | None]
"""A function of some arguments of a call that leaves it to upstream, or does not.

To leave it, it appends what is called to the calls under way and returns these
(:data:`fastgraph.routing.status.THREAD`); else it returns ``None``. Of what is called as a part of
others only it returns true or false. It is asked before all else, in code that is compiled, too.
"""

_SOURCE_OF_PART = """
def bind(_upstream, _left, _route):
    def wrapper({parameters}):
        if _left({asked}):
            return _upstream({arguments})
        return _route({arguments})
    return wrapper
"""

_SOURCE = """
def bind(_upstream, _left, _route):
    def wrapper({parameters}):
        _under_way = _left({asked})
        if _under_way is None:
            return _route({arguments})
        try:
            return _upstream({arguments})
        finally:
            _under_way.pop()
    return wrapper
"""

_RESERVED = frozenset(("_upstream", "_left", "_route", "_under_way"))

_Kind = inspect.Parameter


def wrapped(
    upstream: Callable[..., Any],
    left: Left,
    asked: tuple[str, ...],
    route: Callable[..., Any],
    *,
    is_part: bool = False,
    shorter: Callable[..., Any] | None = None,
) -> Callable[..., Any] | None:
    """A function with the parameters of ``upstream`` that calls it or ``route``.

    Args:
        upstream: the function in whose place it will be.
        left: whether a call is left to ``upstream``.
        asked: the parameters of ``upstream`` whose arguments ``left`` takes, by position.
        route: computes the other calls. It takes all arguments as ``upstream`` would, defaults
            included, by position but for those that have to be named.
        is_part: whether ``left`` says true for a part of a call that was left to upstream.
        shorter: computes what is left as ``upstream`` does, in less time; default: ``upstream``.

    Returns:
        ``None`` where ``upstream`` takes any number of arguments, or none of these names.
    """
    parameters = inspect.signature(upstream, follow_wrapped=False).parameters
    kinds = [p.kind for p in parameters.values()]
    names = parameters.keys()
    if _Kind.VAR_POSITIONAL in kinds or _Kind.VAR_KEYWORD in kinds:
        return None
    if not names >= set(asked) or not names.isdisjoint(_RESERVED):
        return None
    declared, passed = [], []
    for position, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        is_named = kind is _Kind.KEYWORD_ONLY
        if is_named and _Kind.KEYWORD_ONLY not in kinds[:position]:
            declared.append("*")
        declared.append(name)
        passed.append(f"{name}={name}" if is_named else name)
        if kind is _Kind.POSITIONAL_ONLY and kinds[position + 1 :][:1] != [kind]:
            declared.append("/")
    source = (_SOURCE_OF_PART if is_part else _SOURCE).format(
        parameters=", ".join(declared), asked=", ".join(asked), arguments=", ".join(passed)
    )
    file = f"<wrapper of {upstream.__qualname__}>"
    function = bound(source, file, __name__, shorter or upstream, left, route)
    function.__defaults__ = upstream.__defaults__
    function.__kwdefaults__ = upstream.__kwdefaults__
    wrapper: Callable[..., Any] = functools.wraps(upstream)(function)
    return wrapper


def bound(source: str, file: str, module: str, *values: Any) -> Any:
    """A function that a source makes of some values, by its own function ``bind``.

    The source is compiled once, as each switch to our routes makes the same functions again. Their
    code is a copy each: torch's compiler keeps a limited number of results for a code.

    Args:
        source: of a module that has ``bind``.
        file: what tracebacks call its file.
        module: the ``__name__`` that the function is to have been made in.
        values: the arguments of ``bind``.
    """
    made: dict[str, Any] = {"__name__": module}
    exec(_compiled(source, file), made)
    function = made["bind"](*values)
    function.__code__ = function.__code__.replace()
    return function


@functools.lru_cache(maxsize=1024)
def _compiled(source: str, file: str) -> CodeType:
    return compile(source, file, "exec")
