"""Pictures of runs and comparisons.

They are drawn after the result is written, without pyplot and with a canvas of their own. One that
fails is a warning, and `report` and `resume` draw what is missing.
"""
