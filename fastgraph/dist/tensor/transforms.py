"""The refusal of transforms of ``torch.func``, whose wrappers of tensors rules cannot look into."""

from __future__ import annotations

from torch._C import _functorch


def refuse() -> None:
    """No transform is at work.

    Raises:
        NotImplementedError: one is.
    """
    if _functorch.peek_interpreter_stack() is not None:
        raise NotImplementedError(
            "a sharded tensor is used within a transform of torch.func, as grad, jvp or vmap: give "
            "it fastgraph.dist.whole(tensor), or use torch.autograd"
        )
