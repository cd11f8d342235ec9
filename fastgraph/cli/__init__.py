"""The command line: ``python -m fastgraph``. Nothing here imports torch at module level."""
