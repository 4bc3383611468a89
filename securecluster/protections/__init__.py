"""Protections of replies, one folder each, and the registry of their names.

Noise, clipping and masks of a single row are in `privacy`.
"""
