"""How the relevance of pairs of clients is formed: options, and what does not work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from securecluster.core.validation import OneOf
from securecluster.data import Federation
from securecluster.errors import UsageError
from securecluster.privacy.homomorphic.ciphers import tenseal
from securecluster.privacy.homomorphic.parameters import CKKS
from securecluster.protocols.common.option_group import OptionGroup
from securecluster.protocols.common.sum_options import PLAIN
from securecluster.runtime.encrypted_pairs import LabelledValue
from securecluster.runtime.endpoint import has_pairs
from securecluster.runtime.pad_client import PairRange
from securecluster.runtime.pair_aggregators import PairFunction
from securecluster.runtime.pair_release import LABELS, MATRIX, RELEASES

if TYPE_CHECKING:
    from securecluster.protocols.common.hooks import ProtocolHooks

PADS = "pads"
RELEVANCES = (PLAIN, PADS, CKKS)


@dataclass(kw_only=True)
class PairOptions(OptionGroup):
    """Options of R_ij = (r_ij + r_ji)/2 of pairs of clients."""

    relevance: Annotated[str, OneOf(*RELEVANCES)] = PLAIN
    """how R_ij = (r_ij + r_ji)/2 of pairs of clients is formed: plain (the server reads every
    r_ij), pads (it reads R_ij only) or ckks (a key authority decrypts R; see relevance_release)
    """
    relevance_release: Annotated[str | None, OneOf(*RELEASES)] = None
    """relevance ckks only: what the key authority tells the server of R: labels (the clusters
    alone) or matrix (R of numbers that clients round to 2^-14); None is labels where the method
    clusters R itself (oneshot), and else matrix
    """

    functions: ClassVar[Mapping[str, PairFunction]] = {}
    """Functions of R that the server may ask for, by name. Their parameters are those of the
    configuration, so that another party than the server can compute them."""
    fields: ClassVar[Mapping[str, PairRange]] = {}
    """Ranges of the fields of rows of pairs."""
    labels: ClassVar[Mapping[str, LabelledValue]] = {}
    """Makes the value of a function of R where labels are all that the server is told, by its
    name."""

    @property
    def hide_rows(self) -> bool:
        """Return whether the server reads no row of pairs."""
        return self.relevance != PLAIN

    @property
    def by_authority(self) -> bool:
        """Return whether rows of pairs are encrypted, and a key authority decrypts R."""
        return self.relevance == CKKS

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

    def refusal(self, method: ProtocolHooks) -> str | None:
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

    def check(self, method: ProtocolHooks, clients: int) -> None:
        """Check whether the method forms pairs, and what the key authority tells of R.

        Args:
            method: whose options they are.
            clients: m.

        Raises:
            UsageError: an unknown option, or one that does not work with the method.
        """
        reason = self.refusal(method) if self.hide_rows else None
        if reason is not None:
            raise UsageError(reason)
        if self.relevance_release is not None:
            self._check_release(method)
        if self.by_authority:
            tenseal()  # a missing package is named before anything is sent

    def _check_release(self, method: ProtocolHooks) -> None:
        """Raise UsageError unless the key authority can release what is asked for."""
        if not self.by_authority:
            raise UsageError(
                "relevance_release is of the key authority: take relevance ckks, or leave "
                "relevance_release out"
            )
        if self.relevance_release == LABELS and not self.labels:
            raise UsageError(
                f"the server of {type(method).__name__} computes with R itself, so labels are not "
                "enough: take relevance_release matrix"
            )

    def agreed(
        self, method: ProtocolHooks, federation: Federation, config: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the configuration, without options that have no effect.

        Args:
            method: whose options they are.
            federation: the clients and their data.
            config: hyper-parameters with their defaults resolved.
        """
        left_out = []
        if self.relevance == PLAIN:
            left_out.append("relevance")
        if not self.by_authority:
            left_out.append("relevance_release")
        return {name: value for name, value in config.items() if name not in left_out}
