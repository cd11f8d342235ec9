"""Nothing that ranks remember outlives an edit, and all of them remember the same."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

import fastgraph
import fastgraph.dist as fgd
from fastgraph.dist.graphs.pyg import shard_as_known
from fastgraph.dist.ranks.world import WORLD
from fastgraph.dist.tensor.digests import DIGESTS
from fastgraph.dist.tensor.layout import only_here
from tests.dist.comparing import deviation
from tests.dist.graphs import NUM_FEATURES, NUM_NODES, PARTITIONS, graph

# Of the largest value: sums are taken in another order.
TOLERANCE = 1e-12

Values = list[Any]
CASES: dict[str, Callable[[Any], Values]] = {}


def case(function: Callable[[Any], Values]) -> Callable[[Any], Values]:
    CASES[function.__name__.replace("_", " ")] = function
    return function


def conv() -> GCNConv:
    torch.manual_seed(0)
    return GCNConv(NUM_FEATURES, 3)


def called(model: nn.Module, *inputs: Any) -> Values:
    model.zero_grad()
    out = model(*inputs)
    out.square().sum().backward()
    return [out.detach().clone(), *(p.grad.clone() for p in model.parameters())]


@case
def parameters_whose_data_is_replaced(data: Any) -> Values:
    model = conv()
    seen = called(model, data.x, data.edge_index)
    for p in model.parameters():
        p.data = p.data * 2
    out = model(data.x, data.edge_index)  # without a backward pass
    for p in model.parameters():
        p.data = p.data + 1
    return [*seen, out, *called(model, data.x, data.edge_index)]


@case
def averages_of_parameters(data: Any) -> Values:
    model, seen = conv(), []
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(3):
        seen += called(model, data.x, data.edge_index)
        backup = {name: p.data for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            shadow[name].mul_(0.5).add_(p.data, alpha=0.3)
            p.data = shadow[name].clone()
        seen.append(model(data.x, data.edge_index).detach())
        for name, p in model.named_parameters():
            p.data = backup[name]
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(3 * vector, model.parameters())
    seen.append(model(data.x, data.edge_index))
    return [*seen, model.float()(data.x.float(), data.edge_index).dtype == torch.float32]


@case
def an_index_that_is_edited_and_replaced(data: Any) -> Values:
    model, index, seen = conv(), data.edge_index.clone(), []
    for _ in range(2):
        seen += [*called(model, data.x, index), data.x[index[0]]]
        index.data[0] = index.data[0].roll(1)
        seen += [*called(model, data.x, index), data.x[index[0]]]
        index.data = index.flip(0)
        seen += [*called(model, data.x, index), data.x[index[0]]]
    return seen


@case
def a_replicated_index_that_is_edited_where_nobody_counts(data: Any) -> Values:
    model, index, seen = conv(), graph().edge_index, []
    for _ in range(2):
        seen += [*called(model, data.x, index), data.x[index[0]], data.x[index[0, :40]]]
        index.data[0] = index[0].roll(1)
        seen += [*called(model, data.x, index), data.x[index[0]], data.x[index[0, :40]]]
        index.numpy()[1] = index[1].flip(0).numpy()
    table = torch.arange(NUM_NODES * 4).view(NUM_NODES, 2, 2)
    seen.append(data.y.view(-1, 1, 1) * table)
    table.numpy()[:] += 1
    seen.append(data.y.view(-1, 1, 1) * table)
    mask = torch.arange(NUM_NODES) % 3 == 0
    seen.append(data.x[mask])
    mask.numpy()[:] = ~mask.numpy()
    return [*seen, data.x[mask]]


@case
def weights_that_are_edited_where_nobody_counts(data: Any) -> Values:
    model, weight, seen = conv(), data.edge_weight.clone(), []
    for _ in range(2):
        seen += called(model, data.x, data.edge_index, weight)
        weight.data.mul_(data.edge_attr[:, 0])
        seen += called(model, data.x, data.edge_index, weight)
        torch._foreach_mul_([weight.data], 2.0)
        seen += called(model, data.x, data.edge_index, weight)
        weight.data = weight + 1
    return [*seen, *called(model, data.x, data.edge_index, weight)]


@case
def a_sparse_matrix_whose_values_are_edited(data: Any) -> Values:
    plain = graph()
    size = (NUM_NODES, NUM_NODES)
    matrix = torch.sparse_coo_tensor(plain.edge_index, plain.edge_weight, size).coalesce()
    rows = matrix.to_sparse_csr()
    seen = [matrix @ data.x, rows @ data.x]
    matrix.values().mul_(2)
    rows.values().mul_(3)
    return [*seen, matrix @ data.x, rows @ data.x]


@case
def epochs_that_make_their_index_anew(data: Any) -> Values:
    seen = []
    for _ in range(3):
        index = data.edge_index.t().contiguous().t()
        seen += [data.x[index[0]], data.x[index.reshape(-1)], data.x[index.contiguous()[1]]]
    copied = data.w.t().contiguous()
    copied += 1
    joined = data.edge_attr.t().contiguous().t().reshape(-1)
    joined += 1
    itself = data.edge_attr.contiguous()
    itself += 1
    return [*seen, copied, joined, itself, data.w, data.edge_attr]


@case
def an_index_repeated_for_all_columns(data: Any) -> Values:
    index = data.edge_index[1].view(-1, 1).expand(-1, NUM_FEATURES)
    values = data.x[data.edge_index[0]]
    zeros = torch.zeros_like(data.x)
    return [zeros.scatter_add(0, i, values) for i in (index, index.contiguous(), index.clone())]


def star() -> Data:
    """All edges lead to one node, so that some ranks have none, and some have one."""
    found = graph()
    found.edge_index[1] = 0
    found.edge_index[1, 0] = NUM_NODES - 1
    return found


TIED: dict[str, Callable[[Callable[[Data], Data]], Values]] = {}


def tied(function: Callable[..., Values]) -> Callable[..., Values]:
    TIED[function.__name__.replace("_", " ")] = function
    return function


@tied
def edits_of_tensors_that_a_graph_has_taken(make: Callable[[Data], Data]) -> Values:
    mask, x = torch.zeros(NUM_NODES, dtype=torch.bool), torch.ones(NUM_NODES, 2)
    data = make(Data(x=x, train_mask=mask, edge_index=graph().edge_index))
    column = data.x.t()
    mask[:20] = True
    seen = [data.train_mask.sum(), data.x[data.train_mask]]
    x.mul_(3)
    seen += [column.sum(), data.x]
    data.train_mask[20:30] = True
    data.x[3] += 1
    column[0] *= 2
    seen += [mask.sum(), x.clone(), mask.clone()]
    x.data = x.data + 1
    return [*seen, data.x.sum(), data.x * 2]


@tied
def edits_of_edges_where_nobody_counts(make: Callable[[Data], Data]) -> Values:
    taken = graph()
    index, weight = taken.edge_index, taken.edge_weight
    data, model, seen = make(taken), conv(), []
    for _ in range(2):
        seen += [*called(model, data.x, data.edge_index, data.edge_weight)]
        seen.append(data.x[data.edge_index[0]])
        index.data[0] = index.data[0].roll(1)
        weight.numpy()[:] *= 2
        seen += [*called(model, data.x, data.edge_index, data.edge_weight)]
        index.numpy()[1, :30] = 3
        weight.data[5] += 1
        ends = data.edge_index.t()
        seen += [data.x[data.edge_index[0]], data.edge_weight, ends]
        seen += [*called(model, data.x, data.edge_index, data.edge_weight)]
    return seen


@tied
def edits_of_features_and_masks_where_nobody_counts(make: Callable[[Data], Data]) -> Values:
    mask, x = torch.arange(NUM_NODES) % 3 == 0, torch.ones(NUM_NODES, 4000)
    data = make(Data(x=x, train_mask=mask, edge_index=graph().edge_index))
    mask.numpy()[:] = ~mask.numpy()
    x.numpy()[3] = 5
    seen = [data.train_mask, data.x[data.train_mask]]
    DIGESTS.end()
    x.data.mul_(2)
    mask.data[7] ^= True
    seen += [data.x + 1, data.train_mask.sum()]
    x.numpy()[:, 0] = 4
    seen.append(data.x * 2)
    for row in range(0, NUM_NODES, 7):  # one number of a large tensor at a time
        x.numpy()[row, row] = 6
        seen.append(data.x.sum(1))
    mask.numpy()[9] = True
    data.x[2] += 1  # both edits
    return [*seen, data.x, x, data.x[data.train_mask]]


@tied
def features_that_a_fused_optimizer_trains(make: Callable[[Data], Data]) -> Values:
    weight = graph().edge_weight.requires_grad_()
    data = make(Data(x=graph().x, edge_index=graph().edge_index, edge_weight=weight))
    other = (data.edge_weight * 2).detach().requires_grad_()
    optimizer = torch.optim.Adam([weight, other], lr=0.1, fused=True)
    model, seen = conv(), []
    for _ in range(3):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index, data.edge_weight * other)
        out.square().sum().backward()
        optimizer.step()
        seen += [out.detach(), weight.detach().clone(), other.detach().clone()]
    with torch.no_grad():
        seen.append(model(data.x, data.edge_index, other))
    return seen


@tied
def edits_that_record_a_gradient(make: Callable[[Data], Data]) -> Values:
    x = torch.ones(NUM_NODES, 2)
    data = make(Data(x=x, edge_index=graph().edge_index))
    seen = [data.x.sum()]
    del x
    data.x += 1  # nobody sees the original any more
    data.x += 1
    return [*seen, data.x]


@tied
def gradients_of_tensors_that_a_graph_has_taken(make: Callable[[Data], Data]) -> Values:
    x = torch.ones(NUM_NODES, 1, requires_grad=True)
    w = torch.ones(NUM_NODES, 1, requires_grad=True)
    data = make(Data(x=x, h=2 * w, edge_index=graph().edge_index))
    seen: Values = [data.x.is_leaf, data.x.grad is None]
    for _ in range(2):
        (data.x * data.h).square().sum().backward(retain_graph=True)
        seen += [x.grad.clone(), w.grad.clone(), data.x.grad.clone()]
    data.x.grad.mul_(2)
    seen.append(x.grad.clone())
    data.x.grad = None
    return [*seen, x.grad is None]


@tied
def features_that_are_trained(make: Callable[[Data], Data]) -> Values:
    x = torch.ones(NUM_NODES, 4, requires_grad=True)
    data = make(Data(x=x, y=graph().y, edge_index=graph().edge_index))
    seen = []
    for given in (x, data.x):
        optimizer = torch.optim.Adam([given], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=given is x)
            F.cross_entropy(data.x * data.x, data.y).backward()
            optimizer.step()
            seen += [x.detach().clone(), data.x.detach()]
    return seen


def outcome(action: Callable[[Any], Values], given: Any, expected: Values) -> str:
    try:
        found = [fgd.whole(value) for value in action(given)]
    except Exception:
        return traceback.format_exc()
    wrong = []
    for position, (a, b) in enumerate(zip(expected, found, strict=True)):
        if isinstance(a, Tensor):
            text = deviation(a.detach(), b.detach(), TOLERANCE)
        else:
            text = "" if a == b else f"is {b}, expected {a}"
        wrong += [f"value {position} {text}"] if text else []
    return "; ".join(wrong)


def compare_on_this_rank() -> dict[str, str]:
    torch.set_default_dtype(torch.float64)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=30), dist.group.WORLD)
    WORLD.check = True
    found = {}
    layouts = {key: (graph, parts) for key, parts in PARTITIONS.items()}
    layouts["star"] = star, PARTITIONS["uneven"]
    with fastgraph.enabled():
        for key, (make, parts) in layouts.items():
            for name, action in CASES.items():
                expected = action(make())
                data = fgd.shard(make(), parts=parts(WORLD.size))
                found[f"{name}, {key}"] = outcome(action, data, expected)
    for name, action in TIED.items():
        with only_here():
            DIGESTS.begin()
            expected = action(lambda data: data)
            DIGESTS.begin()
            take = lambda data: shard_as_known(data, method="even")  # noqa: E731
            found[name] = outcome(action, take, expected)
    return found


@pytest.fixture(scope="module")
def found(world_size: int, once_on_ranks: Any) -> list[dict[str, str]]:
    found: list[dict[str, str]] = once_on_ranks(compare_on_this_rank, world_size)
    return found


@pytest.mark.parametrize("key", [*PARTITIONS, "star"])
@pytest.mark.parametrize("name", CASES)
def test_edits_are_seen(found: list[dict[str, str]], name: str, key: str) -> None:
    for rank, of_rank in enumerate(found):
        assert not of_rank[f"{name}, {key}"], f"rank {rank}: {of_rank[f'{name}, {key}']}"


@pytest.mark.parametrize("name", TIED)
def test_graphs_have_the_tensors_that_they_were_given(
    found: list[dict[str, str]], name: str
) -> None:
    for rank, of_rank in enumerate(found):
        assert not of_rank[name], f"rank {rank}: {of_rank[name]}"
