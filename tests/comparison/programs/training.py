"""Ways to train that are easy to disturb by watching: one section each, which prints its loss."""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, GraphConv, HeteroConv, SAGEConv, global_mean_pool

warnings.simplefilter("ignore")
torch.manual_seed(5)
NODES = 40
X, Y = torch.randn(NODES, 8), torch.randint(0, 3, (NODES,))
EDGES = torch.randint(0, NODES, (2, 160))
SGD, Adam = torch.optim.SGD, torch.optim.Adam


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(8, 16), SAGEConv(16, 3, aggr="max")

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def loss_of(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(X, EDGES), Y)


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def scheduled() -> Tensor:
    model = Net()
    optimizer = Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(4):
        loss = step(optimizer, loss_of(model))
        scheduler.step()
    return loss + scheduler.get_last_lr()[0]


def several_optimizers() -> Tensor:
    model = Net()
    optimizers = [SGD(layer.parameters(), lr=0.1) for layer in model.children()]
    for _ in range(2):
        loss = loss_of(model)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return loss.detach()


def closure() -> Tensor:
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def again() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    return [optimizer.step(again) for _ in range(2)][-1].detach()


class Clipped(Adam):
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 0.1)
        super().step()


def subclass_of_an_optimizer() -> Tensor:
    model = Net()
    optimizer = Clipped(model.parameters(), lr=0.1)
    return [step(optimizer, loss_of(model)) for _ in range(3)][-1]


def scaled() -> Tensor:
    model = Net()
    optimizer, scaler = SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return loss.detach().float()


def checkpointed() -> Tensor:
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        out = checkpoint(model, X, EDGES, use_reentrant=False)
        loss = step(optimizer, F.cross_entropy(out, Y))
    return loss


def hetero() -> Tensor:
    kinds = [("a", "to", "b"), ("b", "to", "a")]
    model = HeteroConv({kind: GraphConv((8, 8), 3) for kind in kinds})
    optimizer = Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        out = model({"a": X, "b": X.flip(0)}, dict.fromkeys(kinds, EDGES))
        loss = step(optimizer, F.cross_entropy(out["a"], Y) + F.cross_entropy(out["b"], Y))
    return loss


def in_batches() -> Tensor:
    model = GCNConv(8, 3)
    optimizer = Adam(model.parameters(), lr=0.1)
    graphs = [Data(x=X, edge_index=EDGES, y=Y[i : i + 1]) for i in range(8)]
    for batch in DataLoader(graphs, 4, shuffle=True, num_workers=2):
        out = global_mean_pool(model(batch.x, batch.edge_index), batch.batch)
        loss = step(optimizer, F.cross_entropy(out, batch.y))
    return loss


def scripted() -> Tensor:
    model = torch.jit.script(GCNConv(8, 3))
    optimizer = Adam(model.parameters(), lr=0.1)
    return [step(optimizer, loss_of(model)) for _ in range(3)][-1]


def compiled() -> Tensor:
    model = GCNConv(8, 3, normalize=False)
    optimizer = SGD(model.parameters(), lr=0.1)
    whole = torch.compile(model, backend="eager", fullgraph=True)
    loss = [step(optimizer, loss_of(whole)) for _ in range(3)][-1]
    print("graphs", torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return loss


def explained() -> Tensor:
    model = Net()
    explain = Explainer(
        model,
        GNNExplainer(epochs=3),
        explanation_type="model",
        node_mask_type="attributes",
        edge_mask_type="object",
        model_config={
            "mode": "multiclass_classification",
            "task_level": "node",
            "return_type": "raw",
        },
    )
    return explain(X, EDGES, index=3).edge_mask.sum() + step(
        SGD(model.parameters(), lr=0.1), loss_of(model)
    )


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def watched_by_modes() -> Tensor:
    linear = nn.Linear(8, 3)
    optimizer = SGD(linear.parameters(), lr=0.1)
    with Functions() as functions, Operators() as operators:
        loss = step(optimizer, F.cross_entropy(linear(X), Y))
    print("modes", functions.names, operators.names)
    return loss


class Logged(Tensor):
    names: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        cls.names.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs)


def losses_of_other_kinds() -> Tensor:
    weight = torch.ones(3, requires_grad=True)
    weight.as_subclass(Logged).sum().backward()
    print("subclass", Logged.names)
    torch.ones(2, device="meta", requires_grad=True).sum().backward()
    with torch._subclasses.fake_tensor.FakeTensorMode():
        torch.ones(2, requires_grad=True).sum().backward()
    complex_weight = torch.ones(1, dtype=torch.complex64, requires_grad=True)
    (2 * complex_weight).backward(torch.ones(1, dtype=torch.complex64))
    torch.ones(1, requires_grad=True).to_sparse().backward(torch.ones(1).to_sparse())
    return weight.grad.sum()


class Touchy(GCNConv):
    @property
    def heads(self) -> int:
        raise RuntimeError("nobody asked")


def with_a_property() -> Tensor:
    model = Touchy(8, 3)
    return step(SGD(model.parameters(), lr=0.1), loss_of(model))


SECTIONS = {
    scheduled: 4,
    several_optimizers: 4,
    closure: 2,
    subclass_of_an_optimizer: 3,
    scaled: 2,
    checkpointed: 2,
    hetero: 2,
    in_batches: 2,
    compiled: 3,
    scripted: 3,
    explained: 4,
    watched_by_modes: 1,
    losses_of_other_kinds: 0,
    with_a_property: 1,
}
"""Each section and the number of optimizer steps that it takes."""

for section in SECTIONS:
    print(section.__name__, float(section()))
print("steps", sum(SECTIONS.values()))
