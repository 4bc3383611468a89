"""How the relevance of pairs of clients is formed: options, and what does not work.

Pads are refused where they would hide nothing: for methods without a reply in pairs, which the
declarations of their clients tell, and for SR-FCA where its losses leave again in plain sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from securecluster.core.validation import IN_PYTHON, KeyOf, OneOf, check_choice
from securecluster.errors import UsageError
from securecluster.protections.pair_rows import PairRange
from securecluster.protections.protection import LABELS, MATRIX
from securecluster.protections.registry import PLAIN, RELEVANCES
from securecluster.protocols.common.options.option_group import OptionGroup
from securecluster.runtime.endpoint import has_pairs
from securecluster.runtime.pair_aggregators import LabelledValue, PairFunction

if TYPE_CHECKING:
    from securecluster.data.facts import Facts
    from securecluster.parties.method import Method
    from securecluster.protections.protection import PairProtection

RELEASES = (LABELS, MATRIX)


@dataclass(kw_only=True)
class PairOptions(OptionGroup):
    """Options of R_ij = (r_ij + r_ji)/2 of pairs of clients."""

    relevance: Annotated[str, KeyOf(RELEVANCES)] = PLAIN
    """how R_ij = (r_ij + r_ji)/2 of pairs of clients is formed: {relevances}"""
    relevance_release: Annotated[str | None, OneOf(*RELEASES), IN_PYTHON] = None
    """relevance ckks only: what the key authority tells the server of R: labels (the clusters
    alone) or matrix (R of numbers that clients round to 2^-14); None is labels where the method
    clusters R itself (oneshot), and else matrix
    """

    words_: ClassVar[Mapping[str, str]] = {"relevances": RELEVANCES.described()}
    functions: ClassVar[Mapping[str, PairFunction]] = {}
    """Functions of R that the server may ask for, by name. Their parameters are those of the
    configuration, so that another party than the server can compute them."""
    fields: ClassVar[Mapping[str, PairRange]] = {}
    """Ranges of the fields of rows of pairs."""
    labels: ClassVar[Mapping[str, LabelledValue]] = {}
    """Makes the value of a function of R where labels are all that the server is told, by its
    name."""

    @property
    def protection(self) -> PairProtection:
        """Return what hides rows of pairs.

        Raises:
            UsageError: there is no protection of this name.
        """
        check_choice(self, relevance=tuple(RELEVANCES))
        return RELEVANCES[self.relevance]

    @property
    def hide_rows(self) -> bool:
        """Return whether the server reads no row of pairs."""
        return self.protection.hides

    @property
    def by_authority(self) -> bool:
        """Return whether a key authority tells of R."""
        return self.protection.by_authority

    @property
    def show_sums(self) -> bool:
        """Return whether the server reads R_ij, and no part of it."""
        if self.by_authority:
            return not self.labelled
        return self.hide_rows

    @property
    def labelled(self) -> Mapping[str, LabelledValue]:
        """Return the functions of R of which labels alone are released."""
        if self.relevance_release == MATRIX:
            return {}
        return self.labels

    def refusal(self, method: Method) -> str | None:
        """Return why the server of a method forms no pairs, and the nearest choice that works.

        A method that forms pairs with some of its options only adds a reason.

        Args:
            method: whose options they are.

        Returns:
            One sentence; None where the method works.
        """
        if has_pairs(method.client):
            return None
        return (
            f"no reply of {type(method).__name__} leaves in pairs, so there is no relevance to "
            "hide: take relevance plain"
        )

    def check(self, method: Method, clients: int) -> None:
        """Check whether the method forms pairs, and what the key authority tells of R.

        Args:
            method: whose options they are.
            clients: m.

        Raises:
            UsageError: an unknown option, or one that does not work with the method.
        """
        protection = self.protection
        reason = self.refusal(method) if protection.hides else None
        if reason is not None:
            raise UsageError(reason)
        if self.relevance_release is not None:
            self._check_release(method)
        protection.check()  # a missing package is named before anything is sent

    def _check_release(self, method: Method) -> None:
        """Raise UsageError unless the key authority can release what is asked for."""
        if not self.by_authority:
            able = [name for name, other in RELEVANCES.items() if other.by_authority]
            raise UsageError(
                f"relevance_release is of the key authority: take relevance {' or '.join(able)}, "
                "or leave relevance_release out"
            )
        if self.relevance_release == LABELS and not self.labels:
            raise UsageError(
                f"the server of {type(method).__name__} computes with R itself, so labels are not "
                "enough: take relevance_release matrix"
            )

    def agreed(self, method: Method, facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration, without options that have no effect.

        Args:
            method: whose options they are.
            facts: of the clients and their data.
            config: hyper-parameters with their defaults resolved.
        """
        left_out = []
        if not self.hide_rows:
            left_out.append("relevance")
        if not self.by_authority:
            left_out.append("relevance_release")
        return {name: value for name, value in config.items() if name not in left_out}
