"""The values that a message reads besides its arguments: attributes, globals and closures.

While a message is traced, its code is seen as Python runs it. All that this code names is
remembered with its value, so that a program is used only as long as tracing would give it again.
Code that writes to what outlives a call, or whose reading cannot be followed, is refused before it
runs.
"""

from __future__ import annotations

import dis
import enum
import functools
import gc
import itertools
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from fastgraph.edge_programs import torch_settings
from fastgraph.edge_programs.codes import (
    codes_in,
    compares_sizes,
    numbers_in,
    only_set,
    strings_in,
)
from fastgraph.edge_programs.frozen import (
    MISSING,
    PLAIN,
    TRUSTED,
    UnknownError,
    changing_global,
    frozen,
    is_trusted,
)
from fastgraph.edge_programs.recorded import Refused
from fastgraph.upstream import PACKAGES

_OWN = "fastgraph"

_OF_MODULES = frozenset(nn.Module().__dict__) - {"training"}
"""Attributes by which torch implements modules: their content is looked at by itself."""

_BY_NAME = {
    id(function)
    for function in (getattr, hasattr, setattr, delattr, vars, globals, locals, eval, exec)
}
_OUTPUT = {id(function) for function in (print, open, input, breakpoint, warnings.warn)}
_SETTING = "looks at a setting of torch"

_REFUSED = (
    (_BY_NAME, "looks names up"),
    (_OUTPUT, "writes or reads files"),
    (torch_settings.BUILTINS, _SETTING),
    ({id(id), id(hash)}, "takes its layer for another one"),
)

_LOOKUPS = frozenset(
    ("__dict__", "__getattribute__", "__globals__", "attrgetter", "methodcaller", "getattr_static")
)
"""Names by which values are found whose own names are not in the code."""

_STORAGE = frozenset(
    (
        *("data_ptr", "grad", "is_contiguous", "storage_offset", "stride"),
        *("device", "get_device", "is_cpu", "is_cuda"),
    )
)
"""Names of what tensors without data do not share with those that they stand for."""

_APPLY = vars(torch.autograd.Function)["apply"].__func__
_APPLY = getattr(_APPLY, "_fastgraph_upstream", _APPLY)  # on several ranks it is replaced

_ACTIONS = {
    torch.amp.autocast_mode.autocast.__enter__.__code__: "it switches autocast on",
    Tensor.register_hook.__code__: "it registers a hook of gradients",
    _APPLY.__code__: "it has a gradient of its own",
}

_CHANGING, _UNKNOWN, _ATTRIBUTES = object(), object(), object()


