"""Sketches and codecs that shorten updates."""
