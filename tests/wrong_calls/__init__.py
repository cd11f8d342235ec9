"""Wrong calls of every class with a route: do they end without and with fastgraph alike?

``python -m tests.wrong_calls`` makes whole products of them. Upstream's own code reads and writes
other memory on some of these inputs, so processes of their own run them, and may die.
"""
