"""Privacy-focused secure clustering for federated learning.

from securecluster import Federation, LabelSwap
from securecluster.protocols import CFL
"""

from importlib.metadata import PackageNotFoundError, version

from securecluster.data import (
    Dirichlet,
    Federation,
    Iid,
    Inversion,
    LabelPermutation,
    LabelSplit,
    LabelSwap,
    Natural,
    Pathological,
    Rotation,
    Tasks,
)
from securecluster.errors import SecureClusterError, SecureClusterWarning

try:
    __version__ = version("securecluster")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0+unknown"

__all__ = [
    "Dirichlet",
    "Federation",
    "Iid",
    "Inversion",
    "LabelPermutation",
    "LabelSplit",
    "LabelSwap",
    "Natural",
    "Pathological",
    "Rotation",
    "SecureClusterError",
    "SecureClusterWarning",
    "Tasks",
    "__version__",
]
