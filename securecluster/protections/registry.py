"""The protections of replies by the names that users give: every place to add one to.

A protection is a folder, and its name stands here with what it does and where its object is, which
is loaded when somebody asks for it. Whatever asks for a run's protections asks these objects
(`protection.SumProtection`, `protection.PairProtection`).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from securecluster.errors import UsageError
from securecluster.messaging.transcript import NAMING_METHODS
from securecluster.runtime.endpoint import least_members, planned_losses
from securecluster.runtime.services import KEY_METHODS, MessageTypes

if TYPE_CHECKING:
    from securecluster.protections.protection import (
        PairProtection,
        Protection,
        SumPlan,
        SumProtection,
    )

P = TypeVar("P", bound="Protection")
HERE = "securecluster.protections"
PLAIN = "plain"
# what sentences advise, and methods have by default, where single replies are to be hidden in sums
ADVISED = "secagg"
# sums of ciphertexts for a key authority, which 0.2 had
LEFT_SUMS = dict.fromkeys(
    ("bfv", "ckks"),
    "take secagg, which hides single replies without a key authority, or read this run with "
    "securecluster 0.2",
)


class Place(NamedTuple):
    """Module and maker of a protection.

    Args:
        about: what it does, as help says it.
        module: that makes it, in this room.
        maker: function or class of the module, without arguments.
    """

    about: str
    module: str
    maker: str

    def load(self) -> Any:
        """Return the protection, which says the same of itself."""
        made = getattr(importlib.import_module(f"{HERE}.{self.module}"), self.maker)()
        made.about = self.about
        return made


class Registry(MutableMapping[str, P], Generic[P]):
    """Protections by name, each loaded when it is asked for.

    Args:
        places: of those of this project.
    """

    def __init__(self, places: Mapping[str, Place]) -> None:
        self._entries: dict[str, Place | P] = dict(places)

    def __getitem__(self, name: str) -> P:
        entry = self._entries[name]
        if isinstance(entry, Place):
            entry = self._entries[name] = entry.load()
        made: P = entry
        return made

    def __setitem__(self, name: str, protection: P) -> None:
        self._entries[name] = protection

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def described(self) -> str:
        """Return the names with what they do, as a text of the command line.

        Those that do the same stand together.
        """
        names: dict[str, list[str]] = {}
        for name, entry in self._entries.items():
            names.setdefault(entry.about, []).append(name)
        choices = [f"{' or '.join(same)} ({about})" for about, same in names.items()]
        return f"{', '.join(choices[:-1])} or {choices[-1]}"


# of sums, by the values of the option `aggregation`; the first is the default
AGGREGATIONS: Registry[SumProtection] = Registry(
    {
        PLAIN: Place("the server reads every reply and adds them", "plain", "PlainSumProtection"),
        ADVISED: Place(
            "clients mask their replies, so that the server reads sums over two or more of them "
            "only",
            "secure_sums.protection",
            "SecureSumProtection",
        ),
    }
)
# of pairs, by the values of the option `relevance`
RELEVANCES: Registry[PairProtection] = Registry(
    {
        PLAIN: Place("the server reads every r_ij", "plain", "PlainPairProtection"),
        "pads": Place("it reads R_ij only", "pads.protection", "PadProtection"),
        "ckks": Place(
            "a key authority decrypts R; see relevance_release",
            "encryption.protection",
            "EncryptedPairProtection",
        ),
    }
)


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
    from securecluster.protections.protection import SumProtection

    taken: Registry[Any] = RELEVANCES
    if isinstance(protection, SumProtection):
        taken = AGGREGATIONS
    if protection.name in taken:
        raise UsageError(
            f"there is a protection {protection.name!r} already: give yours another name"
        )
    taken[protection.name] = protection
    NAMING_METHODS.update(protection.methods)


def sum_plan_of(config: Mapping[str, Any]) -> SumPlan:
    """Return what the sums of a run have to bear.

    Args:
        config: what clients and server agreed on.
    """
    lost, colluding = planned_losses(config)
    return AGGREGATIONS[config["aggregation"]].plan(least_members(config), lost, colluding)
