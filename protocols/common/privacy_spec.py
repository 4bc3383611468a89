"""What a protocol declares about privacy: releases, noise, and what each party sees.

`ClusteringProtocol.privacy_spec` returns a `PrivacySpec`, which determines noise and ε.
`ClusteringProtocol.disclosures` returns `Disclosures`, sentences for the report.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Self

from securecluster.runtime.release_accounting import FieldNoise


@dataclass(frozen=True)
class ReleaseCounts:
    """Largest numbers of releases of one client in a whole run."""

    updates: int = 0
    """rows that are clipped and noised before they leave"""
    losses: int = 0
    """rows of losses"""
    gram: int = 0
    """Gram matrices"""
    signatures: int = 0
    """gradient signatures, each of which has the noise multiplier of all its releases together"""
    trainings: int = 0
    """local trainings in mini-batches, for DP-SGD"""
    full: int = 0
    """gradients over all samples, for DP-SGD"""


@dataclass(frozen=True)
class RowNoise:
    """Clip norm and noise of a field whose rows are not updates.

    Args:
        norm: S, to which each client's row is clipped.
        multiplier: z, the standard deviation of the noise over S.
    """

    norm: float
    multiplier: float


FOLLOWS = FieldNoise(math.inf)
"""A field that costs nothing: it follows from other releases, or is public."""


@dataclass(frozen=True)
class PrivacySpec:
    """Releases of one client, and noise outside the pipeline.

    Args:
        releases: the largest numbers of releases, by which `target_epsilon` finds the noise.
        fields: noise by field of a reply, where the pipeline does not add it. A private field that
            neither this nor the pipeline covers is exact: ε is then infinite.
        gradient_trainings: kinds of training (`answers(trains=...)`) that are one step of the
            learning rate along the full gradient, in place of epochs of mini-batches.
        keeps_local_models: whether models that clients trained alone stay out of the results, since
            no noise covers them.
    """

    releases: ReleaseCounts
    fields: Mapping[str, FieldNoise] = field(default_factory=lambda: MappingProxyType({}))
    gradient_trainings: tuple[str, ...] = ()
    keeps_local_models: bool = False

    def with_fields(self, **fields: FieldNoise) -> Self:
        """Return the same specification with the noise of further fields of replies.

        Args:
            fields: noise by the field's name.
        """
        return replace(self, fields={**self.fields, **fields})

    def with_releases(self, releases: ReleaseCounts) -> Self:
        """Return the same specification with other numbers of releases.

        Args:
            releases: the largest numbers of releases of one client.
        """
        return replace(self, releases=releases)


class OfPlainSums(str):
    """Sentence that holds only where the server reads every reply of a sum."""

    __slots__ = ()


class OfSecureSums(str):
    """Sentence that holds only where sums are secure."""

    __slots__ = ()


class OfPlainPairs(str):
    """Sentence that holds only where the server reads every row of pairs."""

    __slots__ = ()


class OfPaddedPairs(str):
    """Sentence that holds only where the server reads sums of pairs, and no row of them."""

    __slots__ = ()


@dataclass(frozen=True)
class Disclosures:
    """What each party sees beyond the values of single replies, in sentences for the report.

    The fields of replies, and who reads them under which mask and noise, need no sentence: the
    report takes these from the ledger.

    Args:
        server: what the server sees of all replies together, under every mask.
        lps: what a local parameter server sees, in methods that have these.
        clients: what clients see of other clients, beside averages.
        not_covered: what ε leaves out, beyond what holds for every method.
    """

    server: Sequence[str] = ()
    lps: Sequence[str] = ()
    clients: Sequence[str] = ()
    not_covered: Sequence[str] = ()
