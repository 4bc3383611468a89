"""Figures and tables of Ali & Arafa 2024 (one-shot clustering)."""
