"""The route of ``gcn_norm``: the symmetric normalisation, cached.

PyG's layers normalise anew at every forward unless ``cached=True``. The result depends only on the
arguments, so upstream's own result is kept for as long as the caller's tensors live unchanged. Its
``edge_index`` is then the same tensor at every call, and the operators find its sorted graph. The
first use of a plain graph is noted only, since a graph of a mini-batch may have no second one, and
weights may be computed anew for each call.

Only layers get what is remembered: users who call ``gcn_norm`` may change what it returns.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn.conv import MessagePassing, gcn_conv

from fastgraph.graphs.memo import MEMO, REMEMBERING, is_recording, remembered, tensor_key
from fastgraph.plugins.patching import Patches, modules_with
from fastgraph.routing.conditions import execution_mode, operand, plain_tensor
from fastgraph.routing.sizes import WEIGHTED_SUM, is_tiny, is_too_small, of_many
from fastgraph.routing.status import THREAD
from fastgraph.routing.switch import SWITCH
from fastgraph.routing.wrappers import wrapped
from fastgraph.settings import current

UPSTREAM = gcn_conv.gcn_norm

IS_PYGS = inspect.isfunction(UPSTREAM) and UPSTREAM.__code__.co_filename == gcn_conv.__file__
"""True if nobody had replaced it before this module was imported."""

_is_seen_by_dynamo = torch.compiler.is_dynamo_compiling

_CALLERS = object()
"""Stands for the caller's own ``edge_index``, which a remembered result must not keep alive."""


class _Normalised(NamedTuple):
    """A result of ``gcn_norm`` and the versions of its tensors when it was computed."""

    result: tuple[Any, ...]
    tensors: tuple[Tensor, ...]
    versions: tuple[int, ...]

    @classmethod
    def of(cls, result: tuple[Any, ...], tensors: tuple[Tensor, ...]) -> _Normalised:
        """A result, whose tensors nobody has edited yet."""
        return cls(result, tensors, tuple(t._version for t in tensors))

    def given_back(self, edge_index: Any) -> tuple[Any, ...]:
        """The result for the caller's own ``edge_index``."""
        return tuple(edge_index if part is _CALLERS else part for part in self.result)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    @property
    def intact(self) -> bool:
        """True if nobody has edited what upstream would have computed afresh."""
        return self.versions == tuple(t._version for t in self.tensors) and not any(
            t.requires_grad for t in self.tensors
        )


def install(patches: Patches) -> None:
    """Replace ``gcn_norm`` in the modules of PyG's layers, but not where users import it from."""
    for module in modules_with("gcn_norm"):
        imported = vars(module)["gcn_norm"] is UPSTREAM and module is not gcn_conv
        if imported and module.__name__.startswith("torch_geometric.nn"):
            patches.replace(module, "gcn_norm", gcn_norm)


def _left_if_small(edge_index: Any, edge_weight: Any) -> list[object] | None:
    """The calls under way, with this one, where remembering takes longer than computing."""
    if _is_seen_by_dynamo():
        return None
    counted = THREAD.counted
    layer = counted[-1] if counted else None
    if isinstance(layer, MessagePassing):  # which was left to upstream, whatever is in it
        if not is_tiny(edge_index) and _were_last(layer, edge_index, edge_weight):
            return None
    elif not is_tiny(edge_index) and (
        torch.compiler.is_compiling() or not is_too_small(WEIGHTED_SUM, edge_index, of_many)
    ):
        return None
    counted.append(UPSTREAM)  # so that functions in it do not look for a route
    return counted


_LAST: dict[int, tuple[ref[Tensor], ref[Any] | None]] = {}
"""By the ``id`` of a layer that is left to upstream, the edges and weights of its last call."""

_MOST_LAYERS = 256


def _were_last(layer: object, edge_index: Tensor, edge_weight: Any) -> bool:
    """True if the last call of a layer was on these very tensors, as the next ones will be."""
    last = _LAST.get(id(layer))
    if last is not None and last[0]() is edge_index:
        weight = last[1]
        if (None if weight is None else weight()) is edge_weight:
            return True
    if len(_LAST) >= _MOST_LAYERS:
        _LAST.clear()  # there are layers among them that are gone
    is_weighted = isinstance(edge_weight, Tensor)  # or anything that a user gives
    _LAST[id(layer)] = ref(edge_index), ref(edge_weight) if is_weighted else None
    return False


_OPTIONS = frozenset((int, bool, str, type(None), torch.dtype))
"""The types of the other arguments by which a result can be remembered."""


