"""Which kernel computes an operator: the operators, the signatures of kernels, the registry."""
