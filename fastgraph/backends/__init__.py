"""Backends: who computes an operator. See :mod:`fastgraph.backends.base` for the contract."""
