"""``python -m fastgraph info``: installed packages, and backends with reasons if unavailable."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, TypeVar

import attrs
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastgraph import __version__
from fastgraph.dgl import fix_import, why_incomplete, why_no_graphbolt
from fastgraph.machine.processor import cpu_model
from fastgraph.settings import Settings, variables

if TYPE_CHECKING:
    from fastgraph.plugins.framework import Framework

# Import name to the name of the distribution.
_PACKAGES = {
    "torch": "torch",
    "torch_geometric": "torch-geometric",
    "dgl": "dgl",
    "torch_scatter": "torch-scatter",
    "tvm_ffi": "apache-tvm-ffi",
    "pluggy": "pluggy",
    "numpy": "numpy",
}

_WITHOUT_GRAPHBOLT = (
    "`import dgl` fails alone; after fastgraph.enable() or fastgraph.dgl.fix_import(), and under "
    "the runner, it succeeds, and "
)
_BY_OURS = "dgl.graphbolt samples by fastgraph on the CPU."

_SAMPLERS = {
    True: "Sampling for PyG: by {}; fastgraph.pyg.fix_sampling(even_beside_others=True) takes ours",
    False: "Sampling for PyG: by fastgraph, since neither pyg-lib nor torch-sparse is there; after "
    "fastgraph.enable() or fastgraph.pyg.fix_sampling(), and under the runner",
}

_T = TypeVar("_T")


@attrs.frozen
class Problem:
    """Why something could not be found out."""

    text: str

    def __str__(self) -> str:
        return self.text


def attempt(question: Callable[[], _T]) -> _T | Problem:
    """The answer, or the problem met on the way; a broken package may raise anything."""
    try:
        return question()
    except ModuleNotFoundError as error:
        return Problem(f"{error.name or error} is not installed")
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:
        # DGL raises a class of its own at import, others call sys.exit(): still only a fact to
        # report here.
        return Problem(_describe(error))


def _describe(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def package_version(module: str) -> str | Problem:
    """Version of a package that can be imported, or why it cannot."""
    found = attempt(lambda: importlib.import_module(module))
    try:
        installed = version(_PACKAGES[module])
    except PackageNotFoundError:
        installed = ""
    if isinstance(found, Problem):
        if found.text == f"{module} is not installed":
            return Problem("not installed")
        return Problem(f"{installed} is broken: {found}".strip())
    return str(getattr(found, "__version__", installed or "unknown version"))


def kernel_level() -> str:
    """Instruction level of the compiled kernels in use, and those to choose from."""
    from fastgraph.machine import native

    level = native.cpu_level()
    native.library()
    return f"{level} (available: {', '.join(native.available_levels())})"


def threads() -> str:
    """How many threads operators run on, and how many processors there are."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    import torch

    return f"{torch.get_num_threads()} of {processors or os.cpu_count()} processors"


def _backends() -> list[tuple[str, bool, str]]:
    from fastgraph.registry.registry import backend_report

    return backend_report()


def _frameworks() -> Sequence[Framework]:
    from fastgraph.plugins.framework import frameworks

    return frameworks()


def _samplers() -> list[str]:
    from fastgraph.pyg.sampling import found

    return found(importlib.import_module("torch_geometric.typing"))


def _grid(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=bool(headings))
    for heading in headings or ("", ""):
        table.add_column(heading, overflow="fold")
    return table


def _cell(value: object) -> Text:
    return Text(str(value), style="red" if isinstance(value, Problem) else "")


def _version_table() -> Table:
    table = _grid("Versions", "package", "version")
    table.add_row("fastgraph", __version__)
    table.add_row("python", platform.python_version())
    fix_import()  # as enabling does, so that DGL is reported as programs get it
    for module in _PACKAGES:
        table.add_row(module, _cell(package_version(module)))
    return table


def _machine_table() -> Table:
    table = _grid("Machine")
    table.add_row("processor", Text(cpu_model()))
    table.add_row("kernels", _cell(attempt(kernel_level)))
    table.add_row("threads", _cell(attempt(threads)))
    return table


def _backend_table() -> Table:
    table = _grid("Backends", "backend", "available", "reason")
    found = attempt(_backends)
    if isinstance(found, Problem):
        table.add_row("unknown", "", _cell(found))
    else:
        for name, available, reason in found:
            table.add_row(Text(name), "yes" if available else "no", Text(reason))
    return table


def _settings_table() -> Table:
    table = _grid("Settings", "setting", "value", "variable")
    found = attempt(Settings.from_environment)
    for name, variable in variables().items():
        given = os.environ.get(variable)
        if isinstance(found, Problem):
            value = "unknown" if given is None else given
        else:
            value = str(getattr(found, name))
        table.add_row(name, Text(value), Text(variable + ("" if given is None else f"={given}")))
    if isinstance(found, Problem):
        table.caption = Text(f"Not usable: {found}", style="red")
        table.caption_justify = "left"
    return table


def print_info() -> None:
    """Print everything to standard output; what cannot be found out is named with the reason."""
    console = Console()
    if not console.is_terminal:
        # Reports pasted from a pipe or a log should not be folded to rich's default of 80.
        console = Console(width=140)
    console.print(_version_table())
    incomplete = attempt(why_incomplete)
    if isinstance(incomplete, str):
        obstacle = attempt(why_no_graphbolt)
        used = _BY_OURS if obstacle is None else f"only dgl.graphbolt cannot be used: {obstacle}."
        said = f"{incomplete[0].upper()}{incomplete[1:]}: {_WITHOUT_GRAPHBOLT}{used}\n"
        console.print(Text(said))
    samplers = attempt(_samplers)
    if not isinstance(samplers, Problem):  # or else there is no PyG
        console.print(Text(_SAMPLERS[bool(samplers)].format(" and ".join(samplers)) + ".\n"))
    for table in (_machine_table(), _backend_table(), _settings_table()):
        console.print(table)
    found = attempt(_frameworks)
    if isinstance(found, Problem):
        console.print(Text(f"Routed layers: unknown: {found}"))
        return
    for framework in found:
        layers = attempt(framework.routed_layers)
        if isinstance(layers, Problem):
            console.print(Text(f"Routed {framework.name} layers: unknown: {layers}"))
        else:
            names = ", ".join(layers)
            console.print(Text(f"Routed {framework.name} layers ({len(layers)}): {names}"))
