"""The command line: its entry, and a file for each command that is no study.

Here belong parsing, help and what a command prints first. What a command does lies below, so that
Python programs can do the same; what several commands share is in `commands`.
"""
