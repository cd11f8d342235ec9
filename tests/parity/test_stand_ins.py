"""Random graphs in place of data sets: every loader of PyG's examples gives batches of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.records import finished, read
from tests.parity.running import run_examples
from tests.parity.suites import Suite
from tests.pyg.mini_batches import WITHOUT_SAMPLER

pytestmark = WITHOUT_SAMPLER

SUITE = Suite("any", "Any", "torch", "", ("test",), ("test",), ("examples",))
SCRIPT = """\
import torch_geometric.transforms as T
from ogb.nodeproppred import Evaluator, PygNodePropPredDataset
from torch_geometric.data import Batch
from torch_geometric.datasets import OGB_MAG, PPI, Flickr, Planetoid, Reddit
from torch_geometric.loader import (
    ClusterData, ClusterLoader, GraphSAINTRandomWalkSampler, HGTLoader, LinkNeighborLoader,
    NeighborLoader, RandomNodeLoader, ShaDowKHopSampler
)
from torch_geometric.typing import WITH_TORCH_SPARSE

if not WITH_TORCH_SPARSE:
    quit("This needs torch-sparse")

reddit, flickr, cora = Reddit("reddit"), Flickr("flickr"), Planetoid("cora", "Cora")
train = PPI("ppi", split="train")
mag = OGB_MAG("mag", preprocess="metapath2vec", transform=T.ToUndirected(merge=True))
products = PygNodePropPredDataset("ogbn-products", "products", transform=T.AddSelfLoops())
y = products[0].y
assert Evaluator("ogbn-products").eval({"y_true": y, "y_pred": y})["acc"] == 1
assert set(products.get_idx_split()) == {"train", "valid", "test"}
papers = "paper", mag[0]["paper"].train_mask
parts = ClusterData(Batch.from_data_list(train), 4, save_dir=train.processed_dir)
loaders = [
    NeighborLoader(reddit[0], [5, 3], input_nodes=reddit[0].train_mask, batch_size=64),
    LinkNeighborLoader(cora[0], [5, 3], neg_sampling_ratio=1.0, batch_size=64),
    GraphSAINTRandomWalkSampler(flickr[0], batch_size=50, walk_length=2, num_steps=2,
                                sample_coverage=2, save_dir=flickr.processed_dir),
    ShaDowKHopSampler(flickr[0], depth=2, num_neighbors=3, node_idx=flickr[0].val_mask),
    ClusterLoader(parts, batch_size=2),
    NeighborLoader(mag[0], [5, 3], input_nodes=papers, batch_size=64),
    HGTLoader(mag[0], [16, 16], input_nodes=papers, batch_size=64),
    RandomNodeLoader(products[0], num_parts=3),
]
for loader in loaders:
    assert next(iter(loader)).num_edges > 0
    print(type(loader).__name__)
print(reddit.num_classes, flickr.num_node_features, train.num_classes, mag.num_classes)
"""


def test_every_loader_of_the_examples_gives_batches(tmp_path: Path) -> None:
    pytest.importorskip("pymetis")
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "all.py").write_text(SCRIPT)
    record = tmp_path / "fastgraph.jsonl"
    run_examples(SUITE, tmp_path, "fastgraph", ["examples/all.py"], record, 240.0, ["--stand-ins"])
    (event,) = finished(read(record)).values()
    assert (event.outcome, event.why) == ("passed", "")
    assert event.output.splitlines()[-1] == "7 32 5 7"
    assert len(event.output.splitlines()) >= 9
