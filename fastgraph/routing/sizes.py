"""Graphs that are too small to gain from an operator, as measured on the CPU.

A call of an operator costs a certain time, whatever it computes, that torch's own operations do not
take. So the number of edges alone decides, and nothing else is looked at: neither the values of
tensors, nor what is remembered of them, lest a result depend on the calls before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import sqrt
from typing import Any, NamedTuple

from torch import Tensor, is_grad_enabled

from fastgraph.plugins.refusal import Refusal
from fastgraph.settings import current

NEVER = sys.maxsize


class Least(NamedTuple):
    """The least numbers of edges from which on no call was slower than upstream's.

    Each is for an ``edge_index`` that is new at each call, and many channels.

    Attributes:
        inference: where no gradient is recorded.
        training: for a forward and a backward pass.
        wide: the channels from which on their number does not matter; with fewer, as many more
            edges must be.
        narrow_edges: the factor by which the least number of edges grows for one or two channels;
            :data:`NEVER` where no graph gains.
        many: the channels beyond which fewer edges are enough, for four times as many half as many
            edges: what a call saves grows with channels, what ordering its edges takes does not.
    """

    inference: int
    training: int
    wide: int = 8
    narrow_edges: int = 16
    many: int = NEVER

    def bound(self) -> int:
        """That of training while gradients are recorded, else that of inference."""
        return self.training if is_grad_enabled() else self.inference


SUM = Least(inference=10_000, training=6500, wide=32, narrow_edges=5, many=64)
# Upstream multiplies by weights in a pass of its own.
WEIGHTED_SUM = Least(inference=6500, training=3000, wide=24, narrow_edges=16)
# Gradients of weights, too: a pass of their own, over edges that are not in order.
LEARNED_SUM = Least(inference=6500, training=5000, wide=32, narrow_edges=NEVER)
EXTREMUM = Least(inference=10_000, training=1500)
GCN = Least(inference=1500, training=2000)
WEIGHTED_GCN = Least(inference=3000, training=2000, wide=32)
ATTENTION = Least(inference=2000, training=4000)
PROGRAM = Least(inference=3000, training=3000)  # and values of messages, see `Work`
NARROW_ATTENTION_WITH_EDGES = Least(inference=10_000, training=14_000, narrow_edges=NEVER)
# The gradient of what is added to each edge takes as long as upstream's.
GATV2_OF_ONE_CHANNEL_WITH_EDGES = ATTENTION._replace(training=NEVER)

_TINY = 1500
"""The fewest edges above."""

TOO_SMALL = Refusal("too few edges to gain from it; min_edges=0 routes it nevertheless")
"""Why a call gains nothing from its route, which ``strict`` does not take for an error."""

_WIDE = 8
"""The channels of messages from which on their number does not matter."""

_NARROW = 2
"""Up to so many channels, edges are nearly all that upstream's operations spend time on."""


