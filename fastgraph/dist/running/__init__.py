"""Programs on ranks: how scripts are launched, and how a run is compared with one process.

Anything may enter that starts a program or looks after one, such as its hash seed and the files
that it writes. Nothing imports this room but the command line and ``fastgraph.dist`` itself.
"""
