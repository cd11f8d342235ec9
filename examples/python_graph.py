"""Turns a Python installation into a graph of its modules, classes and functions.

An edge points from the definition that uses another one to the definition that is used. Only the
source text is read. The module needs NumPy and tqdm alone, so that the worker processes start
quickly.

Run as a script it writes the graph of the running interpreter's installation to an ``.npz`` file::

    python python_graph.py graph.npz
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from tqdm import tqdm

from python_source import (
    CLASS,
    IMPORT,
    INSTANCE,
    MODULE,
    REFERENCE,
    SUPER,
    Definition,
    ParsedModule,
    SourceFile,
    parse_file,
)

MAX_FILES = 4000
NUM_FEATURES = 256
MAX_CLASSES = 32

_SKIPPED_DIRECTORIES = {"__pycache__", "site-packages", "dist-packages", "test", "tests"}


@dataclass
class CodeGraph:
    """The graph as arrays.

    Attributes:
        edge_index: int64 ``[2, E]``, users in row 0, what they use in row 1; sorted, no duplicate
            (user, used, type), no self-loops.
        edge_type: int64 ``[E]``, positions in `python_source.EDGE_TYPES`.
        node_type: int64 ``[N]``, positions in `python_source.NODE_TYPES`.
        x: float32 ``[N, F]``, rows scaled to a mean square of 1 (0 for a node without words).
        y: int64 ``[N]``, positions in `classes`, -1 for nodes of other packages.
        names: ``[N]`` dotted names.
        classes: names of the packages that serve as labels, most frequent first.
        skipped: number of files that could not be read or parsed.
    """

    edge_index: np.ndarray
    edge_type: np.ndarray
    node_type: np.ndarray
    x: np.ndarray
    y: np.ndarray
    names: list[str]
    classes: list[str]
    skipped: int

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the arrays to an ``.npz`` file."""
        arrays = {key: np.asarray(value) for key, value in vars(self).items()}
        np.savez(path, **arrays)


