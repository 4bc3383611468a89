"""Privacy-focused secure clustering for federated learning.

from securecluster import CFL, Federation, LabelSwap

federation = Federation.simulate("digits", scenario=LabelSwap(), clients=20)
labels = CFL(rounds=20).fit(federation).labels_
"""

from securecluster.core.lazy_names import attach

TYPE_CHECKING = False  # as in typing, which takes a while to load
if TYPE_CHECKING:
    from typing import Any

_load, HOMES = attach(__name__, __file__)
__all__ = sorted([*HOMES, "__version__"])


def __getattr__(name: str) -> "Any":
    """Import a public name on first access.

    Importing the package loads no numpy, so the command line starts without waiting for it.
    """
    return _version() if name == "__version__" else _load(name)


def __dir__() -> list[str]:
    return __all__


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("securecluster")
    except PackageNotFoundError:  # a checkout that was never installed
        return "0+unknown"
