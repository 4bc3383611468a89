"""Foundations of all packages: randomness, serialization, files, validation, devices.

Nothing here knows of clients' data, messages or methods.

Equal runs are equal in every process: no sum of floats, draw, file or frame follows the order of a
set of strings, which differs from process to process (PYTHONHASHSEED).
"""
