"""``benchmarks/never_slower.py --library dgl`` measures every class of DGL that has a route."""

from __future__ import annotations

import pytest
import torch

from tests.cuda.benchmarks import measure
from tests.dgl.graphs import dgl, routed_classes

pytestmark = pytest.mark.skipif(
    not hasattr(dgl.nn, "GatedGCNConv"), reason="this DGL lacks layers that benchmarks measure"
)


def test_no_class_is_forgotten() -> None:
    classes = measure("dgl_classes")
    missing = routed_classes() - {type(make(8)) for make in classes.LAYERS.values()}
    assert not missing, sorted(cls.__name__ for cls in missing)


def test_layers_get_what_they_take_and_have_gradients_of_features() -> None:
    classes = measure("dgl_classes")
    assert set(classes._ARGUMENTS) <= set(classes.LAYERS)
    data = measure("shapes").at_random("some", 12, 40)
    for name in classes.names():
        case = classes.Case(name, data, 8)
        x = case.x.clone().requires_grad_()
        out = case.forward(x, case.fresh())
        assert out.shape[0] == 12
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        assert grad.abs().sum() > 0, name
