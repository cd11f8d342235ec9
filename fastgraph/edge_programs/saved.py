"""The tensors that torch saves for the gradients of a message, which nobody may edit meanwhile.

A program keeps others than torch does: it computes values again of what they are made of. What
torch does not save may be edited before a backward pass, and is copied where a program keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Compute = Callable[[Mapping[str, Tensor]], Iterable[Tensor]]


def saved_tensors(
    compute: Compute, given: Mapping[str, Tensor], names: Collection[str], *, saves_results: bool
) -> dict[str, frozenset[str]]:
    """The tensors that torch saves as they are, by name.

    Args:
        compute: gives the values of a message, of all tensors that it takes and its layer has.
        given: these tensors, of which some have gradients. These must be enabled.
        names: of those that are looked at.
        saves_results: true if what follows the message saves its values.

    Returns:
        For each of them the names of the tensors for whose gradients it is saved, any of them.
    """

    def saved(with_gradients: Collection[str]) -> set[str]:
        taken = {
            name: tensor.detach().requires_grad_(name in with_gradients)
            for name, tensor in given.items()
        }
        name_of = {taken[name].untyped_storage()._cdata: name for name in names}
        found = set()

        def see(tensor: Tensor) -> Tensor:
            found.add(name_of.get(tensor.untyped_storage()._cdata, ""))
            return tensor

        with saved_tensors_hooks(see, lambda tensor: tensor):
            results = compute(taken)
        for result in results if saves_results else ():
            if result.requires_grad:
                see(result)
        return found - {""}

    differentiable = [name for name, tensor in given.items() if tensor.requires_grad]
    ever = saved(differentiable)
    savers: dict[str, set[str]] = {name: set() for name in ever}
    for one in differentiable if ever else ():
        for name in saved((one,)):
            savers[name].add(one)
    return {name: frozenset(found) for name, found in savers.items()}
