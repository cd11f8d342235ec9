"""Routing: replacements of upstream code, the decision at each call, and counts of decisions."""
