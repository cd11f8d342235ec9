"""The route of ``PNAConv``: scaled aggregations are multiplied by one matrix for each degree.

The aggregation takes the route of ``propagate``, but for the scaling, and everything else is
upstream's ``forward``. See :mod:`fastgraph.layers.degree_groups`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch_geometric.nn.aggr import DegreeScalerAggregation
from torch_geometric.nn.conv import MessagePassing, PNAConv

from fastgraph.graphs.edges import OutOfRange, graph_of, unless_out_of_range
from fastgraph.layers.degree_groups import DegreeGroups, groups_of, scaled_products
from fastgraph.layers.modules import KnownModules, affine_map_of
from fastgraph.plugins.patching import Patches
from fastgraph.pyg.aggregations import SCALERS, scaling_later
from fastgraph.pyg.modules import LINEAR
from fastgraph.pyg.propagate import generated_propagate
from fastgraph.pyg.state import state_refusal
from fastgraph.pyg.traced import kind_of
from fastgraph.routing.conditions import execution_mode, is_plain
from fastgraph.routing.dispatch import Computation, replace_method
from fastgraph.routing.programs import last_outcome
from fastgraph.routing.sizes import PROGRAM, TOO_SMALL, is_too_small, of_many, on_edge_index
from fastgraph.routing.small_calls import SmallCalls

_SEQUENTIAL = KnownModules(nn.Sequential)


def install(patches: Patches) -> None:
    """Replace ``PNAConv.forward``."""
    replace_method(
        patches,
        PNAConv,
        "forward",
        plan,
        decided=False,
        is_small=_is_small,
        has_edge_index=True,
    )


_has_few_edges = on_edge_index(PROGRAM, of_many)

_TOO_LITTLE = SmallCalls()
"""Calls whose messages were too small: those like them group no graph."""


def _is_small(module: PNAConv, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # There may be other reasons to leave its aggregation to upstream, which are to be told.
    if last_outcome(module) is not TOO_SMALL:
        return False
    if _has_few_edges(module, args, kwargs):
        return True
    given = dict(zip(("x", "edge_index", "edge_attr"), args, strict=False)) | kwargs
    edge_index = given.get("edge_index")
    if type(edge_index) is not Tensor or not edge_index.is_cpu:
        return False
    kind = functools.partial(kind_of, given.get("x"), given.get("edge_attr"))
    return _TOO_LITTLE.cover(module, edge_index.numel() // 2, kind)


def plan(
    module: PNAConv, x: Any, edge_index: Any, edge_attr: Tensor | None = None
) -> Computation | None:
    """The forward pass of a call, or ``None`` where there is nothing to gain.

    Its aggregation counts itself, also where that is left to upstream.
    """
    if (
        torch.compiler.is_compiling()
        or is_too_small(PROGRAM, edge_index, of_many)
        or not _is_usual(module, x, edge_index)
    ):
        return None
    transpose = module.flow == "target_to_source"
    ends = len(x), len(x)
    graph = unless_out_of_range(graph_of, edge_index, None, *ends)
    if isinstance(graph, OutOfRange):
        return None  # which the aggregation tells
    groups = groups_of(graph, transpose=transpose)
    return None if groups is None else lambda: _forward(module, x, edge_index, edge_attr, groups)


def _is_usual(module: PNAConv, x: Any, edge_index: Any) -> bool:
    """True if nobody but PyG sees what is scaled, on the CPU."""
    scaler = module._modules.get("aggr_module")
    if (
        type(scaler) is not DegreeScalerAggregation
        or type(scaler.scaler) not in (list, tuple)
        or len(scaler.scaler) < 2
        or not all(name in SCALERS for name in scaler.scaler)
        or type(module).update is not MessagePassing.update
        or generated_propagate(module) is None
        or execution_mode() is not None
        or state_refusal(module) is not None
        or torch.is_autocast_enabled("cpu")
        or _has_any_global_hook()
    ):
        return False
    given = (x, edge_index, scaler.avg_deg_lin, scaler.avg_deg_log)
    if not is_plain(*given) or not all(isinstance(t, Tensor) and t.is_cpu for t in given):
        return False
    if x.dim() != 2 or edge_index.dim() != 2 or edge_index.layout is not torch.strided:
        return False
    if len(edge_index) != 2 or edge_index.dtype not in (torch.int32, torch.int64):
        return False
    return x.dtype in (torch.float32, torch.float64) and all(
        type(part) is nn.Sequential
        and not _SEQUENTIAL.is_watched(part)
        and LINEAR.knows(part[0])
        and part[0].weight.dtype is x.dtype
        for part in module.post_nns
    )


def _forward(
    module: PNAConv, x: Tensor, edge_index: Tensor, edge_attr: Any, groups: DegreeGroups
) -> Tensor:
    kind = kind_of(x, edge_attr)
    if module.divide_input:
        x = x.view(-1, module.towers, module.F_in)
    else:
        x = x.view(-1, 1, module.F_in).repeat(1, module.towers, 1)
    scaler, posts = module.aggr_module, list(module.post_nns)
    with scaling_later(scaler) as scaling:
        out = module.propagate(edge_index, x=x, edge_attr=edge_attr)
    if scaling.is_left:
        found = _of_degrees(scaler, x, out, groups, posts)
    else:  # upstream's aggregation
        if last_outcome(module) is TOO_SMALL:
            _TOO_LITTLE.add(module, edge_index.shape[1], kind)
        out = torch.cat([x, out], dim=-1)
        found = [post(out[:, tower]) for tower, post in enumerate(posts)]
    result: Tensor = module.lin(torch.cat(found, dim=1))
    return result


def _of_degrees(
    scaler: DegreeScalerAggregation,
    x: Tensor,
    aggregated: Tensor,
    groups: DegreeGroups,
    posts: list[Any],
) -> list[Tensor]:
    """The output of each tower, of its own features and their aggregations."""
    maps = [affine_map_of(post[0]) for post in posts]
    own = x.shape[-1]
    factors = functools.partial(_factors, scaler, aggregated.dtype)
    scaled = scaled_products(aggregated, groups, factors, [weight[:, own:] for weight, _ in maps])
    found = []
    for tower, (weight, bias) in enumerate(maps):
        out = F.linear(x[:, tower], weight[:, :own], bias) + scaled[tower]
        found.append(posts[tower][1:](out))
    return found


def _factors(scaler: DegreeScalerAggregation, dtype: torch.dtype, degrees: Tensor) -> Tensor:
    of_degrees = degrees.to(dtype)
    return torch.stack([SCALERS[name](scaler, of_degrees) for name in scaler.scaler], dim=1).to(
        dtype
    )
