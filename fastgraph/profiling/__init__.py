"""Where the time of a program goes: by layer and line, and by sampling, gathering, computing.

Nothing here is asked while no profile is taken.
"""
