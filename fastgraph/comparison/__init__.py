"""Running the same thing through upstream and through fastgraph, and comparing what comes out.

``modules`` compares one call of a module, ``scripts`` whole programs, and ``checking`` every call
of a layer while a program runs. Nothing is imported here, because a child process that watches a
program must not import torch before the program does.
"""
