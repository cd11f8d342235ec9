"""Shares of the work that fit the devices of the ranks, by what was measured or is known of them.

Anything may enter that measures or predicts what a rank takes, or acts upon it.
"""