def installation_roots() -> list[Path]:
    """Directories of the standard library and of the installed packages, without duplicates."""
    paths = sysconfig.get_paths()
    candidates = [paths["stdlib"], paths["purelib"], paths["platlib"]]
    candidates += [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
    return [Path(p) for p in dict.fromkeys(map(os.path.realpath, candidates)) if os.path.isdir(p)]


def find_files(roots: Sequence[Path], max_files: int = MAX_FILES) -> list[SourceFile]:
    """Lists the source files below `roots`, at most `max_files` of them.

    Where there are more, the packages with most files are cut to a common size. The choice follows
    a hash of the module name: it does not depend on the order in which a disk lists its files.
    """
    packages: dict[str, list[SourceFile]] = {}
    for root in roots:
        for entry in sorted(root.iterdir()):
            name = entry.stem if entry.suffix == ".py" else entry.name
            if name in packages or not name.isidentifier() or entry.name in _SKIPPED_DIRECTORIES:
                continue
            if entry.suffix == ".py":
                packages[name] = [SourceFile(str(entry), name, name, is_package=False)]
            elif entry.is_dir() and (files := list(_package_files(entry, name))):
                packages[name] = files

    sizes = [len(files) for files in packages.values()]
    low, high = 1, max([1, *sizes])
    while low < high:
        middle = (low + high + 1) // 2
        if sum(min(size, middle) for size in sizes) <= max_files:
            low = middle
        else:
            high = middle - 1
    chosen = []
    for files in packages.values():
        kept = sorted(files, key=lambda f: (zlib.crc32(f.module.encode()), f.module))[:low]
        chosen += sorted(kept, key=lambda f: f.module)
    return chosen[:max_files]


def _package_files(directory: Path, package: str) -> Iterator[SourceFile]:
    for folder, subfolders, files in os.walk(directory):
        subfolders[:] = sorted(
            s for s in subfolders if s.isidentifier() and s not in _SKIPPED_DIRECTORIES
        )
        parts = [package, *Path(folder).relative_to(directory).parts]
        for file in sorted(files):
            stem, extension = os.path.splitext(file)
            if extension != ".py" or not stem.isidentifier():
                continue
            is_package = stem == "__init__"
            module = ".".join(parts if is_package else [*parts, stem])
            yield SourceFile(os.path.join(folder, file), module, package, is_package)


class _Resolver:
    """Finds the node that a dotted name stands for, through re-exports and base classes."""

    def __init__(self, modules: Sequence[ParsedModule]) -> None:
        self.nodes: list[Definition] = [d for module in modules for d in module.definitions]
        self.parsed = {module.definitions[0].name: module for module in modules}
        self.modules: dict[str, int] = {}
        self.definitions: dict[str, int] = {}
        for index, node in enumerate(self.nodes):
            table = self.modules if node.kind == MODULE else self.definitions
            table.setdefault(node.name, index)
        self.found: dict[str, int | None] = {}
        self.members: dict[tuple[int, str], int | None] = {}

    def resolve(self, dotted: str) -> int | None:
        if dotted not in self.found:
            self.found[dotted] = None  # ends cycles of re-exports
            self.found[dotted] = self.search(dotted)
        return self.found[dotted]

    def search(self, dotted: str) -> int | None:
        if dotted in self.definitions:
            return self.definitions[dotted]
        head, _, last = dotted.rpartition(".")
        parsed = self.parsed.get(head)
        if parsed is not None:
            target = parsed.imports.get(last)
            if target is not None and target != dotted:
                node = self.resolve(target)
                if node is not None:
                    return node
        if dotted in self.modules:
            return self.modules[dotted]
        if parsed is not None:
            origins = (self.resolve(f"{origin}.{last}") for origin in parsed.star_imports)
            return next((node for node in origins if node is not None), None)
        owner = self.resolve(head) if head else None
        if owner is None:
            return None
        definition = self.nodes[owner]
        if definition.kind == CLASS:
            return self.member(owner, last)
        if definition.name != head:
            return self.resolve(f"{definition.name}.{last}")
        return None

    def member(self, class_node: int, name: str) -> int | None:
        """The method or inner class `name` of a class or of the first base that has it."""
        key = (class_node, name)
        if key not in self.members:
            self.members[key] = None  # ends cycles of bases
            own = self.definitions.get(f"{self.nodes[class_node].name}.{name}")
            self.members[key] = own if own is not None else self.inherited(class_node, name)
        return self.members[key]

    def inherited(self, class_node: int, name: str) -> int | None:
        for dotted in self.nodes[class_node].bases:
            base = self.resolve(dotted)
            if base is not None and self.nodes[base].kind == CLASS:
                found = self.member(base, name)
                if found is not None:
                    return found
        return None

    def edge(self, kind: int, target: str) -> tuple[int, int] | None:
        """The (node, edge type) of a use, or None when it leads out of the graph."""
        if target[0] in INSTANCE + SUPER:
            class_name, _, name = target[1:].rpartition(".")
            class_node = self.resolve(class_name)
            if class_node is None or self.nodes[class_node].kind != CLASS:
                return None
            lookup = self.member if target[0] == INSTANCE else self.inherited
            node = lookup(class_node, name)
            return None if node is None else (node, kind)
        node = self.resolve(target)
        if node is not None:
            return node, kind
        # A constant, or a method of something that is not followed: the module or class that holds
        # it is what is used.
        while node is None and "." in target:
            target = target.rpartition(".")[0]
            node = self.resolve(target)
        if node is None:
            return None
        return node, (IMPORT if kind == IMPORT else REFERENCE)


def build_graph(
    roots: Sequence[Path],
    *,
    max_files: int = MAX_FILES,
    num_features: int = NUM_FEATURES,
    max_classes: int = MAX_CLASSES,
    workers: int | None = None,
    progress: bool = True,
) -> CodeGraph:
    """Builds the graph of all packages and modules that lie directly in `roots`.

    Args:
        roots: directories such as the standard library and ``site-packages``.
        max_files: upper bound of files read; the largest packages are sampled.
        num_features: number of buckets that words are hashed into.
        max_classes: number of packages, the ones with most nodes, that become labels.
        workers: processes that parse; 0 parses in this one, None takes one per CPU, 8 at most.
        progress: whether to show a progress bar on stderr.

    Raises:
        ValueError: no file below `roots` could be parsed.
    """
    files = find_files(roots, max_files)
    if workers is None:
        workers = min(8, os.cpu_count() or 1)
    bar = tqdm(total=len(files), desc="Parsing Python files", unit="file", disable=not progress)
    modules = []
    with bar:
        for parsed in _parse_all(files, num_features, workers):
            bar.update()
            if parsed is not None:
                modules.append(parsed)
    if not modules:
        listed = ", ".join(map(str, roots))
        raise ValueError(f"roots: expected directories with Python source files, got {listed}")

    resolver = _Resolver(modules)
    nodes = resolver.nodes
    edges: set[tuple[int, int, int]] = set()
    for user, node in enumerate(tqdm(nodes, desc="Resolving names", disable=not progress)):
        for kind, target in node.uses:
            edge = resolver.edge(kind, target)
            if edge is not None and edge[0] != user:
                edges.add((user, *edge))
    columns = np.array(sorted(edges), dtype=np.int64).reshape(-1, 3).T

    packages = [module.package for module in modules for _ in module.definitions]
    order = sorted(Counter(packages).items(), key=lambda item: (-item[1], item[0]))
    classes = [package for package, _ in order[:max_classes]]
    label = {package: index for index, package in enumerate(classes)}
    return CodeGraph(
        edge_index=np.ascontiguousarray(columns[:2]),
        edge_type=np.ascontiguousarray(columns[2]),
        node_type=np.array([node.kind for node in nodes], dtype=np.int64),
        x=_features(nodes, num_features),
        y=np.array([label.get(package, -1) for package in packages], dtype=np.int64),
        names=[node.name for node in nodes],
        classes=classes,
        skipped=len(files) - len(modules),
    )


def _parse_all(
    files: Sequence[SourceFile], num_features: int, workers: int
) -> Iterator[ParsedModule | None]:
    widths = [num_features] * len(files)
    if workers == 0:
        yield from map(parse_file, files, widths)
        return
    # Processes are spawned, not forked: forking a process that has threads may hang.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as executor:
        yield from executor.map(parse_file, files, widths, chunksize=16)


def _features(nodes: Sequence[Definition], num_features: int) -> np.ndarray:
    x = np.zeros((len(nodes), num_features), dtype=np.float32)
    for row, node in zip(x, nodes, strict=True):
        if node.words:
            row[list(node.words)] = np.log1p(np.fromiter(node.words.values(), dtype=np.float32))
    norm = np.linalg.norm(x, axis=1, keepdims=True)
    scale = np.float32(np.sqrt(num_features))
    return scale * x / np.maximum(norm, np.finfo(np.float32).tiny)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the graph of this Python installation.")
    parser.add_argument("output", type=Path, help="path of the .npz file")
    parser.add_argument("--max-files", type=int, default=MAX_FILES)
    arguments = parser.parse_args()
    build_graph(installation_roots(), max_files=arguments.max_files).save(arguments.output)


if __name__ == "__main__":
    main()
