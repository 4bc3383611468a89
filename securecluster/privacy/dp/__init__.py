"""Differential privacy.

The package has mechanisms, noise streams, the accountant, the ledger and audits of both.
"""
