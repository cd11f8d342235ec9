"""Backends: who computes an operator. See :mod:`fastgraph.plugins.backend` for the contract."""
