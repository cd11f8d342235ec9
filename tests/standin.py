"""A device for tests: the one that torch leaves free, on which host memory stands for a GPU's.

Its operations are those of the CPU, on the same memory. But a tensor of it is on another device:
what mixes it with tensors on the CPU is an error, as it is with a GPU, and what a GPU would have
the host wait for is recorded. No C++ is compiled: memory changes its device by DLPack, and one
function in Python takes all operations (``torch.library.Library.fallback``).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _from_dlpack, _to_dlpack
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

DEVICE = "standin"

_HOST, _DEVICE = 1, 12  # kDLCPU and kDLExtDev, as DLPack numbers them
_ON_HOST = DispatchKeySet(DispatchKey.CPU)

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]

WAITS: list[str] | None = None
"""The operations that had the host wait for the device, while somebody records them."""

RANDOM: Tensor | None = None
"""The state of a generator of its own; without one it draws what the CPU would draw."""

_ASKS_FOR_VALUES = frozenset(
    f"aten::{name}"
    for name in (
        *("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique_dim"),
        *("_unique", "_unique2", "unique_consecutive", "bincount", "histc", "repeat_interleave"),
    )
)
"""Operations whose result, or its shape, is of values that the device has."""

ELSEWHERE = "elsewhere"

_BETWEEN = ("torch", "functools", "contextlib")
_OF_TESTS = (__name__, "tests.late_collectives", "tests.collectives", "tests.dist.on_device")
"""Modules through which a call goes to the device."""

_library: torch.library.Library | None = None

PROPERTIES = SimpleNamespace(
    name="stand-in", multi_processor_count=4, total_memory=2**32, clock_rate=1_000_000,
    memory_clock_rate=1_000_000, memory_bus_width=64,
)  # fmt: skip
"""Those of the device, which is small."""

LAG = 16
"""Operations by which the device is behind the host: far less than there are in a step."""

_SECONDS_OF_ITS_OWN, _SECONDS_OF_ELEMENT = 1e-6, 1e-7
"""Of an operation, by the clock of the device."""


class _Clock:
    """The work that the device was told to do: how many operations, and how long they take there.

    Attributes:
        issued: operations so far.
        done: how many of them are, for certain.
        seconds: in which it does them, one after the other.
        copies: to the host, which have not arrived: the number of the operation, memory of the host
            that must not be read yet, and what it will hold.
    """

    def __init__(self) -> None:
        self.issued, self.done, self.seconds = 0, 0, 0.0
        self.copies: list[tuple[int, Tensor, Tensor]] = []

    def advance(self, elements: int) -> None:
        """Have one operation more done, on so many elements."""
        self.issued += 1
        self.done = max(self.done, self.issued - LAG)
        self.seconds += _SECONDS_OF_ITS_OWN + _SECONDS_OF_ELEMENT * elements

    def arrive(self, until: int) -> None:
        """Have an operation be done, and copies be there that were issued before it."""
        self.done = max(self.done, until)
        for number, target, values in self.copies:
            if number <= until:
                target.copy_(values)
        self.copies = [copy for copy in self.copies if copy[0] > until]


CLOCK = _Clock()


class Stream:
    """In which work is done in order."""

    def synchronize(self) -> None:
        """Wait for its end."""
        CLOCK.arrive(CLOCK.issued)


_STREAM = Stream()

BETWEEN: list[Callable[[], None]] = []
"""Called between each two operations of the device."""


class Event:
    """A place in the device's work, as ``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._has_time, self._number, self._seconds = enable_timing, -1, 0.0

    def record(self, stream: object = None) -> None:
        """Be where the device will be after what it was told to do so far."""
        self._number, self._seconds = CLOCK.issued, CLOCK.seconds

    def query(self) -> bool:
        """True if the device has come here."""
        return self._number <= CLOCK.done

    def synchronize(self) -> None:
        """Wait until it has."""
        assert self._number >= 0, "an event that was never recorded"
        if not self.query():
            _wait("an event")
        CLOCK.arrive(self._number)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds of the device from here to another event."""
        assert self._has_time and end._has_time, "made without enable_timing"
        assert self.query() and end.query(), "the device has not come here"
        return 1e3 * (end._seconds - self._seconds)


class _Module(torch.utils.backend_registration._DummyBackendModule):
    """``torch.standin``."""

    @staticmethod
    def set_device(device: object) -> None:
        """There is one."""

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        """Those of autocast."""
        return [torch.bfloat16, torch.float16]

    @staticmethod
    def get_rng_state(device: object = None) -> Tensor:
        """That of the host, of which its operations draw by default."""
        return torch.get_rng_state() if RANDOM is None else RANDOM

    @staticmethod
    def set_rng_state(state: Tensor, device: object = None) -> None:
        """See :meth:`get_rng_state`."""
        global RANDOM
        if RANDOM is None:
            torch.set_rng_state(state)
        else:
            RANDOM = state.clone()

    @staticmethod
    def get_device_properties(device: object = None) -> SimpleNamespace:
        """As of a GPU."""
        return PROPERTIES

    @staticmethod
    def memory_allocated(device: object = None) -> int:
        """Bytes of tensors."""
        return 2**19

    @staticmethod
    def max_memory_allocated(device: object = None) -> int:
        """Bytes of tensors, at most."""
        return 2**20

    @staticmethod
    def mem_get_info(device: object = None) -> tuple[int, int]:
        """Bytes that are free, and all."""
        return 2**30, 2**32

    @staticmethod
    def memory_reserved(device: object = None) -> int:
        """Bytes that torch keeps for this process."""
        return 2**20

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """As ``torch.manual_seed`` does besides."""
        global RANDOM
        if RANDOM is not None:
            RANDOM = torch.Generator().manual_seed(seed).get_state()

    Event = Event

    Stream = Stream

    @staticmethod
    def current_stream(device: object = None) -> Stream:
        """The stream that work goes to now; all threads have the same."""
        return _STREAM

    @staticmethod
    @contextmanager
    def stream(stream: Stream) -> Iterator[None]:
        """Within, work goes there."""
        global _STREAM
        before, _STREAM = _STREAM, stream
        try:
            yield
        finally:
            _STREAM = before


def install() -> None:
    """Have torch know the device, once in a process, before its first backward pass."""
    global _library
    if _library is None:
        _setup_privateuseone_for_python_backend(DEVICE, backend_module=_Module())
        _library = torch.library.Library("_", "IMPL")
        _library.fallback(_run, "PrivateUse1")
        clone = torch.UntypedStorage.clone

        def cloned(x: torch.UntypedStorage) -> torch.UntypedStorage:
            return _cloned(x) if x.device.type == DEVICE else clone(x)

        torch.UntypedStorage.clone = cloned  # type: ignore[method-assign]
        torch.serialization.register_package(1, lambda _: None, _restored)


@contextmanager
def waits() -> Iterator[list[str]]:
    """The operations within that make the host wait for the device, each with where it is from."""
    global WAITS
    found: list[str] = []
    before, WAITS = WAITS, found
    try:
        yield found
    finally:
        WAITS = before


def on_host(x: Tensor) -> Tensor:
    """The same memory as a tensor on the CPU; nothing waits, as it is not what a program does."""
    return _as(x, _HOST) if x.device.type == DEVICE else x


def on_device(x: Tensor) -> Tensor:
    """The same memory as a tensor on the device."""
    return _as(x, _DEVICE)


def _cloned(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A copy, for which torch would allocate memory of the device."""
    of_host = on_host(on_device(torch.empty(0, dtype=torch.uint8)).set_(storage))
    return on_device(of_host.clone()).untyped_storage()


