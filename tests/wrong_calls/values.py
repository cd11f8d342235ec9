"""Wrong values of arguments, and right ones that look as if they were wrong, by what they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def changed(index: Tensor, position: tuple[int | slice, int], value: int) -> Tensor:
    """The same but for one place, or one column."""
    copied = index.clone()
    copied[position] = value
    return copied


def graphs(good: Tensor, num_nodes: int) -> dict[str, Any]:
    """In place of an ``edge_index``.

    Args:
        good: a right one, ``[2, E]`` with more than 8 edges.
        num_nodes: of the graph.
    """
    both = changed(changed(good, (1, 7), num_nodes + 1), (0, 3), num_nodes + 4)
    return {
        "source too large": changed(good, (0, 7), num_nodes),
        "source far too large": changed(good, (0, 7), 2**40),
        "destination too large": changed(good, (1, 7), num_nodes),
        "destination far too large": changed(good, (1, 7), 2**33),
        "negative source": changed(good, (0, 7), -1),
        "negative destination": changed(good, (1, 7), -1),
        "source far too negative": changed(good, (0, 7), -(2**40)),
        "destination far too negative": changed(good, (1, 7), -(2**40)),
        "both too large": both,
        "loop too large": changed(good, (slice(None), 3), num_nodes),
        "negative loop": changed(good, (slice(None), 3), -1),
        "int32 too large": changed(good, (0, 7), num_nodes).int(),
        "int32 negative": changed(good, (1, 7), -3).int(),
        "float": good.float(),
        "int16": good.short(),
        "int8": good.to(torch.int8),
        "uint8": good.to(torch.uint8),
        "bool": good.bool(),
        "complex": good.to(torch.complex64),
        "three rows": torch.cat([good, good[:1]]),
        "a row": good[:1],
        "a column for each end": good.t().contiguous(),
        "one-dimensional": good[0],
        "three-dimensional": good.unsqueeze(0),
        "a scalar": torch.tensor(3),
        "empty": good[:, :0],
        "empty float": torch.empty(2, 0),
        "empty one-dimensional": torch.empty(0, dtype=torch.long),
        "None": None,
        "a list": good.tolist(),
        "a tuple": (good[0], good[1]),
        "numpy": good.numpy(),
        "a string": "edges",
        "on meta": good.to("meta"),
        "all the same": torch.zeros_like(good),
        "not contiguous": good.t().contiguous().t(),
    }


def adjacencies(good: Tensor, num_nodes: int) -> dict[str, Any]:
    """Sparse matrices in place of an ``edge_index``, of right and of wrong shapes."""
    found: dict[str, Any] = {}
    ends = good.flip(0)
    for name, size in {
        "right": (num_nodes, num_nodes),
        "too few rows": (num_nodes - 2, num_nodes),
        "too many rows": (num_nodes + 2, num_nodes),
        "too few columns": (num_nodes, num_nodes - 2),
        "too many columns": (num_nodes, num_nodes + 2),
        "empty": (0, 0),
    }.items():
        inside = (ends[0] < size[0]) & (ends[1] < size[1])
        values = torch.ones(int(inside.sum()))
        coo = torch.sparse_coo_tensor(ends[:, inside], values, size).coalesce()
        found[f"COO, {name}"] = coo
        found[f"CSR, {name}"] = coo.to_sparse_csr()
        if name in ("right", "too few rows"):
            found[f"CSC, {name}"] = coo.to_sparse_csc()
            found[f"CSR of float64, {name}"] = coo.double().to_sparse_csr()
            found[f"COO twice, {name}"] = torch.sparse_coo_tensor(ends[:, inside], values, size)
    found["dense"] = found["COO, right"].to_dense()
    return found


def of_nodes(x: Tensor) -> dict[str, Any]:
    """In place of features of nodes, ``[N, ..., C]`` with ``N`` above 4."""
    half = len(x) // 2
    return {
        "one-dimensional": x[:, 0] if x.dim() == 2 else x.flatten(),
        "three-dimensional": x.unsqueeze(0),
        "three-dimensional, nodes first": x.unsqueeze(1),
        "a scalar": torch.tensor(1.0),
        "int64": x.long(),
        "int32": x.int(),
        "int8": x.to(torch.int8),
        "bool": x > 0,
        "None": None,
        "a list": x.tolist(),
        "numpy": x.numpy(),
        "float16": x.half(),
        "bfloat16": x.bfloat16(),
        "float64": x.double(),
        "complex": x.to(torch.complex64),
        "too few rows": x[:half],
        "too many rows": torch.cat([x, x[:3]]),
        "no rows": x[:0],
        "too few channels": x[..., :2],
        "too many channels": torch.cat([x, x[..., :1]], -1),
        "one channel": x[..., :1],
        "no channels": x[..., :0],
        "a pair": (x, x),
        "a list of two": [x, x],
        "a pair with None": (x, None),
        "a pair with None first": (None, x),
        "a pair with few destinations": (x, x[:4]),
        "a pair with few sources": (x[:4], x),
        "a pair with other channels": (x, x[..., :2]),
        "a pair of mixed dtypes": (x, x.double()),
        "a pair of mixed devices": (x, x.to("meta")),
        "a triple": (x, x, x),
        "a single": (x,),
        "on meta": x.to("meta"),
        "sparse": x.to_sparse(),
        "not contiguous": x.transpose(0, -1).contiguous().transpose(0, -1),
    }


def of_edges(values: Tensor) -> dict[str, Any]:
    """In place of weights or features of edges, ``[E]`` or ``[E, F]``."""
    one = values if values.dim() == 1 else values[:, 0]
    two = values if values.dim() == 2 else torch.stack([values, values.neg()], 1)
    return {
        "one each": one,
        "a column": one.view(-1, 1) if one.is_contiguous() else one.unsqueeze(1),
        "a row": one.unsqueeze(0),
        "two each": two[:, :2],
        "three each": torch.cat([two, two], 1)[:, :3],
        "one more each": torch.cat([two, two[:, :1]], 1),
        "none each": two[:, :0],
        "two heads of two": torch.stack([two[:, :2], two[:, :2]], 1),
        "one head": two.unsqueeze(1),
        "one head of one": one[:, None, None],
        "too short": one[:-1],
        "too long": torch.cat([one, one[:1]]),
        "one": one[:1],
        "none": one[:0],
        "rows, too short": two[:-1],
        "rows, too long": torch.cat([two, two[:1]]),
        "rows, one": two[:1],
        "rows, none": two[:0],
        "scalar": torch.tensor(2.0),
        "number": 2.0,
        "a list": values.tolist(),
        "numpy": values.numpy(),
        "int64": torch.ones_like(values, dtype=torch.long),
        "bool": values > 0,
        "float16": values.half(),
        "float64": values.double(),
        "complex": values.to(torch.complex64),
        "on meta": values.to("meta"),
        "sparse": values.to_sparse(),
        "not contiguous": torch.stack([values, values], -1)[..., 0],
        "None": None,
        "negative": -values,
    }


def of_kinds(kinds: Tensor, num_kinds: int) -> dict[str, Any]:
    """In place of a kind, or a group, of each node or edge, ``[n]``."""
    return {
        "too large": changed_one(kinds, num_kinds),
        "far too large": changed_one(kinds, 2**40),
        "negative": changed_one(kinds, -1),
        "far too negative": changed_one(kinds, -(2**40)),
        "int32": kinds.int(),
        "int32 too large": changed_one(kinds, num_kinds).int(),
        "int16": kinds.short(),
        "uint8": kinds.to(torch.uint8),
        "float": kinds.float(),
        "bool": kinds.bool(),
        "one-hot": torch.nn.functional.one_hot(kinds, num_kinds),
        "a column": kinds.unsqueeze(1),
        "a row": kinds.unsqueeze(0),
        "too short": kinds[:-1],
        "too long": torch.cat([kinds, kinds[:1]]),
        "one": kinds[:1],
        "none": kinds[:0],
        "scalar": torch.tensor(1),
        "number": 1,
        "a list": kinds.tolist(),
        "numpy": kinds.numpy(),
        "None": None,
        "on meta": kinds.to("meta"),
        "backwards": kinds.flip(0),
    }


def changed_one(kinds: Tensor, value: int) -> Tensor:
    """The same but for one place."""
    copied = kinds.clone()
    copied[min(5, len(kinds) - 1)] = value
    return copied


def sizes(num_nodes: int) -> dict[str, Any]:
    """In place of the ``size`` of a graph."""
    return {
        "right": (num_nodes, num_nodes),
        "a list": [num_nodes, num_nodes],
        "too small": (num_nodes - 1, num_nodes - 1),
        "too few sources": (num_nodes - 1, num_nodes),
        "too few destinations": (num_nodes, num_nodes - 1),
        "more destinations": (num_nodes, num_nodes + 2),
        "more sources": (num_nodes + 2, num_nodes),
        "none of destinations": (num_nodes, None),
        "none of sources": (None, num_nodes),
        "of one": (num_nodes,),
        "of three": (num_nodes, num_nodes, num_nodes),
        "negative": (num_nodes, -1),
        "a number": num_nodes,
        "a tensor": torch.tensor([num_nodes, num_nodes]),
        "floats": (float(num_nodes), float(num_nodes)),
    }
