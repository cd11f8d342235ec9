"""Graphs: CSR topology, the cache in which it is looked up, and all that is derived from it."""
