"""Backends: who computes an operator. See :mod:`fastgraph.registry.backend` for the contract."""