def _remembered(edge_index: Any, edge_weight: Any = None, *args: Any, **kwargs: Any) -> Any:
    if not _OPTIONS.issuperset(map(type, (*args, *kwargs.values()))):
        return UPSTREAM(edge_index, edge_weight, *args, **kwargs)  # which has an error, or none
    parts = _parts_to_remember_by(edge_index, edge_weight)
    if parts is None and _is_subclass(edge_index, edge_weight):
        return _of_subclass(edge_index, edge_weight, args, kwargs)
    if parts is None:
        return UPSTREAM(edge_index, edge_weight, *args, **kwargs)
    learned = edge_weight is not None and (edge_weight.requires_grad or edge_weight.is_inference())
    inputs = parts if edge_weight is None or learned else (*parts, edge_weight)
    key = (
        "gcn_norm",
        learned,
        _description(edge_index),
        torch.get_default_dtype(),
        *map(tensor_key, inputs),
        args,
        *kwargs.items(),
    )
    known: _Normalised | None = MEMO.get(key, *inputs)
    if known is not None and known.intact and not learned:
        return known.given_back(edge_index)
    may_wait = known is None and inputs[0] is edge_index
    is_first = False
    if may_wait and edge_index.is_cpu and edge_index.dim() == 2:
        is_used, noted = MEMO.noted(key, *inputs)
        if noted is not None and noted.intact and not learned:
            MEMO.put(key, noted, *inputs)
            return noted.given_back(edge_index)
        is_first = not is_used
    counted = THREAD.counted
    counted.append(UPSTREAM)  # so that functions in it do not look for a route
    try:
        index, weight = _of_upstream(edge_index, edge_weight, args, kwargs)
    finally:
        counted.pop()
    if learned and known is not None and known.intact:
        return known.result[0], weight
    if torch.is_inference_mode_enabled():
        return index, weight  # training could not use what was computed here
    own = _CALLERS if index is edge_index else index
    kept = (own,) if learned else (own, weight)
    tensors = tuple(t for part in kept for t in _plain_parts(part) or ())
    if tensors and is_first:
        value = None
        if edge_weight is None and _begins_with(index, edge_index, args):
            value = _Normalised.of(kept, tensors)
        MEMO.note(key, value, inputs, _Beginning(index) if current().check_cache else None)
    elif tensors:
        MEMO.put(key, _Normalised.of(kept, tensors), *inputs)
    return index, weight


_PARAMETERS = ("num_nodes", "improved", "add_self_loops", "flow", "dtype")


def _of_upstream(
    edge_index: Any, edge_weight: Tensor | None, args: Any, kwargs: Mapping[str, Any]
) -> Any:
    """Upstream's result, bit by bit, in less time.

    Upstream picks out the edges that are no self-loops by a mask, which takes longer than all else.
    Here it gets them with the self-loops that it would have added behind them.
    """
    given = dict(zip(_PARAMETERS, args, strict=False), **kwargs) if _fit(args, kwargs) else {}
    num_nodes = given.get("num_nodes")
    if (
        not IS_PYGS
        or type(edge_index) is not Tensor
        or edge_index.layout != torch.strided
        or not edge_index.is_cpu
        or edge_index.dim() != 2
        or edge_index.shape[0] != 2
        or type(num_nodes) is not int
        or given.get("add_self_loops", True) is not True
        or (edge_weight is not None and edge_weight.shape != edge_index.shape[1:])
    ):
        return UPSTREAM(edge_index, edge_weight, *args, **kwargs)
    loop_weight = None
    if edge_weight is not None:
        loop_weight = edge_weight.new_full((num_nodes,), 2.0 if given.get("improved") else 1.0)
    source, destination = edge_index[0], edge_index[1]
    is_loop = source == destination
    if is_loop.any():
        kept = is_loop.logical_not().nonzero().squeeze(1)
        if edge_weight is not None and loop_weight is not None:
            loops = is_loop.nonzero().squeeze(1)
            loop_weight[source[loops]] = edge_weight[loops]
            edge_weight = edge_weight.index_select(0, kept)
        source, destination = source.index_select(0, kept), destination.index_select(0, kept)
    nodes = torch.arange(0, num_nodes, device=edge_index.device)
    index = torch.cat([source, nodes, destination, nodes]).view(2, -1)
    if edge_weight is not None and loop_weight is not None:
        edge_weight = torch.cat([edge_weight, loop_weight])
    return UPSTREAM(index, edge_weight, **{**given, "add_self_loops": False})


