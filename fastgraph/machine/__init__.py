"""What this machine has and does: the compiled kernels that fit it, and what a GPU records."""
