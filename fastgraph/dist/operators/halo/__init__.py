"""The halo: each rank computes its own rows, and gathers the rows of others that these need."""