def _fit(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """True if upstream takes these arguments after weights, each of them once."""
    left = _PARAMETERS[len(args) :]
    return len(args) <= len(_PARAMETERS) and all(name in left for name in kwargs)


class _Beginning:
    """A normalised graph that begins with the caller's edges, and confirms that they are these."""

    nbytes = 0
    bits = None

    def __init__(self, index: Tensor) -> None:
        self._index = index

    def confirms(self, tensors: Sequence[Tensor]) -> bool:
        """True if it does."""
        (edge_index,) = tensors
        return torch.equal(self._index[:, : edge_index.shape[1]], edge_index)


def _begins_with(index: Tensor, edge_index: Tensor, args: tuple[Any, ...]) -> bool:
    """True if a normalised graph is the caller's with a self-loop for each node behind its edges.

    Then it tells at no cost whether the caller's is what it was, else a checksum would have to.
    """
    is_whole = index is not edge_index and type(args[0] if args else None) is int
    return is_whole and index.shape[1] == edge_index.shape[1] + int(args[0])


gcn_norm = (
    wrapped(UPSTREAM, _left_if_small, ("edge_index", "edge_weight"), _remembered)
    if IS_PYGS
    else None
) or functools.wraps(UPSTREAM)(_remembered)
"""Upstream's function; its result is the same tensors while the arguments live unchanged."""


def _is_subclass(edge_index: Any, edge_weight: Any) -> bool:
    """True if edges are a subclass for which operators are defined, whose results are cached.

    What they are depends on nothing that differs between the processes which hold parts of them.
    """
    given = (edge_index,) if edge_weight is None else (edge_index, edge_weight)
    return (
        SWITCH.active
        and execution_mode() is None
        and type(edge_index) in REMEMBERING
        and all(operand("edges", value) is None for value in given)
        and not torch.is_inference_mode_enabled()
    )


def _of_subclass(edge_index: Tensor, edge_weight: Tensor | None, args: Any, kwargs: Any) -> Any:
    learned = edge_weight is not None and edge_weight.requires_grad
    given = (edge_index, None if learned else edge_weight, args, tuple(kwargs.items()))
    known = remembered("gcn_norm", _computed, *given)
    if known.intact and not learned:
        return known.given_back(edge_index)
    index, weight = UPSTREAM(edge_index, edge_weight, *args, **kwargs)
    return (known.given_back(edge_index)[0] if known.intact else index), weight


def _computed(edge_index: Tensor, edge_weight: Any, args: Any, options: Any) -> _Normalised:
    index, weight = UPSTREAM(edge_index, edge_weight, *args, **dict(options))
    own = _CALLERS if index is edge_index else index
    return _Normalised.of((own, weight), (weight,) if own is _CALLERS else (index, weight))


def _parts_to_remember_by(edge_index: Any, edge_weight: Any) -> tuple[Tensor, ...] | None:
    """The tensors that hold the graph; ``None`` where nothing may be remembered."""
    if not SWITCH.active or is_recording() or execution_mode() is not None:
        return None
    if edge_weight is not None and (
        plain_tensor("edge_weight", edge_weight) is not None
        or edge_weight.layout != torch.strided  # upstream has an error for it
    ):
        return None
    parts = _plain_parts(edge_index)
    # Tensors without content are equal to all of their shape.
    if parts is None or any(t.is_inference() or t.is_meta for t in parts):
        return None
    return parts


def _plain_parts(edge_index: object) -> tuple[Tensor, ...] | None:
    """The strided tensors that hold a graph; ``None`` for kinds that are left to upstream."""
    if isinstance(edge_index, EdgeIndex):
        return (edge_index.as_tensor(),)
    if type(edge_index) is not Tensor or edge_index.requires_grad or edge_index.is_nested:
        return None
    if edge_index.layout == torch.strided:
        return (edge_index,)
    if edge_index.layout == torch.sparse_csr:
        return edge_index.crow_indices(), edge_index.col_indices(), edge_index.values()
    if edge_index.layout == torch.sparse_coo and edge_index.is_coalesced():
        return edge_index._indices(), edge_index._values()
    return None


def _description(edge_index: Any) -> tuple[object, ...]:
    """The part of the cache's key that the strided tensors do not give."""
    if isinstance(edge_index, EdgeIndex):
        return (
            EdgeIndex,
            edge_index.sparse_size(),
            edge_index.sort_order,
            edge_index.is_undirected,
        )
    return (edge_index.layout, edge_index.shape)
