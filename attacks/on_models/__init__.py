"""Attacks on models: of clusters, over all rounds, and such as a server crafts."""
