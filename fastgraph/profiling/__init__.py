"""Where the time of a program goes: by layer and line, and by sampling, gathering, computing.

While no profile is taken, none of this runs.
"""
