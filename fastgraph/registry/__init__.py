"""Who computes which operator: the contract of backends, the operators, and the registry."""
