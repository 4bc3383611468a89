"""Masks that the server does not know, and the keys that clients agree on for them."""
