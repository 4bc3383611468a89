"""Run folders: what is in them, who may write, and how their files are read again.

What a result is lies in `results`, and folders of exports beside their export.
"""
