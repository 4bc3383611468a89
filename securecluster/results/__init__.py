"""What `fit` returns: labels, models and scores, their predictions, saving, export, newcomers.

Sentences about a result are in `statements`.
"""
