"""Edge programs: messages of a few instructions, reduced over neighbourhoods.

``operations`` has the instructions, ``program`` the specification and its text, ``builder`` makes
programs from expressions, ``gradients`` derives those of gradients, ``evaluation`` computes them in
plain torch, and ``lowering`` prepares them for native kernels. ``trace`` makes programs of messages
that are Python functions, whose operations ``recording`` records.
"""
