"""Differential privacy: mechanisms, noise streams, the accountant, the ledger and audits of both."""
