"""Graphs: their topology, the names by which they are found, and what is derived from them."""
