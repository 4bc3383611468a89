"""Ranges of the fields of replies that enter hidden sums, which are sums of integers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from securecluster.errors import UsageError
from securecluster.messaging.bounds import Real, declared
from securecluster.messaging.messages import Rows, kinds
from securecluster.privacy.fixed_point import FixedPoint

if TYPE_CHECKING:
    from securecluster.privacy.dp.skellam_mechanism import SkellamMechanism


@dataclass(frozen=True)
class SumRanges:
    """Ranges of the fields of replies that enter secure sums.

    Args:
        bounds: largest magnitude of one client's number, by field.
        saturate: True to clamp numbers beyond the bound, in runs with noise, where an error would
            be a release.
        clamped: fields whose numbers are clamped in every run, such as losses that overflow.
        noise: noise of fields with 32 bits, of which each client adds a share; None adds none.
        noises: noise by field, where it is not `noise`.
    """

    bounds: Mapping[str, float]
    saturate: bool = False
    clamped: frozenset[str] = frozenset()
    noise: SkellamMechanism | None = None
    noises: Mapping[str, SkellamMechanism] = dataclasses.field(default_factory=dict)

    def noise_of(self, name: str) -> SkellamMechanism | None:
        """Return the noise of which each client adds a share to a field; None without any.

        Args:
            name: name of the field.
        """
        return self.noises.get(name, self.noise)

    def least_members(self, minimum: int, members: int) -> int:
        """Return the smallest number of members and of survivors of a sum over some clients.

        Security rule: a sum over fewer clients than the noise has shares would have less noise than
        it is accounted for.

        Args:
            minimum: members of the smallest sum.
            members: clients that are asked for a row.
        """
        if self.noise is None or members < minimum:
            return minimum
        return max(minimum, self.noise.shares(members))

    def saturates(self, name: str) -> bool:
        """Return whether numbers of a field beyond its bound are clamped.

        Args:
            name: name of the field.
        """
        return self.saturate or name in self.clamped

    def fixed_point(
        self, name: str, bits: int, members: int, largest: int | None = None
    ) -> FixedPoint:
        """Return the encoding of a field in sums over some clients.

        Args:
            name: name of the field.
            bits: 32 or 64.
            members: number of clients in the sum.
            largest: largest integer of one client, where fewer than fit the ring can be summed.

        Raises:
            UsageError: the field has no range.
        """
        if name not in self.bounds:
            names = ", ".join(self.bounds) or "none"
            raise UsageError(
                f"{name} has no range, so no secure sum can hold it: declare one in the fields of "
                f"your SumOptions (declared: {names})"
            )
        return _fixed_point(self.bounds[name], members, bits, name, largest)


@lru_cache(maxsize=1024)
def _fixed_point(
    bound: float, members: int, bits: int, name: str, largest: int | None
) -> FixedPoint:
    return FixedPoint(bound, members, bits, name, "sum_bound", largest)


@lru_cache(maxsize=256)
def summed_bits(reply: Any, through: tuple[str, ...]) -> Mapping[str, int]:
    """Return the bits of the integers of each field of a reply in hidden sums.

    Rows that pass through the pipeline, such as updates, have 32 bits; the few numbers beside them
    have 64.

    Args:
        reply: class of the reply.
        through: fields that pass through the pipeline.

    Raises:
        UsageError: a field that no such sum can hold.
    """
    bounds = declared(reply)
    bits = {}
    for name, field_kind in kinds(reply).items():
        bound = bounds.get(name)
        if field_kind is not Rows or (bound is not None and not isinstance(bound, Real)):
            raise UsageError(
                f"{reply.__name__}.{name} cannot enter a secure sum: fields of its replies are "
                "Rows of floating-point numbers"
            )
        bits[name] = 32 if name in through else 64
    return bits
