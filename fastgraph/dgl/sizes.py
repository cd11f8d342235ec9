"""Graphs of DGL that are too small to gain from an operator, as measured on the CPU.

DGL groups the edges of a graph when they are first needed, and so do we, in memory of our own. What
that takes on a graph that is new at each call decides, as a result must not depend on the calls
before. See :mod:`fastgraph.routing.sizes`.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from dgl.heterograph import DGLGraph
from dgl.heterograph_index import HeteroGraphIndex
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling
from torch.nn import Parameter

from fastgraph.dgl.index_objects import GRAPHS, is_graph_below, num_edges_of
from fastgraph.routing.sizes import NEVER, PROGRAM, Least, Work, are_too_few
from fastgraph.settings import current

# Of message passing, for wide features. DGL adds up features of sources as fast as kernels do.
SUM = Least(inference=100_000, training=40_000)
EXTREMUM = Least(inference=40_000, training=60_000)
WEIGHTED_SUM = Least(inference=12_000, training=5_000)
SUM_OF_EDGES = Least(inference=40_000, training=40_000)
EXTREMUM_OF_EDGES = Least(inference=100_000, training=100_000)
PRODUCT = Least(inference=20_000, training=5_000)
SOFTMAX = Least(inference=20_000, training=15_000)

# Of layers that are replaced as a whole. Those that are not here gain on any graph.
EDGE_ATTENTION = Least(inference=5_000, training=4_000)
TYPED_ATTENTION = Least(inference=250, training=100)
RELATIONS = Least(inference=2_000, training=500)
POOLING = Least(inference=5_000, training=8_000)
SUM_WITH_ITSELF = Least(inference=40_000, training=20_000)

WIDE = 32
"""The channels from which on their number does not matter."""

NARROW_TIMES = 8
"""How many times as many edges there must be for fewer channels.

Not for :data:`RELATIONS`, as DGL gathers a matrix for each edge, nor for :data:`SUM`: what sums
gain, narrow ones too, is that edges are grouped here in less time than DGL takes.
"""

FEW = 3
"""Up to so many channels, a message is less than what it takes to find the edges of a new graph."""

FEW_TIMES = {
    TYPED_ATTENTION: 256,
    RELATIONS: 256,
    EDGE_ATTENTION: 4096,
    POOLING: 512,
    WEIGHTED_SUM: 16,
}
"""How many times as many edges there must be then, where edges have types, features or weights, or
where maxima of them are taken."""

WIDE_EXTREMUM = 64
"""The channels from which on extrema of the features of sources gain.

For fewer, DGL's loops are as fast on any graph, and need not confirm that its edges are the same.
"""

_PLAIN: tuple[type, ...] = (Tensor, Parameter)
_FEATURES = ("feat", "x", "nfeats", "node_feats")
"""The names of a layer's features of nodes."""


class ProgramWork(NamedTuple):
    """The size of an edge program of functions of users.

    Attributes:
        width: the channels of a message, or of features that DGL would gather, if these are wider.
        has_wide_edges: true if there are as many channels of each edge in memory.
        is_message: true if it is what users send along edges and reduce, for which DGL gathers and
            scatters in operations of its own.
        reduces: true if a function of users reduces messages, which DGL calls for each in-degree.
        has_winners: true if one edge has the gradient of an extremum.
        gains_in_training: false where gradients take longer than DGL's.
        is_half: as in :class:`fastgraph.routing.sizes.Work`.
    """

    width: int
    has_wide_edges: bool = False
    is_message: bool = False
    reduces: bool = False
    has_winners: bool = False
    gains_in_training: bool = True
    is_half: bool = False

    def is_too_little(self, num_edges: int) -> bool:
        """True if a call on so many edges of a new graph would take longer than DGL's.

        See :meth:`fastgraph.routing.sizes.Work.is_too_little`.
        """
        if self.reduces:
            num_edges *= _TIMES_OF_REDUCTIONS
        has_winners = self.has_winners and is_grad_enabled()
        if has_winners:
            num_edges //= _PASSES_OF_WINNERS
        if current().min_edges is None:
            if is_grad_enabled() and not self.gains_in_training:
                return True
            if self.is_message and self.width >= WIDE and not (self.is_half or has_winners):
                return num_edges * self.width < _LEAST_OF_MESSAGES[self.has_wide_edges]
        work = Work(self.width, self.has_wide_edges, self.is_half, passes=_PASSES)
        return work.is_too_little(num_edges)


_LEAST_OF_MESSAGES = (250_000, 1_000_000)
"""The values of all messages of users from which on no call was slower than DGL's, without and with
as many values of edges in memory."""

_PASSES = 3
"""Over messages, of DGL's own code, whatever they are."""

