"""Scripts that know nothing of ranks: what each rank does beside computing."""
