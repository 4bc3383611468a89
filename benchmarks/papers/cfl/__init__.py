"""Figures of Sattler et al. 2019 (CFL)."""
