"""Figures of a run, a file each.

Those of studies are beside their tables in `studies`; `securecluster.plot` hands out both.
"""
