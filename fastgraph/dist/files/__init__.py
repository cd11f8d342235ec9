"""Graphs and models in files, which any number of ranks may write and read.

Anything may enter that keeps data between runs; files hold tensors and JSON, nothing to execute.
"""
