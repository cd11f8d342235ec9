"""Turns a Python installation into a graph of its modules, classes and functions.

An edge points from the definition that uses another one to the definition that is used. Only the
source text is read: nothing is imported or executed. The module needs NumPy and tqdm alone, so
that the worker processes start quickly.

Run as a script it writes the graph of the running interpreter's installation to an ``.npz`` file::

    python python_graph.py graph.npz
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
import sysconfig
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from tqdm import tqdm

NODE_TYPES = ("module", "class", "function")
EDGE_TYPES = ("call", "import", "inheritance", "reference")
MODULE, CLASS, FUNCTION = range(len(NODE_TYPES))
CALL, IMPORT, INHERITANCE, REFERENCE = range(len(EDGE_TYPES))

MAX_FILES = 4000
MAX_FILE_BYTES = 400_000
NUM_FEATURES = 256
MAX_CLASSES = 32

_SKIPPED_DIRECTORIES = {"__pycache__", "site-packages", "dist-packages", "test", "tests"}
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# Markers before the dotted name of a target: an attribute of an instance of the class, which is
# looked up in the class and its bases, and one of super(), looked up in the bases alone.
_INSTANCE = "="
_SUPER = "^"


@dataclass(frozen=True)
class SourceFile:
    """One source file, its dotted module name and the top-level package that it belongs to."""

    path: str
    module: str
    package: str
    is_package: bool


@dataclass
class Definition:
    """A module, class or function with its hashed words and its (edge type, target) uses."""

    name: str
    kind: int
    words: Counter[int] = field(default_factory=Counter)
    uses: set[tuple[int, str]] = field(default_factory=set)
    bases: list[str] = field(default_factory=list)


@dataclass
class ParsedModule:
    """What one file defines and uses. ``definitions[0]`` is the module itself."""

    package: str
    definitions: list[Definition]
    imports: dict[str, str]
    star_imports: list[str]


@dataclass
class CodeGraph:
    """The graph as arrays.

    Attributes:
        edge_index: int64 ``[2, E]``, users in row 0, what they use in row 1; sorted, no duplicate
            (user, used, type), no self-loops.
        edge_type: int64 ``[E]``, positions in `EDGE_TYPES`.
        node_type: int64 ``[N]``, positions in `NODE_TYPES`.
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


@lru_cache(maxsize=1 << 16)
def split_words(text: str) -> tuple[str, ...]:
    """Splits identifiers or prose into lower-case words of 2 to 24 letters.

    >>> split_words("HTTPServer.read_all2")
    ('http', 'server', 'read', 'all')
    """
    words = (word.lower() for word in _WORD.findall(text))
    return tuple(word for word in words if 2 <= len(word) <= 24)


class _Words:
    """Hashes words into buckets and leaves out those that would give the package away."""

    def __init__(self, package: str, num_features: int) -> None:
        self.num_features = num_features
        parts = {*split_words(package), package.lower(), package.lower().replace("_", "")}
        self.exact = parts
        # "pytorch" names torch as clearly as "torch" does; of short names ("os", "re") only the
        # word itself is left out, since they are contained in half of the dictionary.
        self.contained = tuple(sorted(part for part in parts if len(part) >= 4))
        self.buckets: dict[str, tuple[int, ...]] = {}

    def __call__(self, text: str) -> tuple[int, ...]:
        found = self.buckets.get(text)
        if found is None:
            kept = (word for word in split_words(text) if not self.gives_away(word))
            found = tuple(zlib.crc32(word.encode()) % self.num_features for word in kept)
            self.buckets[text] = found
        return found

    def gives_away(self, word: str) -> bool:
        return word in self.exact or any(part in word for part in self.contained)


class _Scope:
    """A lexical scope: what its names are bound to (None: something that is not followed)."""

    __slots__ = ("bindings", "class_name", "parent")

    def __init__(self, parent: _Scope | None, class_name: str | None = None) -> None:
        self.parent = parent
        self.class_name = class_name
        self.bindings: dict[str, str | None] = {}

    def lookup(self, name: str) -> str | None:
        if name in self.bindings:
            return self.bindings[name]
        scope = self.parent
        while scope is not None:
            # Names of a class body are invisible in the methods.
            if scope.class_name is None and name in scope.bindings:
                return scope.bindings[name]
            scope = scope.parent
        return None

    def enclosing_class(self) -> str | None:
        scope: _Scope | None = self
        while scope is not None:
            if scope.class_name is not None:
                return scope.class_name
            scope = scope.parent
        return None


_FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_DefinitionNode = _FunctionNode | ast.ClassDef


