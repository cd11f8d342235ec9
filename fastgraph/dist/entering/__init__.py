"""Replicated tensors that meet sharded ones: what both keep in common, and that ranks agree."""
