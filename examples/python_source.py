"""Reads one Python source file: what it defines, and which names each definition uses.

Only the text is read: nothing is imported or executed.
"""

from __future__ import annotations

import ast
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

NODE_TYPES = ("module", "class", "function")
EDGE_TYPES = ("call", "import", "inheritance", "reference")
MODULE, CLASS, FUNCTION = range(len(NODE_TYPES))
CALL, IMPORT, INHERITANCE, REFERENCE = range(len(EDGE_TYPES))

MAX_FILE_BYTES = 400_000

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# Markers before the dotted name of a target: an attribute of an instance of the class, which is
# looked up in the class and its bases, and one of super(), looked up in the bases alone.
INSTANCE = "="
SUPER = "^"


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
    """The definitions and uses of names in one file. ``definitions[0]`` is the module itself."""

    package: str
    definitions: list[Definition]
    imports: dict[str, str]
    star_imports: list[str]


@lru_cache(maxsize=1 << 16)
def split_words(text: str) -> tuple[str, ...]:
    """Splits identifiers or prose into lower-case words of 2 to 24 letters.

    >>> split_words("HTTPServer.read_all2")
    ('http', 'server', 'read', 'all')
    """
    words = (word.lower() for word in _WORD.findall(text))
    return tuple(word for word in words if 2 <= len(word) <= 24)


class Words:
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
        self.words = Words(file.package, num_features)
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
            if target is not None and target[0] not in INSTANCE and target != own + name
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
            scope.bindings[arguments[0].arg] = INSTANCE + outer.class_name
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
        """The class of a name that is annotated with `chain`, or assigned a call of it."""
        target = scope.lookup(chain[0]) if chain else None
        if target is None or target[0] in INSTANCE + SUPER:
            return None
        return INSTANCE + ".".join([target, *chain[1:]])

    def add_use(self, user: Definition, kind: int, chain: list[str], scope: _Scope) -> None:
        root, *attributes = chain
        if root == "super()":
            class_name = scope.enclosing_class()
            target = None if class_name is None else SUPER + class_name
        else:
            target = scope.lookup(root)
        if target is None or (target[0] in INSTANCE + SUPER and not attributes):
            return
        if target[0] in INSTANCE + SUPER and len(attributes) > 1:
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


def parse_file(file: SourceFile, num_features: int) -> ParsedModule | None:
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
