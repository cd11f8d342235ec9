"""One typed object for every ``FASTGRAPH_*`` variable and every argument of ``enable()``."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

# Instruction levels, each of which includes those before it.
CPU_LEVELS = ("baseline", "avx2", "avx512")

# Read by other parts: the graphs of tests and benchmarks, and the build.
_OTHER_VARIABLES = ("FASTGRAPH_DATA", "FASTGRAPH_CUDA")

NOT_ENABLED = "fastgraph was not enabled: FASTGRAPH=0"

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def _hint(word: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _parse_bool(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError("1 or 0")


def _parse_enabled(text: str) -> bool:
    if _is_compare(text):
        return True
    try:
        return _parse_bool(text)
    except ValueError:
        raise ValueError("1, 0 or compare") from None


def _is_compare(text: str) -> bool:
    return text.strip().lower() == "compare"


def _parse_count(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("an integer >= 0") from None


_Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]


def _expect(description: str, holds: Callable[[Any], bool]) -> _Validator:
    """A validator that names the field, what was expected and what came."""

    def validate(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not holds(value):
            hint = _hint(value, CPU_LEVELS) if attribute.name == "cpu_level" else ""
            raise ValueError(f"{attribute.name} must be {description}, got {value!r}{hint}")

    return validate


def _is_a_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_is_flag = _expect("True or False", lambda value: isinstance(value, bool))
_is_count = _expect("an integer >= 0", _is_a_count)
_is_count_or_none = _expect(
    "an integer >= 0 or None", lambda value: value is None or _is_a_count(value)
)


def _setting(variable: str, parse: Callable[[str], Any], default: Any, check: _Validator) -> Any:
    return attrs.field(
        default=default, validator=check, metadata={"variable": variable, "parse": parse}
    )


@attrs.frozen(kw_only=True, slots=False)
class Settings:
    """Settings in force. Immutable; every way to make one checks all values.

    Attributes:
        enabled: ``FASTGRAPH``. ``True`` enables at ``import fastgraph``, ``False`` makes
            ``enable()`` do nothing, ``None`` leaves the choice to the program.
        backend: ``FASTGRAPH_BACKEND``. Name of the backend for everything; ``None``: the best
            available one for each operator.
        strict: ``FASTGRAPH_STRICT``. Raise where a layer that has a route cannot take it.
        min_edges: ``FASTGRAPH_MIN_EDGES``. Graphs with fewer edges are left to upstream; ``None``:
            on the CPU those that gain nothing, as was measured for each kind of operator.
        cache_bytes: ``FASTGRAPH_CACHE_BYTES``. Memory for sorted graphs and what else is derived
            from graphs in use, on each device; ``None``: a quarter of what the device has. A graph
            that does not fit is sorted at every call.
        reuse_bytes: ``FASTGRAPH_REUSE_BYTES``. Memory of large results on the CPU that is kept for
            the next ones when they are freed; 0 gives it back to the system at once.
        prefetch: ``FASTGRAPH_PREFETCH``. Have a thread make the next batch of PyG's
            ``NeighborLoader`` and ``LinkNeighborLoader`` while the program computes on the last
            one, where a core is free. Batches are the same; one is made again where the program has
            changed the graph meanwhile.
        cpu_level: ``FASTGRAPH_CPU_LEVEL``. Highest instruction set to use, one of ``baseline``,
            ``avx2``, ``avx512``; ``None``: the best this machine has.
        measure: ``FASTGRAPH_MEASURE``. Where our CUDA kernels compute, time that of sums and means
            cuSPARSE's three and tiles for tensor cores at the first product of each graph, width
            and direction, and take the fastest from then on, except in CUDA graphs. That costs two
            dozen products, once for each graph, and results differ in the last bits, so those of
            two runs may. Means of bfloat16 and float16, and graphs with an edge twice, are not for
            cuSPARSE, and tiles only for graphs that fill them. Dot-product attention forward is
            timed on tiles in the same way.
        check_cache: ``FASTGRAPH_CHECK_CACHE``. Whether the content of a graph's tensors is looked
            at whenever what was derived from them is used again. ``False`` is for measuring what
            that costs: edits that torch does not count then go unnoticed.
        project_first: ``FASTGRAPH_PROJECT_FIRST``. Multiply features by the matrix of ``SAGEConv``
            and ``GraphConv`` of PyG before they are summed over neighbours, where that is less
            work, as in layers with fewer channels out than in. Results differ in roundings.
            ``None``: for means where the matrix gets no gradient, as roundings may grow elsewhere.
            Never under ``torch.use_deterministic_algorithms``.
        dgl_sampling: ``FASTGRAPH_DGL_SAMPLING``. Draw the blocks of DGL's ``NeighborSampler`` by
            :mod:`fastgraph.sampling`: the same for any number of threads, but not those that DGL
            draws with the same seed.
        compare: ``FASTGRAPH_COMPARE``, or ``FASTGRAPH=compare`` for this and ``enabled``. Run every
            call of a routed layer both ways and raise where they differ. Very slow.
        verbose: ``FASTGRAPH_VERBOSE``. Say on standard error, once each, which layer takes which
            route, or why it takes none.

    Raises:
        ValueError: a value of the wrong type or out of range.
    """

    enabled: bool | None = _setting(
        "FASTGRAPH",
        _parse_enabled,
        None,
        _expect("True, False or None", lambda value: value is None or isinstance(value, bool)),
    )
    backend: str | None = _setting(
        "FASTGRAPH_BACKEND",
        str,
        None,
        _expect(
            "a backend's name or None",
            lambda value: value is None or (isinstance(value, str) and value != ""),
        ),
    )
    strict: bool = _setting("FASTGRAPH_STRICT", _parse_bool, False, _is_flag)
    min_edges: int | None = _setting("FASTGRAPH_MIN_EDGES", _parse_count, None, _is_count_or_none)
    cache_bytes: int | None = _setting(
        "FASTGRAPH_CACHE_BYTES", _parse_count, None, _is_count_or_none
    )
    reuse_bytes: int = _setting("FASTGRAPH_REUSE_BYTES", _parse_count, 1 << 30, _is_count)
    prefetch: bool = _setting("FASTGRAPH_PREFETCH", _parse_bool, False, _is_flag)
    cpu_level: str | None = _setting(
        "FASTGRAPH_CPU_LEVEL",
        str,
        None,
        _expect(
            f"one of {', '.join(CPU_LEVELS)} or None",
            lambda value: value is None or value in CPU_LEVELS,
        ),
    )
    measure: bool = _setting("FASTGRAPH_MEASURE", _parse_bool, False, _is_flag)
    check_cache: bool = _setting("FASTGRAPH_CHECK_CACHE", _parse_bool, True, _is_flag)
    project_first: bool | None = _setting(
        "FASTGRAPH_PROJECT_FIRST",
        _parse_bool,
        None,
        _expect("True, False or None", lambda value: value is None or isinstance(value, bool)),
    )
    dgl_sampling: bool = _setting("FASTGRAPH_DGL_SAMPLING", _parse_bool, False, _is_flag)
    compare: bool = _setting("FASTGRAPH_COMPARE", _parse_bool, False, _is_flag)
    verbose: bool = _setting("FASTGRAPH_VERBOSE", _parse_bool, False, _is_flag)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Settings from the ``FASTGRAPH*`` variables of ``environ``, by default ``os.environ``.

        A variable set to the empty string counts as unset.

        Raises:
            ValueError: an unknown ``FASTGRAPH_*`` variable, or a value that cannot be used; the
                message names the variable, what was expected and what came.
        """
        source = os.environ if environ is None else environ
        given = {name: text for name, text in source.items() if name.startswith("FASTGRAPH")}
        known = variables()
        for name in given:
            if name.startswith("FASTGRAPH_") and name not in (*known.values(), *_OTHER_VARIABLES):
                accepted = (*known.values(), *_OTHER_VARIABLES)
                raise ValueError(
                    f"unknown environment variable {name}: expected one of {', '.join(accepted)}"
                    f"{_hint(name, accepted)}"
                )
        values: dict[str, Any] = {}
        if _is_compare(given.get("FASTGRAPH", "")):
            values["compare"] = True
        for attribute in attrs.fields(cls):
            variable = known[attribute.name]
            text = given.get(variable, "")
            if text == "":
                continue
            try:
                values[attribute.name] = attribute.metadata["parse"](text)
            except ValueError as error:
                raise ValueError(f"{variable} must be {error}, got {text!r}") from None
            try:
                cls(**{attribute.name: values[attribute.name]})
            except ValueError as error:
                raise ValueError(f"environment variable {variable}: {error}") from None
        return cls(**values)

    def replace(self, **changes: Any) -> Settings:
        """A copy with some values changed, checked like a new object.

        Raises:
            ValueError: a value of the wrong type or out of range.
            TypeError: no setting has this name.
        """
        known = tuple(variables())
        for name in changes:
            if name not in known:
                raise TypeError(
                    f"unknown setting {name!r}: expected one of {', '.join(known)}"
                    f"{_hint(name, known)}"
                )
        return attrs.evolve(self, **changes)


def variables() -> dict[str, str]:
    """The environment variable of each setting, by the setting's name."""
    return {field.name: field.metadata["variable"] for field in attrs.fields(Settings)}


_current: Settings | None = None


def current() -> Settings:
    """The settings in force: those of the last ``enable()``, else those of the environment.

    Raises:
        ValueError: nothing was enabled yet and the environment holds an invalid variable.
    """
    global _current
    if _current is None:
        _current = Settings.from_environment()
    return _current


def set_current(settings: Settings) -> None:
    """Put ``settings`` in force for the whole process."""
    global _current
    _current = settings


@contextlib.contextmanager
def measuring() -> Iterator[None]:
    """Within, kernels that compete are timed; see :attr:`Settings.measure`."""
    with _changed(measure=True):
        yield


@contextlib.contextmanager
def of_any_size() -> Iterator[None]:
    """Within, no graph is too small, unless the setting ``min_edges`` says so itself."""
    with _changed(min_edges=current().min_edges or 0):
        yield


@contextlib.contextmanager
def _changed(**changes: Any) -> Iterator[None]:
    before = current()
    set_current(before.replace(**changes))
    try:
        yield
    finally:
        set_current(before)
