"""The refusal of transforms of ``torch.func``, whose wrappers of tensors rules cannot look into."""

from __future__ import annotations

from torch._C import _functorch

innermost = _functorch.peek_interpreter_stack
"""``None`` where no transform is at work. It is asked for every operation, and enters no Python."""


def refusal() -> NotImplementedError:
    """The error for a sharded tensor within a transform."""
    return NotImplementedError(
        "a sharded tensor is used within a transform of torch.func, as grad, jvp or vmap: give "
        "it fastgraph.dist.whole(tensor), or use torch.autograd"
    )
