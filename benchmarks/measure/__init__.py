"""Parts shared by the benchmark scripts."""
