"""Figures of Pacheco et al. 2021 (NSIM)."""
