"""Clients' data: sources, scenarios that deal them, and the federation they make.

What is trained on them is in `training`.
"""

from securecluster.core.lazy_names import attach

__getattr__, _HOMES = attach(__name__, __file__)
__all__ = sorted(_HOMES)
