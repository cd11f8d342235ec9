"""All that a plugin's author reads: the hooks, and what they return.

May enter: contracts, which import nothing of fastgraph but each other. What fastgraph does with a
plugin stands above: the registry of kernels in ``registry/``, the dispatcher in ``routing/``.
"""
