"""The sharded tensor: the shape of the whole, and the data of this rank's rows.

Anything may enter that a tensor with rows on many ranks needs: layouts, exchanges of rows, and
rules for operations of torch, in ``rules/``. Nothing here knows graphs or operators of fastgraph.
"""
