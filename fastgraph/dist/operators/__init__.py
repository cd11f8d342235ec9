"""Operators of fastgraph on sharded tensors, in the mode that is fastest for each layer.

Anything may enter that computes an operator on ranks, or decides how. A mode is a folder:
``graph.py`` is the local graph that a rank computes with, ``exchange.py`` the rows that are sent,
``computing.py`` the operators, and ``cost.py`` what these take. ``protocol.py`` is what all modes
have in common, ``modes.py`` their list; the choice between them and what they share stand beside
it. Nothing here knows where graphs come from.
"""
