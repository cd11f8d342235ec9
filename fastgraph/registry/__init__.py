"""The registry: backends, the specification of operators, and the kernel for each call."""
