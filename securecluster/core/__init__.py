"""Foundations that every room uses: randomness, serialization, files, validation, devices."""
