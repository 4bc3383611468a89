"""The papers' figures and tables, one script each: `python -m benchmarks.papers.NAME
[--seeds 3] [--full] [--minutes 10]`.

Without `--full` a script runs at a scale that two CPU cores finish in minutes; each row says which
scale it has.
"""
