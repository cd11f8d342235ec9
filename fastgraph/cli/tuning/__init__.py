"""``python -m fastgraph tune``: what a script calls, measured in the ways that there are."""
