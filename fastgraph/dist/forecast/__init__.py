"""Forecasts of the time of a script on more devices than there are, from a step on one process.

Anything may enter that predicts without running on ranks; see ``python -m fastgraph dist-plan``.
"""
