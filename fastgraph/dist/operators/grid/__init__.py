"""The grid: each rank computes one block of the adjacency matrix."""
