"""Measurements of ``python -m fastgraph tune``: the calls of a script, timed in all variants."""
