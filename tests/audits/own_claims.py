"""What documents and reports of this project claim to be hidden or visible, each with its attack.

A claim about noise holds as far as no lower bound of ε is above the ledger's ε, and that of half
the noise is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from securecluster.audits.claims import Claim
from securecluster.audits.findings import REFUTED, WITHIN, Finding

# options of claims on signatures and on hidden
# with a centre that no client is asked for, and that is far from the mean of the digits
CENTRE: dict[str, Any] = {"signature_centre": 0.13}
BLOCKS: dict[str, Any] = {"signature_blocks": "blocks", **CENTRE}
SKETCHES: dict[str, Any] = {"signature_blocks": "plain", **CENTRE}
SIGNATURE_NOISE = 3.73  # of one release with ε = 1 at δ = 1e-5; half of it is ε = 2.2
# of a whole run with ε = 1; sums of clients' shares of noise have as much
TRUSTED_NOISE: dict[str, Any] = {
    "clip": 1.0,
    "target_epsilon": 1.0,
    "placement": "central",
    "aggregation": "plain",
}
# Other clients are in every sum, and nothing but secure sums protects these.
CHANGING: dict[str, Any] = {"rounds": 24, "participation": 0.5, "cohort_size": 0}
HIDDEN_ATTACKS = (
    "hidden-differencing",
    "hidden-cluster",
    "hidden-label-counts",
    "hidden-membership",
)
CLAIMS = (
    Claim(
        "A permutation hides *which* label is which",
        "docs/privacy.md",
        "label-counts",
        {"mask": "permutation"},
    ),
    Claim(
        "Grouping columns that move alike recovered the label distributions",
        "docs/privacy.md",
        "label-distributions",
        {"mask": "permutation"},
        hidden=False,
    ),
    Claim(
        "A mask hides the coordinates of updates from the server",
        "docs/privacy.md",
        "gradient-inversion-analytic",
        {"mask": "permutation"},
    ),
    Claim(
        "which is sealed for other clients",
        "securecluster/statements/disclosures.py",
        "mean-image",
        {"sealed": True},
        protocol="oneshot",
    ),
    Claim(
        "which is sealed for other clients",
        "securecluster/statements/disclosures.py",
        "subspace-membership",
        {"sealed": True},
        protocol="oneshot",
    ),
    Claim(
        "A mask hides the coordinates of updates from the server",
        "docs/privacy.md",
        "label-counts",
        {"mask": "rotation"},
    ),
    Claim(
        "by these clients can be linked from round to round",
        "docs/privacy.md",
        "linkage",
        {"mask": "rotation"},
        hidden=False,
    ),
    Claim(
        "Noise bounds what all released messages together reveal",
        "docs/privacy.md",
        "label-counts",
        {"clip": 1.0, "noise": 16.0},
    ),
    Claim(
        "Noise bounds what all released messages together reveal",
        "docs/privacy.md",
        "linkage",
        {"clip": 1.0, "noise": 16.0},
    ),
    Claim(
        "over two clients or more, in secure sums",
        "securecluster/protections/secure_sums/protection.py",
        "label-counts",
        {"aggregation": "secagg"},
        protocol="fedavg",
    ),
    Claim(
        "over two clients or more, in secure sums",
        "securecluster/protections/secure_sums/protection.py",
        "linkage",
        {"aggregation": "secagg"},
        protocol="fedavg",
    ),
    Claim(
        "One such row gives away a permutation",
        "docs/privacy.md",
        "mask-known-plaintext",
        {"mask": "permutation"},
        hidden=False,
        helpers=(0,),
        weights=True,
    ),
    Claim(
        "For a rotation it reveals the components along that row",
        "docs/privacy.md",
        "mask-known-plaintext",
        {"mask": "rotation"},
        hidden=False,
        helpers=(0, 1, 2),
        weights=True,
    ),
    Claim(
        "Clients send model deltas and not weights",
        "docs/privacy.md",
        "mask-public-model",
        {"mask": "permutation"},
        weights=True,
    ),
    Claim(
        "a server told better than chance which classes a client holds",
        "docs/privacy.md",
        "mask-invariants",
        {"mask": "permutation"},
        protocol="fedavg",
        hidden=False,
        clients=48,
        weights=True,
    ),
    Claim(
        "A secure sum hides every single reply",
        "docs/privacy.md",
        "label-counts",
        {"aggregation": "secagg"},
        protocol="fedavg",
    ),
    Claim(
        "sums of clients' replies",
        "README.md",
        "label-counts",
        {"aggregation": "secagg"},
        protocol="fedavg",
    ),
    Claim(
        "A permutation hides which label is which, but not how many samples",
        "README.md",
        "label-counts",
        {"mask": "permutation"},
    ),
    Claim(
        "**Masks** hide the coordinates of updates from the server",
        "README.md",
        "gradient-inversion-analytic",
        {"mask": "permutation"},
    ),
    Claim(
        "hides the coordinates of updates from the server",
        "securecluster/statements/disclosures.py",
        "gradient-inversion-analytic",
        {"mask": "rotation"},
    ),
    Claim(
        "Secure sums hide each client's reply",
        "securecluster/statements/disclosures.py",
        "label-counts",
        {"aggregation": "secagg"},
        protocol="fedavg",
    ),
    Claim(
        "one of them alone moves stands in the sum as it is",
        "securecluster/statements/disclosures.py",
        "sums-single-coordinate",
        {"aggregation": "secagg"},
        protocol="fedavg",
        hidden=False,
    ),
    Claim(
        "its noise is in every coordinate, also in one that it alone moves",
        "securecluster/statements/disclosures.py",
        "sums-single-coordinate",
        {"aggregation": "secagg", "clip": 1.0, "noise": 1.0, "placement": "distributed"},
        protocol="fedavg",
    ),
    Claim(
        "Pads hide what a client contributes to the matrix over pairs",
        "securecluster/statements/disclosures.py",
        "relevance-oracle",
        {"relevance": "pads"},
        protocol="oneshot",
    ),
    Claim(
        "pads hide which part is whose",
        "securecluster/protections/pads/protection.py",
        "relevance-oracle",
        {"relevance": "pads"},
        protocol="oneshot",
    ),
    Claim(
        "of which it read sums of pairs",
        "securecluster/protections/pads/protection.py",
        "relevance-oracle",
        {"relevance": "pads"},
        protocol="oneshot",
    ),
    Claim(
        "of which it was told the clusters' labels alone",
        "securecluster/protections/encryption/protection.py",
        "relevance-oracle",
        {"relevance": "ckks"},
        protocol="oneshot",
    ),
    Claim(
        "pads hide rows of pairs from a server that has no client on its side",
        "securecluster/statements/privacy_section.py",
        "relevance-oracle",
        {"relevance": "pads"},
        protocol="oneshot",
    ),
    Claim(
        "the server relays them, and cannot open",
        "securecluster/statements/disclosures.py",
        "mean-image",
        {"sealed": True},
        protocol="oneshot",
    ),
    Claim(
        "of a single client",
        "securecluster/protections/secure_sums/protection.py",
        "label-counts",
        {"aggregation": "secagg"},
        protocol="fedavg",
    ),
    Claim(
        "of which it read sums of pairs",
        "securecluster/protections/encryption/protection.py",
        "relevance-oracle",
        {"relevance": "ckks", "relevance_release": "matrix"},
        protocol="oneshot",
    ),
    Claim(
        "and no single reply is private",
        "securecluster/statements/privacy_section.py",
        "label-counts",
        {"aggregation": "secagg", "clip": 1.0, "noise": 1.0, "placement": "distributed"},
        protocol="fedavg",
    ),
    Claim(
        "it hides which label is which, and not how many samples",
        "securecluster/privacy/masking/masks.py",
        "label-counts",
        {"mask": "signed-permutation"},
    ),
    Claim(
        "it hides which label is which, and not how many samples",
        "securecluster/privacy/masking/masks.py",
        "label-distributions",
        {"mask": "signed-permutation"},
        hidden=False,
    ),
    Claim(
        "which coordinate is which",
        "securecluster/privacy/masking/masks.py",
        "gradient-inversion-analytic",
        {"mask": "signed-permutation"},
    ),
    Claim(
        "single coordinates, which are mixed,",
        "securecluster/privacy/masking/masks.py",
        "gradient-inversion-analytic",
        {"mask": "haar"},
    ),
    Claim(
        "lists of members that differ by one client within a call",
        "docs/privacy.md",
        "secure-sum-conformance",
        {"aggregation": "secagg"},
        protocol="fedavg",
    ),
    Claim(
        "Released numbers are on a grid, so their last bits reveal nothing",
        "docs/privacy.md",
        "low-bits",
        {"clip": 1.0, "noise": 4.0},
    ),
    Claim(
        "so two runs with one seed share none",
        "docs/privacy.md",
        "repeated-seed",
        {"clip": 1.0, "noise": 4.0},
    ),
    Claim(
        "No mask covers the shares",
        "docs/privacy.md",
        "signature-label-counts",
        {"mask": "permutation"},
        protocol="signature",
        hidden=False,
        options=BLOCKS,
    ),
    Claim(
        "A mask hides a sketch",
        "docs/privacy.md",
        "signature-label-counts",
        {"mask": "permutation"},
        protocol="signature",
        options=SKETCHES,
    ),
    Claim(
        "A mask hides a sketch",
        "docs/privacy.md",
        "signature-membership",
        {"mask": "permutation"},
        protocol="signature",
        options=SKETCHES,
    ),
    *(
        Claim(
            "Noise for the unit `client` hides all of this",
            "docs/privacy.md",
            attack,
            {"dp_unit": "client", "signature_noise": SIGNATURE_NOISE},
            protocol="signature",
            options=kind,
        )
        for attack in ("signature-label-counts", "signature-membership")
        for kind in (BLOCKS, SKETCHES)
    ),
    *(
        Claim(
            "noise for the unit `example` hides which samples a client has",
            "docs/privacy.md",
            "signature-membership",
            {"signature_noise": SIGNATURE_NOISE},
            protocol="signature",
            clients=24,
            options=kind,
        )
        for kind in (BLOCKS, SKETCHES)
    ),
    *(
        Claim(
            "and not how many of each class",
            "docs/privacy.md",
            "signature-label-counts",
            {"signature_noise": SIGNATURE_NOISE / 2},
            protocol="signature",
            hidden=False,
            clients=16,
            options=kind,
        )
        for kind in (BLOCKS, SKETCHES)
    ),
    *(
        Claim(
            "Two such sums reveal what the client added, secure or not",
            "docs/privacy.md",
            attack,
            {"aggregation": "secagg"},
            protocol="hidden",
            hidden=False,
            clients=10,
            # nine clients, where one has left, fill three clusters
            options={"k": 3},
        )
        for attack in HIDDEN_ATTACKS
    ),
    *(
        Claim(
            "Noise in the sums hides all four",
            "docs/privacy.md",
            attack,
            TRUSTED_NOISE,
            protocol="hidden",
            clients=16,
        )
        for attack in HIDDEN_ATTACKS
    ),
    Claim(
        "From sums over changing members the server reads who is in which cluster of `hidden`",
        "docs/privacy.md",
        "sums-over-rounds-clusters",
        {"aggregation": "secagg"},
        protocol="hidden",
        hidden=False,
        clients=12,
        options=CHANGING,
    ),
    Claim(
        "From sums of updates over changing members it reads label counts",
        "docs/privacy.md",
        "sums-over-rounds-labels",
        {"aggregation": "secagg"},
        protocol="fedavg",
        hidden=False,
        clients=12,
        options=CHANGING,
    ),
    Claim(
        "A fresh permutation in each round keeps the label counts of single clients from it",
        "docs/privacy.md",
        "sums-over-rounds-labels",
        {"aggregation": "secagg", "mask": "permutation"},
        protocol="fedavg",
        clients=12,
        options=CHANGING,
    ),
    *(
        Claim(
            "Sums over whole cohorts tell no client from its cohort",
            "docs/privacy.md",
            attack,
            {"aggregation": "secagg", "cohort_size": size},
            protocol=protocol,
            clients=12,
            options={**CHANGING, **own},
        )
        for attack, protocol, size, own in (
            ("sums-over-rounds-clusters", "hidden", 6, {"k": 2}),
            ("sums-over-rounds-labels", "fedavg", 4, {}),
        )
    ),
    *(
        Claim(
            "Where the same clients are in every sum, no sum tells one client from another",
            "docs/privacy.md",
            attack,
            {"aggregation": "secagg", "participation": 1.0},
            protocol=protocol,
            clients=12,
            options=CHANGING,
        )
        for attack, protocol in (
            ("sums-over-rounds-clusters", "hidden"),
            ("sums-over-rounds-labels", "fedavg"),
        )
    ),
)


@dataclass(frozen=True)
class NoiseClaim:
    """A sentence on lower bounds of ε, and the release that it is about.

    Args:
        sentence: as it stands in the source.
        source: path of the document, from the top of the repository.
        attack: name of an audit of noise.
        protocol: name of the protocol that releases it.
        options: of the protocol, with its noise.
    """

    sentence: str
    source: str
    attack: str
    protocol: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class NoiseRow:
    """A claim on noise with the audits' findings.

    Args:
        claim: the claim.
        whole: the finding with the noise that the ledger claims.
        halved: the finding with half of it.
    """

    claim: NoiseClaim
    whole: Finding
    halved: Finding

    @property
    def holds(self) -> bool:
        """Return True if the bound is not above the ledger's ε, and that of half the noise is."""
        return self.whole.outcome == WITHIN and self.halved.outcome == REFUTED


