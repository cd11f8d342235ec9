"""The names and constants in the bytecode of functions."""

from __future__ import annotations

import dis
import itertools
import types
from collections.abc import Iterable, Iterator
from typing import Any


def strings_in(constants: Iterable[Any]) -> Iterator[str]:
    """The strings among constants, and in tuples of them."""
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            yield from strings_in(constant)


def numbers_in(constants: Iterable[Any]) -> Iterator[int]:
    """The integers among constants, and in tuples and sets of them."""
    for constant in constants:
        if isinstance(constant, int) and not isinstance(constant, bool):
            yield constant
        elif isinstance(constant, (tuple, frozenset)):
            yield from numbers_in(constant)


_OF_SIZES = frozenset(("shape", "size", "numel", "nelement", "len"))


def compares_sizes(codes: Iterable[types.CodeType]) -> bool:
    """True if there are comparisons in codes that name the sizes of tensors."""
    known = list(codes)
    operations = (i.opname for code in known for i in dis.get_instructions(code))
    return any(not _OF_SIZES.isdisjoint(code.co_names) for code in known) and any(
        operation in ("COMPARE_OP", "CONTAINS_OP") for operation in operations
    )


def only_set(code: types.CodeType) -> set[str]:
    """The attributes of its first argument that a method sets and does not name otherwise."""
    instructions = [i for i in dis.get_instructions(code) if i.opname != "CACHE"]
    itself = code.co_varnames[:1]
    if any(i.opname in ("STORE_FAST", "DELETE_FAST") and i.argval in itself for i in instructions):
        return set()
    found: set[str] = set()
    others: set[str] = set()
    for before, instruction in itertools.pairwise(instructions):
        if instruction.opcode not in dis.hasname:
            continue
        # Several variables are loaded by one instruction, from Python 3.13 on.
        loaded = before.argval if isinstance(before.argval, tuple) else (before.argval,)
        is_own = before.opname.startswith("LOAD_FAST") and loaded[-1:] == itself
        is_set = instruction.opname == "STORE_ATTR" and not instruction.is_jump_target
        (found if is_set and is_own else others).add(instruction.argval)
    return found - others


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """The codes of functions that a code makes, at any depth."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from codes_in(constant)