_TIMES_OF_REDUCTIONS = 2
"""How many times as much DGL does where a function of users reduces messages of any graph."""

_PASSES_OF_WINNERS = 5
"""How many times as much is to be done for extrema of which one edge has the gradient."""


def is_too_small(least: Least, gidx: Any, features: object, channels: int = WIDE) -> bool:
    """True if a call of message passing would take longer than upstream's.

    Never for features on GPUs, sharded ones and index objects that are not DGL's own. Extrema of
    narrow features would on any graph. It is to be asked before anything is read of the graph.

    Args:
        least: how many edges there must be.
        gidx: DGL's index object of a graph with one relation.
        features: of nodes or edges.
        channels: how many they have.
    """
    if not _is_plain(gidx, features):
        return False
    num_edges = num_edges_of(gidx)
    if least is EXTREMUM and channels < WIDE_EXTREMUM:
        num_edges = 0
    return are_too_few(least, num_edges // _times_of(least)(channels))


@functools.cache
def _times_of(least: Least) -> Callable[[int], int]:
    """How many times as many edges there must be, by the channels."""
    of_few = FEW_TIMES.get(least)
    of_narrow = 1 if least in (SUM, RELATIONS) else NARROW_TIMES

    def times(channels: int) -> int:
        if channels >= WIDE:
            return 1
        return of_few if of_few is not None and channels <= FEW else of_narrow

    return times


def _is_plain(gidx: Any, features: Any) -> bool:
    """True for a graph of DGL and features on the CPU, in code that is not compiled."""
    if type(features) not in _PLAIN or type(gidx) is not HeteroGraphIndex:
        return False
    return bool(features.is_cpu) and not is_compiling()


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[object, object]:
    """The graph of a layer's call, and the features of its sources."""
    graph = args[0] if args else next((kwargs[n] for n in ("graph", "g") if n in kwargs), None)
    if len(args) > 1:
        features = args[1]
    else:
        features = next((kwargs[name] for name in _FEATURES if name in kwargs), None)
    return graph, features[0] if isinstance(features, tuple) and features else features


def of_layer(
    least: Least, channels: Callable[[Any], int] | None = None
) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], bool]:
    """:func:`is_too_small` of a layer and its positional and keyword arguments.

    Args:
        least: how many edges there must be.
        channels: of the layer gives how many there are in each message; default: many.
    """
    times_of = _times_of(least)

    def is_small(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        # Most of what is small is known at once: too small for any number of channels.
        bound, is_graph = least.bound(), bool(args) and type(args[0]) in GRAPHS
        if is_graph and is_graph_below(args[0], bound):
            return True
        width = WIDE if channels is None else channels(module)
        if is_graph and width < WIDE and len(args) > 1:
            is_plain = type(args[1]) is Tensor and args[1].is_cpu
            if is_plain and is_graph_below(args[0], bound * times_of(width)):
                return True
        graph, features = _arguments(args, kwargs)
        if not isinstance(graph, DGLGraph):
            return False
        return is_too_small(least, graph._graph, features, width)

    return is_small


def of_program(
    work_of: Callable[[Any], ProgramWork],
) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], bool]:
    """True for calls of layers, as :func:`of_layer` has them, that gain nothing from a program.

    Args:
        work_of: of the layer gives how much there is to compute for each edge.
    """

    def is_small(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if len(args) > 1 and type(args[0]) in GRAPHS and type(args[1]) is Tensor:
            # One look at the graph tells, where DGL's code takes 300 us and asking in steps 20.
            if not args[1].is_cpu or current().min_edges is not None:
                return False
            return is_graph_below(args[0], _fewest_edges(work_of(module), is_grad_enabled()))
        if is_too_few(module, args, kwargs):
            return True
        graph, features = _arguments(args, kwargs)
        if not isinstance(graph, DGLGraph) or not _is_plain(graph._graph, features):
            return False
        return work_of(module).is_too_little(num_edges_of(graph._graph))

    is_too_few = of_layer(PROGRAM)
    return is_small


@functools.lru_cache(maxsize=1024)
def _fewest_edges(work: ProgramWork, is_training: bool) -> int:
    """The edges from which on a program gains, as the setting ``min_edges`` says nothing.

    Args:
        work: that of the program.
        is_training: whether gradients are recorded, as they are while this is asked.
    """
    least = PROGRAM.training if is_training else PROGRAM.inference
    if work.is_too_little(_MOST_EDGES):
        return NEVER
    return bisect.bisect_left(
        range(_MOST_EDGES), True, lo=least, key=lambda count: not work.is_too_little(count)
    )


_MOST_EDGES = 1 << 40
"""More than any graph has."""
