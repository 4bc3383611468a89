"""Users' own tables, in files and in memory, read as they lie there and without loss.

`parts` are rows of a file or a frame, `files` finds and reads those of a folder, `cells` turns
text into numbers and names, `clients` gives each client its rows, and `description` says what was
understood.
"""
