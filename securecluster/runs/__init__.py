"""Runs: what carries a method out, the folder that a run leaves, and what it gives its user."""
