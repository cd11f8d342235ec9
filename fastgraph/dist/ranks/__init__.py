"""Ranks: who they are, what is sent between them, and what they have agreed on.

Anything about processes may enter that knows nothing of sharded tensors, graphs or operators.
"""