def _features(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    return args[0] if args else kwargs.get("x")


def on_edge_index(
    least: Least | Callable[[Any, Any, Any], Least],
    width: Callable[[Any, Any, Any], object] = _features,
) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], bool]:
    """:func:`is_too_small` of a layer and its positional and keyword arguments.

    The second of them is ``edge_index``. Not to be asked while code is compiled.

    Args:
        least: how many edges there must be, or what tells it of these arguments.
        width: of the layer and its positional and keyword arguments gives what has as many
            channels as are aggregated, or their number; default: the argument ``x``.
    """

    def is_small(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        edge_index = args[1] if len(args) > 1 else kwargs.get("edge_index")
        return is_too_small(least, edge_index, width, module, args, kwargs)

    return is_small


def is_too_small(
    least: Least | Callable[..., Least],
    edge_index: object,
    width: Callable[..., object],
    *arguments: object,
) -> bool:
    """True if a call on these edges would take longer than upstream's.

    Never for graphs on GPUs and other forms of a graph than a plain ``edge_index``, and not where
    the setting ``min_edges`` says what is too small. Not to be asked while code is compiled, which
    would be compiled anew for graphs on the other side of the bound.

    It is asked of every call, and first of all, as a call on a tiny graph takes 40 us in all.

    Args:
        least: how many edges there must be, or what tells it, asked only where that decides.
        edge_index: the caller's graph.
        width: gives the features that are aggregated, one tensor or a pair, or the number of
            their channels; ``None`` for many. It is asked only where that decides.
        arguments: of both.
    """
    if type(edge_index) is not Tensor or edge_index.is_nested:  # which has no shape
        return False
    shape = edge_index.shape
    if len(shape) != 2:
        return False
    rows, num_edges = shape
    if num_edges >= _TINY:
        found = least if isinstance(least, Least) else least(*arguments)
        bound = found.training if is_grad_enabled() else found.inference
        if num_edges >= bound or found.many != NEVER:
            if num_edges >= max(found.narrow_edges, found.wide) * bound:
                return False  # enough for any channels
            features = width(*arguments)
            if (
                type(features) is not Tensor
                or features.is_nested
                or len(shape := features.shape) != 2
            ):
                channels = _channels(features)
            else:
                channels = shape[1]
            is_narrow = 1 <= channels <= _NARROW
            times = found.narrow_edges if is_narrow else found.wide / max(channels, 1)
            if not is_narrow and times <= 1:
                is_known = found.many < channels < _WIDEST
                times = sqrt(found.many / channels) if is_known else 1
            if num_edges >= times * bound:
                return False
    return rows == 2 and edge_index.is_cpu and current().min_edges is None


def is_tiny(edge_index: object) -> bool:
    """True if no call on these edges gains from a route, of whatever operator.

    It answers most of what :func:`is_too_small` is asked, in less time, and under the same
    conditions.
    """
    if type(edge_index) is not Tensor or edge_index.is_nested:  # which has no shape
        return False
    shape = edge_index.shape
    if len(shape) != 2 or shape[1] >= _TINY or shape[0] != 2:
        return False
    return edge_index.is_cpu and current().min_edges is None


def are_too_few(least: Least, num_edges: int) -> bool:
    """True if a call on so many edges of a graph on the CPU would take longer than upstream's.

    Never where the setting ``min_edges`` says what is too small. Not to be asked while code is
    compiled.

    Args:
        least: how many edges there must be.
        num_edges: how many there are.
    """
    bound = least.training if is_grad_enabled() else least.inference
    return num_edges < bound and current().min_edges is None


class Work(NamedTuple):
    """The size of an edge program.

    Attributes:
        width: the channels of a message, or the numbers of the matrix of an edge that upstream
            stores for it.
        has_wide_edges: true if there are as many channels of each edge in memory.
        is_half: true if upstream computes in a half type, some of it at least.
        widens_edges: true if what is in memory of each edge is float32 then.
        has_narrow_products: true if it multiplies values of each edge by a matrix that has few
            rows and few columns.
        largest_product: the numbers in the largest matrix by which it multiplies such values.
        passes: how often upstream passes over all channels of all messages: it gathers them from
            nodes, applies functions and reduces.
        exponentials: how many it computes for each channel. Upstream keeps the values of functions
            for their gradients, of which each pass of a program computes them again.
    """

    width: int
    has_wide_edges: bool
    is_half: bool = False
    widens_edges: bool = False
    has_narrow_products: bool = False
    largest_product: int = 0
    passes: int = 1
    exponentials: int = 0

    def is_too_little(self, num_edges: int, *, on_gpu: bool = False) -> bool:
        """True if a call on so many edges of a new graph would take longer than upstream's.

        On a GPU, where kernels of messages are faster than upstream's on every graph that was
        measured, calls on small graphs take as long as the host takes to make them.

        Never where the setting ``min_edges`` says what is too small. Not to be asked while code is
        compiled.
        """
        if current().min_edges is not None:
            return False
        if on_gpu:
            if self.largest_product > 0:
                is_large = self.largest_product > _LARGEST_PRODUCT_ON_GPU
                return is_large or num_edges < _LEAST_OF_PRODUCTS_ON_GPU
            return num_edges * self.width < _LEAST_VALUES_ON_GPU
        values = num_edges * self.width
        if self.has_narrow_products and is_grad_enabled():
            return True  # their gradients compute such products again
        if self.width < _FEW:
            return values < _LEAST_OF_FEW
        if self.widens_edges:
            return True
        is_wide = self.width >= _WIDE
        passes, computes_again = self.passes, self.exponentials > 1 and is_grad_enabled()
        if computes_again:
            passes = max(1, passes - _PASSES_OF_EXPONENTIALS * (self.exponentials - 1))
        least = _LEAST_VALUES // passes if is_wide else _LEAST_NARROW_VALUES
        if self.has_wide_edges:
            with_edges = _LEAST_WITH_EDGES.bound()
            least = max(least, 2 * with_edges if computes_again else with_edges)
        if self.is_half:
            least = max(least, _LEAST_OF_HALVES.bound())
        return values < least


NARROW_PRODUCT = 15
"""Up to so many rows and columns products of each edge take as long as upstream's, which are those
of large matrices, and their gradients longer."""

_LARGEST_PRODUCT_ON_GPU, _LEAST_OF_PRODUCTS_ON_GPU = 1 << 13, 1 << 19
"""On an H200 products of each edge by larger matrices were slower than upstream's on any graph (0.2
to 0.8 times as fast for 256 channels), and those of 64 channels on 10,000 edges. On 755,000 edges
both passes together take as long as upstream's, on a million half as long."""

_LEAST_VALUES_ON_GPU = 1 << 24
"""On an H200 the host took 0.3 to 0.9 ms for a pass by a kernel of its own, and upstream's passes
take as long on the GPU from about here on; 2.7 million values took it a third to half of that. From
48 million on no pass was slower by either clock."""

_LEAST_VALUES = 2_400_000
"""The values of all messages together, times upstream's passes over them, from which on no edge
program was slower than upstream: means of powers, two passes, from 1.2 million values on, softmax
aggregation, five of them, from 0.3 million."""

_PASSES_OF_EXPONENTIALS = 4
"""Of upstream's passes, as many as a second exponential and further ones cost in training.

Of the gates of crystal graphs, a sigmoid times a softplus, 480,000 values took 1.1 times as long as
upstream, and 8.3 million with as many of edges 1.3 times where only parameters have gradients."""

_LEAST_NARROW_VALUES = 2_500_000
"""The same for messages of four to seven channels."""

_FEW = 4
"""Messages of fewer channels gain little: the edges themselves are what is read."""

_LEAST_OF_FEW = 50_000_000
"""The same for those, which was not measured closely."""

_LEAST_WITH_EDGES = Least(inference=1_500_000, training=5_000_000)
"""The same where as much is read for each edge, which upstream does, too; a gradient of it is as
much once more."""


_LEAST_OF_HALVES = Least(inference=2_000_000, training=10_000_000)
"""The same in half types and under autocast, where upstream reads and writes half as much. Linear
maps of features of edges that are added to those of nodes are never faster than upstream's."""


FEWEST_CHANNELS_OF_SUMS = 3
"""Of groups of rows. With fewer, upstream's loop over the rows is as fast as any."""

_WIDE_ROWS = 16
"""The channels from which on upstream sorts rows first, and reduces whole vectors."""

_LEAST_NUMBERS = {
    # (operation, true for training): up to 2 channels, up to 15, and more
    ("sum", False): (NEVER, NEVER, 1 << 25),
    ("sum", True): (NEVER, NEVER, 1 << 25),
    ("extremum", False): (NEVER, 1 << 16, 1 << 23),
    ("extremum", True): (1 << 19, 1 << 15, 1 << 16),
    ("softmax", False): (NEVER, 1 << 15, 1 << 17),
    ("softmax", True): (NEVER, 1 << 15, 1 << 17),
}
"""The numbers in all rows from which on no reduction of groups was slower than upstream's."""


def is_too_little_of_groups(operation: str, x: Tensor) -> bool:
    """True if reducing groups of these rows would take longer than upstream's code.

    That is for an index that is new at each call. Never where the setting ``min_edges`` says what
    is too small. Not to be asked while code is compiled.

    Args:
        operation: ``"sum"``, ``"extremum"`` or ``"softmax"``.
        x: ``[rows, *channels]``.
    """
    channels = x.shape[1:].numel()
    width = 0 if channels <= _NARROW else 1 if channels < _WIDE_ROWS else 2
    least = _LEAST_NUMBERS[operation, x.requires_grad and is_grad_enabled()][width]
    return x.numel() < least and current().min_edges is None


_PRODUCT = Least(inference=1_000_000, training=9000)


def is_too_small_product(num_entries: int, x: Tensor) -> bool:
    """True if the product of a sparse matrix would take longer than upstream's.

    Never where the setting ``min_edges`` says what is too small. Not to be asked while code is
    compiled.

    Args:
        num_entries: of the matrix.
        x: the dense factor.
    """
    is_training = x.requires_grad and is_grad_enabled()
    bound = _PRODUCT.training if is_training else _PRODUCT.inference
    return num_entries < bound and current().min_edges is None


_FEWEST_NODES_OF_ONE = 100
"""The nodes from which on attention of all pairs of one graph was no slower than upstream's."""


def is_too_small_to_attend(num_nodes: int) -> bool:
    """True if attention of all nodes of one graph would take longer than upstream's code.

    A batch of graphs costs upstream more than this, as they are padded. Never where the setting
    ``min_edges`` says what is too small.

    Args:
        num_nodes: of the graph.
    """
    return num_nodes < _FEWEST_NODES_OF_ONE and current().min_edges is None


_FEWEST_ELEMENTS, _FEWEST_OTHER_ELEMENTS = 400, 4096
"""The elements of padded sets from which on attention without padding was no slower than upstream's
among themselves, and of seeds or others to them, where a quarter of it is padding."""


def is_too_small_to_leave_out(num_elements: int, *, is_own: bool) -> bool:
    """True if attention to these elements without padding would take longer than with it.

    Never where the setting ``min_edges`` says what is too small.

    Args:
        num_elements: of all sets, with padding.
        is_own: whether it is that of elements among themselves.
    """
    least = _FEWEST_ELEMENTS if is_own else _FEWEST_OTHER_ELEMENTS
    return num_elements < least and current().min_edges is None


def of_many(*_: object) -> None:
    """Features with so many channels that their number does not matter."""


def _channels(features: object) -> int:
    """Those of features of any form, most of which have their nodes in the longest dimension."""
    x = features[0] if isinstance(features, (tuple, list)) and features else features
    if isinstance(x, Tensor) and not x.is_nested:
        shape = x.shape
        longest = max(shape, default=0)
        if len(shape) == 2:
            return shape[1]
        return shape.numel() // longest if longest > 0 else _WIDEST
    return x if isinstance(x, int) else _WIDEST


_WIDEST = sys.maxsize
"""The channels where nobody knows how many there are."""
