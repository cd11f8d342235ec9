"""Upstream's own tests and examples with and without fastgraph: ``python -m tests.parity``.

Run by ``make parity``, which leaves what it found in ``found.json`` and on ``docs/parity.md``.
"""
