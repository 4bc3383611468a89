"""Privacy-focused secure clustering for federated learning.

from securecluster import CFL, Federation, LabelSwap

federation = Federation.simulate("digits", scenario=LabelSwap(), clients=20)
labels = CFL(rounds=20).fit(federation).labels_
"""

TYPE_CHECKING = False  # as in typing, which takes a while to load
if TYPE_CHECKING:
    from typing import Any


def __getattr__(name: str) -> "Any":
    """Import a public name on first access.

    Importing the package loads nothing, so that the command line starts without waiting for it, and
    listens to signals as soon as it can.
    """
    if name == "__version__":
        return _version()
    from securecluster.core.lazy_names import attach

    load, homes = attach(__name__, __file__)
    if name == "HOMES":
        return homes
    if name == "__all__":
        return sorted([*homes, "__version__"])
    return load(name)


def __dir__() -> "list[str]":
    names: list[str] = __getattr__("__all__")
    return names


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("securecluster")
    except PackageNotFoundError:  # a checkout that was never installed
        return "0+unknown"
