"""Operators of fastgraph on sharded tensors, in the mode that is fastest for each layer.

Anything may enter that computes an operator on ranks, or decides how. Each mode has a folder:
``graph.py`` is the local graph that a rank computes with, ``exchange.py`` the rows that are sent,
``computing.py`` the operators; the halo does both at once, in ``overlap.py``. What the modes share,
the cost of each and the choice between them stand beside them. Nothing here knows where graphs come
from.
"""
