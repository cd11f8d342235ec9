"""Tokens of nodes: samples, stores and what they are made of."""
