"""Foundations of all packages: randomness, serialization, files, validation, devices."""
