"""Studies of many runs: sweeps, comparisons and plans, with their tables and figures.

What one run leaves or shows does not belong here.
"""
