"""Heads: each rank computes some heads of attention for all rows, over all edges."""
