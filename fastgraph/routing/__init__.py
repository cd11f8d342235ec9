"""Routing: which upstream code is replaced, when, and what became of every call."""
