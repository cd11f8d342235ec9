"""The versions of other libraries that fastgraph is tested with, and a warning outside of them."""

from __future__ import annotations

import re
import warnings
from types import ModuleType
from typing import NamedTuple

from wrapt import register_post_import_hook


class VersionRange(NamedTuple):
    """The versions of a library, by their first two numbers, that are tested.

    Attributes:
        title: as people call the library.
        first: the first one.
        last: the last one.
    """

    title: str
    first: tuple[int, int]
    last: tuple[int, int]

    def includes(self, version: str) -> bool:
        """True if a version is one of these, or cannot be read."""
        found = re.match(r"(\d+)\.(\d+)", version)
        return found is None or self.first <= (int(found[1]), int(found[2])) <= self.last


TESTED = {
    "torch": VersionRange("torch", (2, 10), (2, 15)),
    "torch_geometric": VersionRange("PyG", (2, 6), (2, 8)),
    "dgl": VersionRange("DGL", (1, 1), (2, 1)),
}
"""By the name under which it is imported: the one place that says so."""


class UntestedVersionWarning(UserWarning):
    """A library has a version that fastgraph is not tested with; issued once for each."""


_awaited: set[str] = set()


def warn_where_untested() -> None:
    """Warn of libraries outside the tested versions, now or when they are imported."""
    for name in TESTED.keys() - _awaited:
        _awaited.add(name)
        register_post_import_hook(check, name)


def check(module: ModuleType) -> None:
    """Warn if the version of an imported library is outside those that are tested."""
    tested, version = TESTED[module.__name__], str(getattr(module, "__version__", ""))
    if not tested.includes(version):
        first, last = (".".join(map(str, numbers)) for numbers in tested[1:])
        warnings.warn(
            f"fastgraph is tested with {tested.title} {first} to {last}, and this is {version}: "
            "`fastgraph.compare` shows whether a model's results are upstream's",
            UntestedVersionWarning,
            stacklevel=2,
        )
