"""Comparing whole programs, plain and under fastgraph: ``python -m fastgraph compare``.

Nothing is imported here, because a child process that watches a program must not import torch
before the program does.
"""
