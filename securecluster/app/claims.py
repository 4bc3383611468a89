"""What documents and reports claim to be hidden or visible, each with the attack that tests it.

A claim that something is hidden holds as far as the attack is at chance with the protection, and
better than chance without it; else the attack would test nothing. A claim that something stays
visible holds as far as the attack is better than chance with the protection, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from securecluster.app.audit import Finding
from securecluster.attacks.scoring import BETTER, CHANCE


@dataclass(frozen=True)
class Claim:
    """A sentence, and the attack that it is about.

    Args:
        sentence: as it stands in the source.
        source: path of the document or module that has it, from the top of the repository.
        attack: name of the attack.
        protection: options that protect, by the names of hyper-parameters.
        party: whose view is attacked.
        protocol: name of the protocol that is run.
        hidden: False for what the protection leaves visible.
    """

    sentence: str
    source: str
    attack: str
    protection: Mapping[str, Any] = field(default_factory=dict)
    party: str = "server"
    protocol: str = "cfl"
    hidden: bool = True


@dataclass(frozen=True)
class Row:
    """A claim with the attack's scores.

    Args:
        claim: the claim.
        on: the finding with the protection.
        off: the finding without it.
    """

    claim: Claim
    on: Finding
    off: Finding

    @property
    def holds(self) -> bool:
        """Return True if the claim agrees with both findings."""
        if self.off.verdict != BETTER:
            return False
        if not self.claim.hidden:
            return self.on.verdict == BETTER
        # where nothing is left to attack, nothing is found either
        nothing = self.on.score is None and self.on.reason.startswith("not applicable: ")
        return nothing or self.on.verdict == CHANCE


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
        "securecluster/app/disclosures.py",
        "mean-image",
        {"sealed": True},
        protocol="oneshot",
    ),
    Claim(
        "which is sealed for other clients",
        "securecluster/app/disclosures.py",
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
        {"clip": 1.0, "noise": 4.0},
    ),
    Claim(
        "Noise bounds what all released messages together reveal",
        "docs/privacy.md",
        "linkage",
        {"clip": 1.0, "noise": 4.0},
    ),
    Claim(
        "over two clients or more, in secure sums that hide each one's",
        "securecluster/app/disclosures.py",
        "label-counts",
        {"aggregation": "secagg"},
        protocol="fedavg",
    ),
    Claim(
        "over two clients or more, in secure sums that hide each one's",
        "securecluster/app/disclosures.py",
        "linkage",
        {"aggregation": "secagg"},
        protocol="fedavg",
    ),
)
