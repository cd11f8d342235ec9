"""Whether the kernels of a backend compute, on this very device, what the reference computes."""
