"""Protections of replies, one folder each, and the registry of their names."""
