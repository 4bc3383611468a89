"""The decorator that declares a protocol's class and its hyper-parameters."""

from __future__ import annotations

import dataclasses
from typing import TypeVar, dataclass_transform

from securecluster.core.field_docs import with_parameters

P = TypeVar("P", bound=type)


@dataclass_transform(kw_only_default=True)
def protocol(declared: P) -> P:
    """Make a class a keyword-only dataclass whose documentation lists its hyper-parameters.

    Each hyper-parameter is an annotated field with a default and a string below it. `help` of the
    class and `--help` of its command both show that string.

    Args:
        declared: a subclass of `ClusteringProtocol`.
    """
    text = declared.__doc__ or ""
    dataclasses.dataclass(kw_only=True)(declared)  # changes the class in place
    declared.__doc__ = with_parameters(declared, text)
    return declared
