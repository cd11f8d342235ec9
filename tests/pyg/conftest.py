"""PyG renders a class's ``propagate`` from its first instance in the process.

Whether it can use ``message_and_aggregate`` is decided there, so a first instance with an unusual
aggregation would change what later tests compare with.
"""

from torch_geometric.nn import GraphConv, SAGEConv

SAGEConv(1, 1)
GraphConv(1, 1)
