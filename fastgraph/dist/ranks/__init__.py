"""Ranks: the processes of a program, their collectives, and facts on which they agree.

Anything about processes may enter that knows nothing of sharded tensors, graphs or operators.
"""
