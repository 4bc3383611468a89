"""Privacy of what leaves a client: its stages, and their privacy cost.

The package has the pipeline of stages, and the packages `dp`, `masking` and `compression`. What
hides replies in sums and pairs is in `protections`.
"""
