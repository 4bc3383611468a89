"""The same rounds in this project, Apple's pfl, Flower's simulation and two baselines.

The baselines are a plain PyTorch loop and one centralised model. Environments are made by
`python -m benchmarks.peers.make`, measurements by
`python -m benchmarks.peers`.

The workers run in their own environments, where this package is the top-level package `peers`: they
import nothing of securecluster.
"""
