"""The table of kernels by operator, device and dtype: resolved once, looked up at each call."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Mapping, Sequence

import torch

from fastgraph.plugins.backend import (
    FALLBACK_PRIORITY,
    FLOATING,
    Backend,
    Builder,
    BuildingBackend,
    Kernel,
    VerifiedBackend,
)
from fastgraph.plugins.hookspecs import plugin_manager
from fastgraph.plugins.refusal import Refusal
from fastgraph.registry.operators import SIGNATURES
from fastgraph.registry.signatures import check_builder, check_signature

DEVICE_TYPES = ("cpu", "cuda", "mps", "xpu")
"""Types of devices for which kernels are looked for in backends."""

Failures = Mapping[tuple[str, torch.dtype], str]
"""The reasons why a backend must not compute, by operator and dtype."""


class Registry:
    """Kernels by (operator, device type, dtype)."""

    def __init__(self) -> None:
        self._backends: dict[str, Backend] | None = None
        self._selected: str | None = None
        self._kernels: dict[tuple[str, str, torch.dtype], Kernel] = {}
        self._companions: dict[tuple[str, str, torch.dtype], Kernel | None] = {}
        self._builders: dict[str, Builder] = {}
        self._checked: set[type] = set()
        self._wanted: frozenset[tuple[str, str, torch.dtype]] = frozenset()
        self._hints: dict[str, str] = {}
        self._verify: Callable[[VerifiedBackend], Failures] | None = None
        self._verdicts: dict[str, Failures] = {}
        self._unverified: frozenset[str] = frozenset()

    def verify_with(self, verify: Callable[[VerifiedBackend], Failures]) -> None:
        """Set the function that checks a backend's kernels and returns those that failed."""
        self._verify = verify

    @property
    def backends(self) -> dict[str, Backend]:
        """All known backends by name, highest priority first."""
        if self._backends is None:
            found: dict[str, Backend] = {}
            offered = [b for bs in plugin_manager().hook.fastgraph_backends() for b in bs]
            for backend in sorted(offered, key=lambda b: -b.priority):
                if not isinstance(backend, Backend):
                    raise TypeError(
                        "fastgraph_backends must return objects with name, priority, unavailable() "
                        f"and kernel(), got {backend!r}"
                    )
                if backend.name in found:
                    raise ValueError(f"two backends are called {backend.name!r}")
                found[backend.name] = backend
            self._backends = found
        return self._backends

    def select(self, name: str | None) -> None:
        """Use one backend for everything, or the best available one for each operator (``None``).

        Raises:
            ValueError: no backend has this name, or it is unavailable on this machine.
            TypeError: a kernel that would be used does not take what its operator passes.
        """
        if name is not None:
            if name not in self.backends:
                close = difflib.get_close_matches(name, self.backends, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ValueError(
                    f"backend must be one of {list(self.backends)} or None, got {name!r}{hint}"
                )
            why_not = self.backends[name].unavailable()
            if why_not is not None:
                raise ValueError(f"backend {name!r} is unavailable: {why_not}")
        self._selected = name
        self._look_up()

    def _look_up(self) -> None:
        """Resolve the kernels that layers are routed to, given the verdicts so far."""
        self._kernels.clear()
        self._companions.clear()
        self._builders.clear()
        wanting = self._wanting()
        waiting = [backend for backend in wanting if self._waits(backend)]
        # Once for all keys: whether a backend is available may take looking for files.
        usable = self._usable([backend for backend in wanting if backend not in waiting])
        self._wanted = frozenset(
            key
            for key in itertools.product(SIGNATURES, DEVICE_TYPES, FLOATING)
            if self._first_kernel(usable, *key)
        )
        self._hints = {device_type: self._hint(device_type) for device_type in DEVICE_TYPES[1:]}
        self._unverified = frozenset(
            device_type
            for backend, device_type in itertools.product(waiting, DEVICE_TYPES)
            if backend.kernel("spmm", device_type, torch.float32) is not None
        )

    def _waits(self, backend: Backend) -> bool:
        """True if a backend computes nothing until its kernels are verified."""
        needs = isinstance(backend, VerifiedBackend) and backend.name != self._selected
        return needs and backend.name not in self._verdicts and backend.unavailable() is None

    def _verify_for(self, device_type: str) -> None:
        """Verify the backends that wait for it: once in a process, whatever the verdict."""
        for backend in self._wanting():
            serves = backend.kernel("spmm", device_type, torch.float32) is not None
            if serves and self._waits(backend) and isinstance(backend, VerifiedBackend):
                assert self._verify is not None
                self._verdicts[backend.name] = self._verify(backend)
        self._look_up()

    def _failure(self, backend: str, operator: str, dtype: torch.dtype) -> str | None:
        """The reason why a backend failed for an operator; both its passes share a verdict."""
        if backend == self._selected or backend not in self._verdicts:
            return None
        return self._verdicts[backend].get((operator.removesuffix("_backward"), dtype))

    def _hint(self, device_type: str) -> str:
        """The reasons why the backends made for this device, not for the CPU, do not compute."""
        hint = ""
        for backend in self._made_for(device_type):
            why_not = backend.unavailable()
            if why_not is not None:
                hint += f"; {backend.name} is unavailable: {why_not}"
            elif backend.priority < 0:
                hint += f"; {backend.name} would on request"
        return hint

    @property
    def selected(self) -> str | None:
        """The backend chosen by name, or ``None``."""
        return self._selected

    def kernel(self, operator: str, device_type: str, dtype: torch.dtype) -> Kernel:
        """The kernel to run; the reference's where there is no other.

        There may be a kernel even where :meth:`refusal` leaves layers to upstream: the backward
        pass of a forward pass within ``enabled(backend=...)`` may run after the block. Then a
        kernel made for the device is better than the reference's, which stores every message.

        Raises:
            NotImplementedError: the selected backend has no such kernel.
        """
        key = (operator, device_type, dtype)
        found = self._kernels.get(key)
        if found is None:
            found = self._kernels[key] = self._resolve(*key)
        return found

    def companion(self, operator: str, of: str, dtype: torch.dtype) -> Kernel | None:
        """The kernel for the CPU that the backend which computes an operator has besides.

        Args:
            operator: the companion's name.
            of: what it does for some arguments.
            dtype: of the features.
        """
        key = (operator, "cpu", dtype)
        if key not in self._companions:
            backends = self._resolving("cpu")
            asked = ([b] for b in backends if self._first_kernel([b], of, "cpu", dtype))
            self._companions[key] = self._first_kernel(next(asked, []), *key)
        return self._companions[key]

    def builder(self, device_type: str) -> Builder:
        """The builder of graphs on a device: another backend's if the selected one has none."""
        found = self._builders.get(device_type)
        if found is None:
            found = self._builders[device_type] = self._first_builder(device_type)
        return found

    def refusal(self, operator: str, device_type: str, dtype: torch.dtype) -> Refusal | None:
        """The reason to leave an operator to upstream, or ``None`` if a backend computes it.

        The first call for a device verifies the backends on it. Later calls are a look-up and
        nothing else, which Dynamo can trace through.
        """
        if (operator, device_type, dtype) in self._wanted:
            return None
        hint = self._hints.get(device_type, "")
        if device_type in self._unverified:
            if not torch.compiler.is_compiling():
                self._verify_for(device_type)
                return self.refusal(operator, device_type, dtype)
            hint += "; a call that is not compiled, or `python -m fastgraph check`, verifies them"
        for verdict in self._verdicts.values():
            if (operator, dtype) in verdict:
                hint += f"; {verdict[operator, dtype]}"
        return Refusal(f"no backend computes {operator} for {dtype} on {device_type}{hint}")

    def routed(self, device_type: str) -> list[str]:
        """The operators that layers are routed to on a device, each with a dtype, in order."""
        return sorted(
            f"{operator} of {dtype}"
            for operator, of_device, dtype in self._wanted
            if of_device == device_type
        )

    def _wanting(self) -> list[Backend]:
        """Backends to which layers are routed."""
        if self._selected is not None:
            return [self.backends[self._selected]]
        return [backend for backend in self.backends.values() if backend.priority >= 0]

    def _made_for(self, device_type: str) -> list[Backend]:
        """Backends for this device, and not for the CPU."""
        found = []
        for backend in self.backends.values():
            serves = (backend.kernel("spmm", t, torch.float32) for t in (device_type, "cpu"))
            if [kernel is not None for kernel in serves] == [True, False]:
                found.append(backend)
        return found

    def _usable(self, backends: Sequence[Backend]) -> list[Backend]:
        """Those that are available, or were when they were selected."""
        return [b for b in backends if b.name == self._selected or b.unavailable() is None]

    def _first_kernel(
        self, usable: Sequence[Backend], operator: str, device_type: str, dtype: torch.dtype
    ) -> Kernel | None:
        for backend in usable:
            if self._failure(backend.name, operator, dtype) is not None:
                continue
            kernel = backend.kernel(operator, device_type, dtype)
            if kernel is not None:
                check_signature(backend.name, operator, kernel)
                return kernel
        return None

    def _resolve(self, operator: str, device_type: str, dtype: torch.dtype) -> Kernel:
        kernel = self._first_kernel(self._resolving(device_type), operator, device_type, dtype)
        if kernel is None:
            raise NotImplementedError(
                f"backend {self._selected!r} has no kernel {operator!r} "
                f"for {dtype} on {device_type}"
            )
        return kernel

    def _resolving(self, device_type: str) -> list[Backend]:
        """The backends that may be asked for a kernel, in this order."""
        backends = self._wanting()
        if self._selected is None:
            backends += self._made_for(device_type) + self._of_last_resort()
        return self._usable(backends)

    def _first_builder(self, device_type: str) -> Builder:
        routed = [backend for backend in self.backends.values() if backend.priority >= 0]
        for backend in self._usable([*self._wanting(), *routed, *self._of_last_resort()]):
            builder = backend.builder(device_type) if isinstance(backend, BuildingBackend) else None
            if builder is not None:
                if type(builder) not in self._checked:  # which takes longer than a small graph
                    check_builder(backend.name, builder)
                    self._checked.add(type(builder))
                return builder
        raise NotImplementedError(f"no backend builds graphs on {device_type}")

    def _of_last_resort(self) -> list[Backend]:
        return [b for b in self.backends.values() if b.priority == FALLBACK_PRIORITY]


REGISTRY = Registry()


def backend_report() -> list[tuple[str, bool, str]]:
    """(name, available, reason if not) of every known backend."""
    reports = ((b.name, b.unavailable()) for b in REGISTRY.backends.values())
    return [(name, why_not is None, why_not or "") for name, why_not in reports]