class _Extractor:
    """Walks one syntax tree, scope by scope."""

    def __init__(self, file: SourceFile, num_features: int) -> None:
        self.file = file
        self.words = _Words(file.package, num_features)
        self.definitions: dict[str, Definition] = {}
        self.star_imports: list[str] = []

    def extract(self, tree: ast.Module) -> ParsedModule:
        module = Definition(self.file.module, MODULE)
        scope = _Scope(None)
        self.add_words(module, self.file.module)
        self.add_docstring(module, tree)
        self.walk_scope(tree.body, module, scope)
        own = self.file.module + "."
        imports = {
            name: target
            for name, target in scope.bindings.items()
            if target is not None and target[0] not in _INSTANCE and target != own + name
        }
        definitions = [module, *self.definitions.values()]
        return ParsedModule(self.file.package, definitions, imports, self.star_imports)

    def define(self, name: str, kind: int) -> Definition:
        # Overloads and definitions in both branches of an if are one node.
        return self.definitions.setdefault(name, Definition(name, kind))

    def add_words(self, owner: Definition, text: str) -> None:
        owner.words.update(self.words(text))

    def add_docstring(self, owner: Definition, node: ast.Module | _DefinitionNode) -> None:
        text = ast.get_docstring(node, clean=False)
        if text:
            self.add_words(owner, text)

    def walk_scope(self, body: Sequence[ast.AST], owner: Definition, scope: _Scope) -> None:
        """Collects bindings and uses of one scope, then resolves them, then walks inner scopes."""
        is_function = scope.parent is not None and scope.class_name is None
        inner: list[tuple[_DefinitionNode, Definition]] = []
        uses: list[tuple[Definition, int, list[str]]] = []
        stored: set[str] = set()
        declared: set[str] = set()
        instances: dict[str, list[str]] = {}
        stack: list[tuple[ast.AST, Definition]] = [(node, owner) for node in body]

        while stack:
            node, user = stack.pop()
            if isinstance(node, ast.Name):
                self.add_words(user, node.id)
                if isinstance(node.ctx, ast.Load):
                    uses.append((user, REFERENCE, [node.id]))
                else:
                    stored.add(node.id)
            elif isinstance(node, ast.Attribute):
                if chain := self.chain(node, user):
                    uses.append((user, REFERENCE, chain))
                else:
                    stack.append((_first_not_attribute(node), user))
            elif isinstance(node, ast.Call):
                if chain := self.chain(node.func, user):
                    uses.append((user, CALL, chain))
                else:
                    stack.append((node.func, user))
                stack += [(argument, user) for argument in (*node.args, *node.keywords)]
            elif isinstance(node, _DefinitionNode):
                kind = CLASS if isinstance(node, ast.ClassDef) else FUNCTION
                definition = self.define(f"{owner.name}.{node.name}", kind)
                scope.bindings[node.name] = definition.name
                self.add_words(definition, node.name)
                self.add_docstring(definition, node)
                inner.append((node, definition))
                if isinstance(node, ast.ClassDef):
                    for base in node.bases:
                        base = base.value if isinstance(base, ast.Subscript) else base
                        if chain := self.chain(base, definition):
                            uses.append((definition, INHERITANCE, chain))
                    stack += [(k, definition) for k in node.keywords]
                else:
                    stack += [(a, definition) for a in _evaluated_outside(node)]
                stack += [(d, definition) for d in node.decorator_list]
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self.add_imports(node, user, scope)
            elif isinstance(node, ast.Global | ast.Nonlocal):
                declared.update(node.names)
            elif not isinstance(node, ast.Constant):
                if isinstance(node, ast.Assign):
                    target = node.targets[0]
                    if isinstance(target, ast.Name) and isinstance(node.value, ast.Call):
                        instances[target.id] = self.chain(node.value.func, user) or []
                elif isinstance(node, ast.Lambda):
                    stored.update(argument.arg for argument in _arguments(node))
                elif isinstance(node, ast.ExceptHandler) and node.name:
                    stored.add(node.name)
                stack += [(child, user) for child in ast.iter_child_nodes(node)]

        if is_function:
            for name in stored - declared:
                if name not in scope.bindings:
                    scope.bindings[name] = None
                    scope.bindings[name] = self.instance_of(instances.get(name), scope)
        for user, kind, chain in uses:
            self.add_use(user, kind, chain, scope)
        for definition_node, definition in inner:
            self.walk_definition(definition_node, definition, scope)

    def walk_definition(self, node: _DefinitionNode, owner: Definition, outer: _Scope) -> None:
        if isinstance(node, ast.ClassDef):
            self.walk_scope(node.body, owner, _Scope(outer, class_name=owner.name))
            return
        scope = _Scope(outer)
        arguments = _arguments(node)
        for argument in arguments:
            chain = self.chain(argument.annotation, owner) if argument.annotation else None
            scope.bindings[argument.arg] = self.instance_of(chain, outer)
            self.add_words(owner, argument.arg)
        for variable in (node.args.vararg, node.args.kwarg):
            if variable is not None:
                scope.bindings[variable.arg] = None
        static = any(
            isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list
        )
        if outer.class_name is not None and arguments and not static:
            scope.bindings[arguments[0].arg] = _INSTANCE + outer.class_name
        self.walk_scope(node.body, owner, scope)

    def chain(self, node: ast.AST, user: Definition) -> list[str] | None:
        """``a.b.c`` as ["a", "b", "c"], ``super().a`` as ["super()", "a"], or None."""
        attributes = []
        while isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            self.add_words(user, node.attr)
            node = node.value
        attributes.reverse()
        if isinstance(node, ast.Name):
            self.add_words(user, node.id)
            return [node.id, *attributes]
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if attributes and is_call and node.func.id == "super":
            return ["super()", *attributes]
        return None

    @staticmethod
    def instance_of(chain: list[str] | None, scope: _Scope) -> str | None:
        """What a name annotated with `chain`, or assigned a call of it, is bound to."""
        target = scope.lookup(chain[0]) if chain else None
        if target is None or target[0] in _INSTANCE + _SUPER:
            return None
        return _INSTANCE + ".".join([target, *chain[1:]])

    def add_use(self, user: Definition, kind: int, chain: list[str], scope: _Scope) -> None:
        root, *attributes = chain
        if root == "super()":
            class_name = scope.enclosing_class()
            target = None if class_name is None else _SUPER + class_name
        else:
            target = scope.lookup(root)
        if target is None or (target[0] in _INSTANCE + _SUPER and not attributes):
            return
        if target[0] in _INSTANCE + _SUPER and len(attributes) > 1:
            # self.part.method: only what self.part is can be told.
            attributes, kind = attributes[:1], REFERENCE
        dotted = ".".join([target, *attributes])
        user.uses.add((kind, dotted))
        if kind == INHERITANCE:
            user.bases.append(dotted)

    def add_imports(
        self, node: ast.Import | ast.ImportFrom, user: Definition, scope: _Scope
    ) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                user.uses.add((IMPORT, alias.name))
                self.add_words(user, alias.name)
                top = alias.name.partition(".")[0]
                scope.bindings[alias.asname or top] = alias.name if alias.asname else top
            return
        origin = self.absolute(node)
        if origin is None:
            return
        self.add_words(user, node.module or "")
        for alias in node.names:
            if alias.name == "*":
                user.uses.add((IMPORT, origin))
                self.star_imports.append(origin)
                continue
            self.add_words(user, alias.name)
            target = f"{origin}.{alias.name}"
            user.uses.add((IMPORT, target))
            scope.bindings[alias.asname or alias.name] = target

    def absolute(self, node: ast.ImportFrom) -> str | None:
        if node.level == 0:
            return node.module
        parts = self.file.module.split(".")
        dropped = node.level - 1 if self.file.is_package else node.level
        if dropped >= len(parts):
            return None
        kept = parts[: len(parts) - dropped]
        return ".".join([*kept, node.module] if node.module else kept)