NEVER_ABOVE = (
    "Lower bounds are never above the ledger's ε, and half of the claimed noise is refuted"
)
NOISED: dict[str, Any] = {"clip": 0.5, "noise": 0.25}
MATRICES: dict[str, Any] = {**NOISED, "gram_noise": 0.25, "tasks": 2}
SIGNATURES: dict[str, Any] = {
    "signature": "gradient", "signature_noise": 0.25, "signature_blocks": "blocks", "rounds": 2,
    "pre_rounds": 1,
}  # fmt: skip
NOISE_CLAIMS = tuple(
    NoiseClaim(NEVER_ABOVE, "docs/audit.md", attack, protocol, options)
    for attack, protocol, options in (
        ("dp-audit-two-worlds", "cfl", NOISED),
        ("dp-audit-two-worlds", "fedavg", {**NOISED, "placement": "central"}),
        ("dp-audit-losses", "srfca", NOISED),
        ("dp-audit-losses", "cfl", {**NOISED, "fallback": 0.3}),
        ("dp-audit-training", "fedavg", {**NOISED, "dp_unit": "example"}),
        ("dp-audit-gram", "oneshot", MATRICES),
        ("dp-audit-eigenvectors", "oneshot", {**MATRICES, "gram_mechanism": "naive"}),
        ("dp-audit-signatures", "signature", {"signature_noise": 0.25, **SKETCHES}),
        ("dp-audit-signatures", "flhc", {**SIGNATURES, "dp_unit": "client"}),
    )
)