def functions_in(value: Any) -> Iterator[types.FunctionType]:
    """The Python functions in a value that :func:`frozen` takes, or in a descriptor."""
    if isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, (staticmethod, classmethod)):
        yield from functions_in(value.__func__)
    elif isinstance(value, property):
        yield from functions_in(value.fget)
    elif isinstance(value, functools.partial):
        yield from functions_in((value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, (tuple, list, set, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from functions_in(part)


def classes_in(value: Any) -> Iterator[type]:
    """The classes of users in a value that :func:`frozen` takes."""
    if isinstance(value, type):
        if not issubclass(value, (enum.Enum, nn.Module)) and not is_trusted(value.__module__):
            yield value
    elif isinstance(value, (tuple, list, set, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from classes_in(part)


@dataclass(frozen=True)
class _Named:
    """A name and the value that it had.

    Attributes:
        holder: the class, dictionary or cell where it is looked up; a marker for a module.
        name: in the holder.
        value: as it was, if that cannot change; otherwise a marker that nothing is.
        frozen: its frozen form, or a marker if it has none.
    """

    holder: Any
    name: str
    value: Any
    frozen: Any

    @classmethod
    def of(cls, holder: Any, name: str, value: Any) -> _Named:
        """The name with its present value."""
        is_fixed = type(value) in PLAIN or isinstance(value, (type, types.FunctionType))
        found = frozen(value, is_attribute=holder is _ATTRIBUTES)
        return cls(holder, name, value if is_fixed else _CHANGING, found)

    def holds(self) -> bool:
        """True if the value is what it was."""
        if isinstance(self.holder, type):
            return self.is_same(getattr(self.holder, self.name, MISSING))
        if isinstance(self.holder, types.CellType):
            return self.is_same(self.holder.cell_contents)
        return self.is_same(self.holder.get(self.name, MISSING))

    def is_same(self, value: Any) -> bool:
        """True if a value is what this was."""
        if value is self.value or (type(value) is types.MethodType and value == self.value):
            return True
        try:
            found = frozen(value, is_attribute=self.holder is _ATTRIBUTES)
            return bool(found == self.frozen)
        except UnknownError:
            return self.frozen is _UNKNOWN and value is not MISSING


@dataclass(frozen=True)
class _Module:
    """The state of a module within a layer, without the values of its tensors."""

    path: tuple[str, ...]
    kind: type
    children: tuple[str, ...]
    tensors: tuple[tuple[int, str, Any], ...]
    attributes: tuple[tuple[str, Any, _Named], ...]  # with the name and the value of each
    absent: frozenset[str]

    def holds(self, layer: nn.Module | None) -> bool:
        """True if the layer has this module, in this state."""
        # Without generators and calls: this is asked at every call, of every module.
        module: Any = layer
        path = self.path
        for name in path:
            module = module._modules.get(name)
            if module is None:
                return False
        if type(module) is not self.kind:
            return False
        attributes = module.__dict__
        children = attributes["_modules"]
        parameters, buffers = attributes["_parameters"], attributes["_buffers"]
        tensors = self.tensors
        if (
            ((children or self.children) and tuple(children) != self.children)
            or len(parameters) + len(buffers) != len(tensors)
            or not attributes.keys().isdisjoint(self.absent)
        ):
            return False
        if path and any(_hooks_of(attributes)):
            return False
        for store, name, described in tensors:
            tensor = (buffers if store else parameters).get(name, MISSING)
            kind = type(tensor)
            if kind is nn.Parameter or kind is Tensor:  # `_described`
                if _description_of(tensor) != described:
                    return False
            elif (tensor if tensor is None or tensor is MISSING else kind) is not described:
                return False
        for name, expected, named in self.attributes:
            value = attributes.get(name, MISSING)
            if value is not expected and not named.is_same(value):
                return False
        return True


_STORES = ("_parameters", "_buffers")


_hooks_of = itemgetter(
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
)
"""Those of the attributes of a module."""

_description_of = attrgetter("shape", "dtype", "device", "layout")


def hooked_module(layer: nn.Module) -> str | None:
    """The path of a module within a layer that has hooks, which are not to see what is traced."""
    modules = layer.named_modules(remove_duplicate=False)
    return next((path for path, module in modules if path and any(_hooks_of(vars(module)))), None)


def _is_stateless(module: nn.Module) -> bool:
    """True for a module of torch that has neither tensors nor other modules, as activations."""
    stores = (module._parameters, module._buffers, module._modules)
    return is_trusted(type(module).__module__) and not any(stores)


def _described(tensor: Any) -> Any:
    kind = type(tensor)
    if kind is nn.Parameter or kind is Tensor:
        return _description_of(tensor)
    return tensor if tensor is None or tensor is MISSING else kind


@dataclass(frozen=True)
class Guard:
    """The state in which a message was traced.

    Attributes:
        modules: of its layer.
        named: values that its code names elsewhere.
    """

    modules: tuple[_Module, ...]
    named: tuple[_Named, ...]

    def holds(self, layer: nn.Module | None) -> bool:
        """True if tracing the message of a layer would see the same."""
        for module in self.modules:  # without generators, as there
            if not module.holds(layer):
                return False
        return all(n.holds() for n in self.named)


@dataclass
class Reading:
    """A message whose code is seen as it runs.

    Attributes:
        function: the message, a method of its layer or a function.
        layer: the module whose state it reads, if there is one.
        is_method: true if the layer is the first argument.
        has_variables: false if whoever calls it compares its defaults and the variables of
            functions around it.
        reason: why its reading cannot be followed, if that is so.
        left: the attributes of its layer that a method sets and does not read.
    """

    function: types.FunctionType
    layer: nn.Module | None
    is_method: bool = True
    has_variables: bool = True
    reason: str | None = None
    left: set[str] = field(default_factory=set)
    _codes: dict[int, types.CodeType] = field(default_factory=dict)
    _names: set[str] = field(default_factory=set)
    _globals: list[tuple[dict[str, Any], str, tuple[str, ...]]] = field(default_factory=list)
    _users: list[types.CodeType] = field(default_factory=list)
    _classes: set[type] = field(default_factory=set)

    @property
    def __self__(self) -> object:
        """The layer."""
        return self.layer

    def __call__(self, *arguments: object, **named: object) -> Any:
        """The message.

        Raises:
            Refused: from the message, where its reading cannot be followed.
        """
        # What collects garbage calls others' code, which is none of the message.
        is_collecting = gc.isenabled()
        gc.disable()
        sys.setprofile(self._seen)
        try:
            if self.is_method:
                return self.function(self.layer, *arguments, **named)
            return self.function(*arguments, **named)
        finally:
            sys.setprofile(None)
            if is_collecting:
                gc.enable()

    def _seen(self, frame: types.FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "c_call":
            known = id(argument)
            for functions, what in _REFUSED:
                if known in functions and not self._is_of_library(frame):
                    self._refuse(f"it {what} ({argument.__name__})")
        elif event == "call" and id(code) not in self._codes:
            self._codes[id(code)] = code
            package = str(frame.f_globals.get("__name__")).partition(".")[0]
            if package == _OWN:
                return
            if code in _ACTIONS:
                self._refuse(_ACTIONS[code])
            caller = frame.f_back
            if code in torch_settings.CODES and not (caller and self._is_of_library(caller)):
                self._refuse(f"it {_SETTING} ({code.co_name})")
            is_own = code is self.function.__code__
            if is_own and self.is_method:
                self.left = only_set(code)
            names = set(code.co_names)
            self._names |= names - self.left if is_own else names
            self._names.update(strings_in(code.co_consts))
            if package not in TRUSTED:
                self._read(code, frame.f_globals)

    @staticmethod
    def _is_of_library(frame: types.FrameType) -> bool:
        name = str(frame.f_globals.get("__name__"))
        return name.partition(".")[0] in (_OWN, *TRUSTED)

    def _refuse(self, reason: str) -> None:
        self.reason = self.reason or reason
        raise Refused(reason)

    def _read(self, code: types.CodeType, variables: dict[str, Any]) -> None:
        """Remember what the code of a user names, before it runs."""
        self._users.append(code)
        for name in sorted(_LOOKUPS.intersection(code.co_names)):
            self._refuse(f"it looks names up ({name})")
        for name in sorted(_STORAGE.intersection(code.co_names)):
            self._refuse(f"it looks at how tensors are stored ({name})")
        instructions = [i for i in dis.get_instructions(code) if i.opname != "CACHE"]
        for position, instruction in enumerate(instructions):
            operation, name = instruction.opname, instruction.argval
            if operation in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                self._refuse(f"it sets the global variable {name}")
            is_left = code is self.function.__code__ and name in self.left
            if operation in ("STORE_ATTR", "DELETE_ATTR") and not is_left:
                self._refuse(f"it sets the attribute {name}")
            if operation in ("STORE_DEREF", "DELETE_DEREF") and name in code.co_freevars:
                self._refuse(f"it sets the variable {name} of another function")
            if operation == "IMPORT_NAME" and not is_trusted(name):
                self._refuse(f"it imports {name}")
            if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
                chain = []
                for follower in instructions[position + 1 :]:
                    if follower.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                        break
                    chain.append(follower.argval)
                self._globals.append((variables, name, tuple(chain)))
                changing = changing_global(variables, name, chain)
                if changing is not None:  # before the code runs, which may change it
                    self._refuse(changing)

    def compared_numbers(self) -> frozenset[int]:
        """The numbers with which code of users may compare the sizes of tensors."""
        if not compares_sizes(self._users):
            return frozenset()
        found = [code.co_consts for code in self._users]
        found += [tuple(variables.get(name) for variables, name, _ in self._globals)]
        modules = [] if self.layer is None else list(self.layer.modules())
        found += [tuple(v for n, v in vars(m).items() if n in self._names) for m in modules]
        cells = dict.fromkeys(self.function.__closure__ or ())
        found += [(cell.cell_contents,) for cell in cells if cell != types.CellType()]
        return frozenset(itertools.chain.from_iterable(map(numbers_in, found)))

    def names(self, name: str) -> bool:
        """True if code that was read names a global variable or a builtin."""
        return any(name == known for _, known, _ in self._globals)

    def guard(self, layer: nn.Module | None) -> Guard:
        """The state of a layer and of everything else that was read.

        What may change unnoticed becomes the reason of the reading.

        Args:
            layer: whose message was traced, if there is one.
        """
        met: list[Any] = [self.function]
        named: list[_Named] = []
        modules = () if layer is None else tuple(self._modules(layer, met, named))
        for variables, name, chain in self._globals:
            self._follow(variables, name, chain, met, named)
        self._read_functions(met, named)
        unique = {(id(n.holder), n.name): n for n in named}
        return Guard(modules, tuple(unique.values()))

    def _modules(self, layer: nn.Module, met: list[Any], named: list[_Named]) -> Iterator[_Module]:
        found = list(layer.named_modules(remove_duplicate=False))
        tensors = [
            t
            for many in (layer.named_parameters, layer.named_buffers)
            for _, t in many(remove_duplicate=False)
        ]
        # One activation of torch may stand in many places.
        own = [module for _, module in found if not _is_stateless(module)]
        if len(set(map(id, tensors))) < len(tensors) or len(set(map(id, own))) < len(own):
            self._doubt("its layer has one module or parameter in several places")
        kinds = {type(module) for _, module in found}
        for kind in kinds:
            for owner in kind.__mro__:
                self._of_class(kind, owner, met, named)
        for path, module in found:
            attributes = vars(module)
            read = sorted(self._names & attributes.keys() - _OF_MODULES)
            yield _Module(
                tuple(path.split(".")) if path else (),
                type(module),
                tuple(module._modules),
                tuple(
                    (number, name, _described(tensor))
                    for number, store in enumerate(_STORES)
                    for name, tensor in attributes[store].items()
                ),
                tuple(
                    (known.name, known.value, known)
                    for known in self._known(_ATTRIBUTES, attributes, read, path, met)
                ),
                frozenset(self._names - attributes.keys()),
            )

    def _of_class(self, kind: type, owner: type, met: list[Any], named: list[_Named]) -> None:
        package = owner.__module__.partition(".")[0]
        if (package in TRUSTED and package not in PACKAGES) or owner is object:
            return
        own = owner.__dict__
        for name in sorted((self._names | self.left) & own.keys()):
            value = own[name]
            functions = list(functions_in(value))
            if functions:
                # Of a library's functions only those that ran matter: others come with routes.
                if package in TRUSTED and not any(id(f.__code__) in self._codes for f in functions):
                    continue
                met.extend(functions)
                named.append(_Named(kind, name, getattr(kind, name), MISSING))
            elif package not in TRUSTED and not name.startswith("__"):
                value = getattr(kind, name)
                named += self._known(kind, {name: value}, [name], owner.__name__, met)

    def _follow(
        self,
        variables: Mapping[str, Any],
        name: str,
        chain: tuple[str, ...],
        met: list[Any],
        named: list[_Named],
    ) -> None:
        """The values of a global variable and of attributes of it."""
        text = name
        value = variables.get(name, MISSING)
        if value is MISSING:  # a builtin, or an error
            named.append(_Named(variables, name, MISSING, MISSING))
            return
        while True:
            if isinstance(value, types.ModuleType) and not is_trusted(value.__name__):
                if not chain:
                    self._doubt(f"it takes the module {text} as a value")
                    return
                named.append(_Named(variables, name, value, MISSING))
            else:
                path = text.rpartition(".")[0]
                named += self._known(variables, variables, [name], path, met)
                is_class = isinstance(value, type) and not issubclass(value, enum.Enum)
                if not is_class or is_trusted(value.__module__) or not chain:
                    return
            name, *rest = chain
            chain, text = tuple(rest), f"{text}.{name}"
            owners = value.__mro__ if isinstance(value, type) else (value,)
            owner = next((o for o in owners if name in vars(o)), None)
            if owner is None or (owner is not value and is_trusted(owner.__module__)):
                return
            variables = vars(owner)
            value = variables[name]
            if isinstance(value, staticmethod):
                met.extend(functions_in(value))
                named.append(_Named(variables, name, value, MISSING))
                return

    def _read_functions(self, met: list[Any], named: list[_Named]) -> None:
        """The defaults of functions, and the variables that they take from those around them."""
        executed = {id(code) for code in self._users}
        made = {id(c) for code in self._codes.values() for c in codes_in(code)}
        for function in met:  # which grows
            if id(function.__code__) not in executed:
                continue
            made.add(id(function.__code__))
            for name in sorted(self._names & vars(function).keys()):
                text = f"{function.__name__}.{name}"
                self._doubt(f"it reads {text}, of a function, which may change unnoticed")
            defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
            names = function.__code__.co_freevars
            cells = dict(zip(names, function.__closure__ or (), strict=True))
            if function is self.function and not self.has_variables:
                for value in (*defaults, *(cell.cell_contents for cell in cells.values())):
                    named += self._met_in(value, met)
                continue
            for default in defaults:
                list(self._known({}, {"": default}, [""], function.__name__, met))
            for name, cell in cells.items():
                named += self._known(cell, {name: cell.cell_contents}, [name], "", met)
        for code in self._users:
            if id(code) not in made:
                self._doubt(f"nobody can tell where {code.co_name} comes from")

    def _known(
        self,
        holder: Any,
        values: Mapping[str, Any],
        names: Iterable[str],
        path: str,
        met: list[Any],
    ) -> Iterator[_Named]:
        """Those of some names whose values are seen to change."""
        for name in names:
            yield from self._met_in(values[name], met)
            try:
                yield _Named.of(holder, name, values[name])
            except UnknownError as unknown:
                text = f"{path}.{name}".strip(".")
                self._doubt(f"it reads {text}, {unknown} that may change unnoticed")
                yield _Named(holder, name, _CHANGING, _UNKNOWN)

    def _met_in(self, value: Any, met: list[Any]) -> list[_Named]:
        """The attributes of classes of users in a value, whose functions are met, too."""
        met.extend(functions_in(value))
        found: list[_Named] = []
        for kind in classes_in(value):
            if kind not in self._classes:
                self._classes.add(kind)
                for owner in kind.__mro__:
                    self._of_class(kind, owner, met, found)
        return found

    def _doubt(self, reason: str) -> None:
        self.reason = self.reason or reason


def unread(function: Callable[..., Any], *arguments: object) -> Any:
    """The result of a function that a message calls, of which nothing is the message's own."""
    if not is_reading():
        return function(*arguments)
    seen = sys.getprofile()
    sys.setprofile(None)
    try:
        return function(*arguments)
    finally:
        sys.setprofile(seen)


def is_reading() -> bool:
    """True in a message that is seen as it runs."""
    return isinstance(getattr(sys.getprofile(), "__self__", None), Reading)