def _first_not_attribute(node: ast.AST) -> ast.AST:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node


def _arguments(node: _FunctionNode | ast.Lambda) -> list[ast.arg]:
    a = node.args
    variable = [argument for argument in (a.vararg, a.kwarg) if argument is not None]
    return [*a.posonlyargs, *a.args, *a.kwonlyargs, *variable]


def _evaluated_outside(node: _FunctionNode) -> list[ast.expr]:
    """Defaults and annotations: they are evaluated in the scope around the function."""
    annotations = [argument.annotation for argument in _arguments(node)]
    expressions = [*node.args.defaults, *node.args.kw_defaults, *annotations, node.returns]
    return [expression for expression in expressions if expression is not None]


def parse_file(file: SourceFile, num_features: int = NUM_FEATURES) -> ParsedModule | None:
    """Parses one file. Returns None when it cannot be read or is not valid Python."""
    try:
        source = Path(file.path).read_bytes()
        if len(source) > MAX_FILE_BYTES:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return _Extractor(file, num_features).extract(tree)


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
        if target[0] in _INSTANCE + _SUPER:
            class_name, _, name = target[1:].rpartition(".")
            class_node = self.resolve(class_name)
            if class_node is None or self.nodes[class_node].kind != CLASS:
                return None
            lookup = self.member if target[0] == _INSTANCE else self.inherited
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
