"""The same rounds in this project, Apple's pfl, Flower's simulation, a plain PyTorch loop and one
centralised model.

Environments: `python -m securecluster.benchmarks.peers.make`. Measurement: `python -m
    securecluster.benchmarks.peers`.
The workers run in their own environments, where this package is the top-level package `peers`: they
import nothing of securecluster.
"""
