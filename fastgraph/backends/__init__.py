"""Backends: the kernels of operators. See :mod:`fastgraph.plugins.backend` for the contract."""
