"""The command line, run folders, reports and pictures.

No other code knows protocols by name.
"""
