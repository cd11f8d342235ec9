"""Graphs of PyG and DGL with sharded tensors: which rank owns which nodes, and edges.

Anything may enter that turns a graph of a framework into one on ranks, or gives its rows to other
ranks. What is only DGL's stands in ``dgl/``.
"""