def _restored(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    """The tensors that ``torch.load`` has read, where it was when it was saved."""
    if location.partition(":")[0] != DEVICE:
        return None
    of_host = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    return on_device(of_host).untyped_storage()


def lent_to_host(capsule: Any) -> Any:
    """A capsule of DLPack that says that its tensor is on the CPU."""
    return _moved(capsule, _HOST)


def _as(x: Tensor, kind: int) -> Tensor:
    return _from_dlpack(_moved(_to_dlpack(x.detach()), kind))


def _moved(capsule: Any, kind: int) -> Any:
    of_device = _pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)
    ctypes.c_int32.from_address(of_device).value = kind
    return capsule


def _run(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    name = op._schema.name
    if name in ("aten::_copy_from", "aten::_copy_from_and_resize"):
        return _copied(*args, **kwargs)
    if name in _ASKS_FOR_VALUES and kwargs.get("output_size") is None:
        _wait(name)
    if _is_view(op) or name == "aten::set_":
        return op.redispatch(_ON_HOST, *args, **kwargs)  # which leaves its device to a view
    _check_one_device(op, args, kwargs)
    pairs: dict[int, tuple[Tensor, Tensor]] = {}

    def lent(x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("cpu")
        if not isinstance(x, Tensor) or x.device.type != DEVICE:
            return x
        if id(x) not in pairs:  # what has no element may be given some
            pairs[id(x)] = x, on_host(x) if x.numel() else torch.empty_like(x, device="cpu")
        return pairs[id(x)][1]

    args = [_tensor_of(x, a) for x, a in zip(args, op._schema.arguments, strict=False)]
    for happen in BETWEEN:
        happen()
    with _random(op):
        found = op(*tree_map(lent, args), **tree_map(lent, kwargs))
    for given, host in pairs.values():
        if host.shape != given.shape:  # the result has another shape than the memory for it
            _become(given, host)
    leaves = [x for x in tree_leaves(found) if isinstance(x, Tensor)]
    CLOCK.advance(sum(x.numel() for x in leaves))
    owners = {id(host): given for given, host in pairs.values()}
    return tree_map(
        lambda x: owners.get(id(x), on_device(x)) if isinstance(x, Tensor) else x,
        tuple(found) if isinstance(found, tuple) else found,
    )


@contextmanager
def _random(op: torch._ops.OpOverload) -> Iterator[None]:
    """Have an operation draw of the device's own generator, if there is one."""
    global RANDOM
    if RANDOM is None or torch.Tag.nondeterministic_seeded not in op.tags:
        yield
        return
    of_host = torch.get_rng_state()
    torch.set_rng_state(RANDOM)
    yield
    RANDOM = torch.get_rng_state()
    torch.set_rng_state(of_host)


def _tensor_of(x: Any, argument: torch.Argument) -> Any:
    """A number that stands for a tensor: torch hands it to Python as a number."""
    is_number = isinstance(x, (int, float)) and str(argument.type) == "Tensor"
    return torch.tensor(x) if is_number else x


def _is_view(op: torch._ops.OpOverload) -> bool:
    returned = [result.alias_info for result in op._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)


def _check_one_device(op: torch._ops.OpOverload, args: Any, kwargs: Any) -> None:
    """Refuse tensors on the CPU, but for a single number in an operation by elements.

    An index on the CPU torch sends to the device, for which others may have the host wait.
    """
    if op._schema.name == "aten::index" and _place() == ELSEWHERE:
        args = args[:1]
    for x in tree_leaves((args, kwargs)):
        if isinstance(x, Tensor) and x.device.type != DEVICE:
            if x.dim() == 0 and torch.Tag.pointwise in op.tags:
                continue
            raise RuntimeError(
                f"{op}: expected all tensors to be on the same device, got one of shape "
                f"{list(x.shape)} on {x.device} and others on {DEVICE}"
            )


def _copied(x: Tensor, into: Tensor, non_blocking: bool = False) -> Tensor:
    CLOCK.advance(x.numel())
    if x.device != into.device and not non_blocking:
        _wait(f"copy of {list(x.shape)} from {x.device} to {into.device}")
        CLOCK.arrive(CLOCK.issued)
    target = on_host(into)
    if non_blocking and into.device.type != DEVICE:
        CLOCK.copies.append((CLOCK.issued, target, on_host(x).clone()))
        target.view(-1).view(torch.uint8).fill_(255)  # whoever reads it now is to notice
    else:
        target.copy_(on_host(x))
    return into


def _become(given: Tensor, host: Tensor) -> None:
    storage = on_device(host.contiguous()).untyped_storage()
    set_ = torch.ops.aten.set_.source_Storage_storage_offset
    set_.redispatch(_ON_HOST, given, storage, 0, host.shape, host.contiguous().stride())


def _wait(what: str) -> None:
    if WAITS is not None:
        WAITS.append(f"{what} at {_place()}")


def _place() -> str:
    """The line of the package that waits, or :data:`ELSEWHERE`, for what others ask torch for."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        root = name.partition(".")[0]
        if root == "fastgraph":
            return f"{name}:{frame.f_lineno}"
        if root not in _BETWEEN and name not in _OF_TESTS:
            break
        frame = frame.f_back
    return ELSEWHERE
