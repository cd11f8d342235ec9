"""Make all that the training of LargeGT reads of a graph, after which nobody needs the graph.

::

    python examples/largegt/prepare.py tolokers data/tolokers --k 50
    rm -r data/tolokers/graph
    python examples/largegt/train.py data/tolokers

The graph itself goes into files that are mapped into memory, as it would be where it is larger;
what comes after reads them. ``python -m fastgraph tokens`` does the same for graphs of one's own.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import graphs
import numpy as np
from settings import parsed

import fastgraph
from fastgraph.pyg.positions import METHODS, node_positions
from fastgraph.tokens import open_graph, write_context, write_graph, write_tokens
from fastgraph.tokens.graph_files import graph_of_edges
from fastgraph.tokens.hop_features import DTYPES

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("graph", choices=graphs.NAMES)
parser.add_argument("out", type=Path)
parser.add_argument("--k", type=int, default=50, help="nodes of which a node sees tokens")
parser.add_argument("--position-channels", type=int, default=64)
parser.add_argument("--positions", choices=METHODS, default="powers")
parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of features in files")
parser.add_argument("--seed", type=int, default=0)
args = parsed(parser)
if args.out.exists():
    parser.error(f"out must be a new folder, got {args.out}")

graph = graphs.load(args.graph, args.seed)
num_nodes = len(graph.y)
args.out.mkdir(parents=True)
write_graph(args.out / "graph", graph_of_edges(graph.edge_index, num_nodes))
mapped = open_graph(args.out / "graph")
write_tokens(mapped, args.out / "tokens", args.k, seed=args.seed)
write_context(mapped.into, graph.x, args.out / "context", dtype=DTYPES[args.dtype])
with fastgraph.enabled():  # which gives PyG walks
    channels, method = args.position_channels, args.positions
    found = node_positions(graph.edge_index, num_nodes, channels, method=method, seed=args.seed)
np.save(args.out / "positions.npy", found.numpy())
np.save(args.out / "y.npy", graph.y.numpy())
np.save(args.out / "split.npy", graph.split.numpy())
print(f"{args.graph}: {num_nodes:,} nodes, {graph.edge_index.shape[1]:,} edges, in {args.out}")
