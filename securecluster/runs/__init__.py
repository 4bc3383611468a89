"""How a run in this process goes on: carried out, resumed and replayed.

What its parties are lies in `parties`, and what it leaves in `folders` and `results`.
"""
