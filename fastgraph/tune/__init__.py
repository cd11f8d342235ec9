"""Policies that learn while a program runs; what they learn of a graph is kept beside it."""
