"""The protections of replies by the names that users give: every place to add one to.

A protection is a folder, and an object of it here. Whatever asks for a run's protections asks these
objects (`protection.SumProtection`, `protection.PairProtection`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from securecluster.errors import UsageError
from securecluster.messaging.transcript import NAMING_METHODS
from securecluster.protections.encryption.parameters import BFV, CKKS
from securecluster.protections.encryption.protection import (
    EncryptedPairProtection,
    EncryptedSumProtection,
)
from securecluster.protections.pads.protection import PadProtection
from securecluster.protections.plain import PlainPairProtection, PlainSumProtection
from securecluster.protections.protection import PairProtection, Protection, SumProtection
from securecluster.protections.secure_sums.protection import SecureSumProtection
from securecluster.runtime.endpoint import least_members
from securecluster.runtime.services import KEY_METHODS, MessageTypes

PLAIN = PlainSumProtection.name
# what sentences advise, and methods have by default, where single replies are to be hidden in sums
ADVISED = SecureSumProtection.name
# of sums, by the values of the option `aggregation`; the first is the default
AGGREGATIONS: dict[str, SumProtection] = {
    protection.name: protection
    for protection in (
        PlainSumProtection(),
        SecureSumProtection(),
        EncryptedSumProtection(BFV),
        EncryptedSumProtection(CKKS),
    )
}
# of pairs, by the values of the option `relevance`
RELEVANCES: dict[str, PairProtection] = {
    protection.name: protection
    for protection in (PlainPairProtection(), PadProtection(), EncryptedPairProtection())
}


def service_methods() -> dict[str, MessageTypes]:
    """Return the (query class, reply class) of the methods that clients answer for no protocol.

    These are the methods of the key agreement and of all protections, by name.
    """
    methods = dict(KEY_METHODS)
    for protection in (*AGGREGATIONS.values(), *RELEVANCES.values()):
        methods.update(protection.methods)
    return methods


def register(protection: SumProtection | PairProtection) -> None:
    """Add a protection, so that the option of sums or pairs takes its name in this process.

    Args:
        protection: of sums or of pairs.

    Raises:
        UsageError: there is a protection of this name.
    """
    taken: Mapping[str, Protection] = RELEVANCES
    if isinstance(protection, SumProtection):
        taken = AGGREGATIONS
    if protection.name in taken:
        raise UsageError(
            f"there is a protection {protection.name!r} already: give yours another name"
        )
    if isinstance(protection, SumProtection):
        AGGREGATIONS[protection.name] = protection
    else:
        RELEVANCES[protection.name] = protection
    NAMING_METHODS.update(protection.methods)


def survivors_of(config: Mapping[str, Any]) -> Callable[[int], int]:
    """Return the function from members to the smallest number of survivors whose sum is read.

    Args:
        config: what clients and server agreed on.
    """
    protection = AGGREGATIONS[config["aggregation"]]
    return partial(protection.least_survivors, minimum=least_members(config))


def described(protections: Iterable[Protection]) -> str:
    """Return the names of protections with what they do, as a text of the command line.

    Args:
        protections: in their order; those that do the same stand together.
    """
    names: dict[str, list[str]] = {}
    for protection in protections:
        names.setdefault(protection.about, []).append(protection.name)
    parts = [f"{' or '.join(same)} ({about})" for about, same in names.items()]
    return f"{', '.join(parts[:-1])} or {parts[-1]}"
