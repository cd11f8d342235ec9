"""This machine: the compiled kernels that fit it, its memory and caches, and CUDA graph capture."""
