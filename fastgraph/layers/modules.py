"""Modules whose calls may be replaced by what they compute, as long as nobody would notice."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fastgraph.layers.linear import add_linear, linear, with_linear_of_first
from fastgraph.layers.sums import add_to, first_rows


def parameter_of(module: nn.Module, name: str) -> Any:
    """``module.<name>``, where a layer has a parameter, or ``None`` in its place.

    As an attribute torch finds it last, after an error that it makes and drops.
    """
    found = module._parameters.get(name, module)
    return getattr(module, name) if found is module else found  # reparametrised, for example


def affine_map_of(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """The weight and the bias of a known dense layer."""
    return parameter_of(module, "weight"), parameter_of(module, "bias")


class KnownModules:
    """Classes of modules as a framework defines them; a program may replace their methods later.

    Args:
        classes: what is known of them is their ``forward`` as it is now.
    """

    def __init__(self, *classes: type[nn.Module]) -> None:
        self._forwards = {cls: cls.forward for cls in classes}

    def renew(self) -> None:
        """Take their ``forward`` as it is now for the framework's: it does the same."""
        self._forwards = {cls: cls.forward for cls in self._forwards}

    def is_watched(self, module: Any) -> bool:
        """True if somebody would notice that a module is not called, or calls something else."""
        attributes = vars(module)
        return bool(
            attributes["_forward_hooks"]
            or attributes["_forward_pre_hooks"]
            or attributes["_backward_hooks"]
            or attributes["_backward_pre_hooks"]
            or "forward" in attributes
            or type(module).forward is not self._forwards[type(module)]
        )


class KnownLinear(KnownModules):
    """A framework's dense layer.

    Args:
        cls: its class; instances have ``weight`` and ``bias`` and compute ``x W^T + b``.
    """

    def __init__(self, cls: type[nn.Module]) -> None:
        super().__init__(cls)
        self._class = cls

    def knows(self, module: Any) -> bool:
        """True if a module is this layer and nobody sees what it does: no hook, no other weight.

        Its result is then new memory that its gradient does not need.
        """
        if type(module) is not self._class or _has_any_global_hook():
            return False
        return not self.is_watched(module) and "weight" in module._parameters

    def project(self, module: Any, x: Tensor) -> Tensor:
        """``module(x)``; the same in huge pages, if that makes no other difference."""
        if self.knows(module):
            return linear(x, *affine_map_of(module))
        result: Tensor = module(x)
        return result

    def project_first(self, module: Any, x: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """``x`` and ``module(x[:num_rows])``, for an ``x`` that is then used only once."""
        if num_rows < len(x) and self.knows(module):
            return with_linear_of_first(x, num_rows, *affine_map_of(module))
        return x, self.project(module, first_rows(x, num_rows))

    def add_projection(self, out: Tensor, module: Any, x: Tensor) -> Tensor:
        """``out + module(x)``, in the memory of ``out``, which may be changed; not for autocast."""
        is_plain = self.knows(module) and module.bias is None and x.dim() == out.dim() == 2
        if is_plain and x.dtype == module.weight.dtype == out.dtype:
            return add_linear(out, x, module.weight)
        return add_to(out, self.project(module, x))
