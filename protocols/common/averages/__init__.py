"""How models are averaged: one a cluster, k at once, in blocks, and the loops around it."""
