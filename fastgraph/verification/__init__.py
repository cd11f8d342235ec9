"""Checks that a backend's kernels compute, on this very device, what the reference computes."""
