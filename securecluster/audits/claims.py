"""Claims that something is hidden or visible, each with the attack that tests it.

A claim that something is hidden holds as far as the attack is at chance with the protection, and
better than chance without it; else the attack would test nothing. A claim that something stays
visible holds as far as the attack is better than chance with the protection, too.

Every sentence of this project that something is hidden has such a claim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from securecluster.attacks.scoring import BETTER, CHANCE
from securecluster.audits.findings import Finding
from securecluster.data import Dirichlet
from securecluster.data.scenario_base import Scenario

DIFFERENT_LABELS = Dirichlet(alpha=1.0)


@dataclass(frozen=True)
class Claim:
    """A sentence, and the attack that it is about.

    Args:
        sentence: as it stands in the source.
        source: path of the document or module that has it, from the top of its repository.
        attack: name of the attack, or "module:Class" of one that no package declares.
        protection: options that protect, by the names of hyper-parameters.
        party: whose view is attacked.
        protocol: name of the protocol that is run.
        hidden: False for what the protection leaves visible.
        helpers: numbers of clients that give the adversary their data.
        clients: number of clients of the run.
        weights: True for attacks that need a mask. They are compared with a run under the same
            mask, whose clients send weights in place of moves; or, where `hidden` is False, with
            nothing.
        options: of the protocol, with the protection and without it.
        scenario: how the clients' data differ.
    """

    sentence: str
    source: str
    attack: str
    protection: Mapping[str, Any] = field(default_factory=dict)
    party: str = "server"
    protocol: str = "cfl"
    hidden: bool = True
    helpers: tuple[int, ...] = ()
    clients: int = 8
    weights: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    scenario: Scenario | str = DIFFERENT_LABELS


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
        return not self.failure

    @property
    def failure(self) -> str:
        """Return in one sentence why the claim does not hold; an empty text if it does."""
        claim = self.claim
        options = ", ".join(f"{name}={value!r}" for name, value in claim.protection.items())
        protected = f"with {options or 'no protection'} {_outcome(self.on)}"
        unprotected = "where clients send weights" if claim.weights else "without any protection"
        if not claim.hidden and self.on.outcome != BETTER:
            return f"{claim.sentence!r} is not shown: {protected}; name a run on which it succeeds"
        if self.off.outcome != BETTER:
            return (
                f"{claim.sentence!r} proves nothing: {unprotected} {_outcome(self.off)}; name a "
                "run on which it succeeds"
            )
        if not claim.hidden:
            return ""
        if self.on.outcome == BETTER:
            return f"{claim.sentence!r} is broken: {protected}; correct the claim or the protection"
        # where nothing is left to attack, nothing is found either
        nothing = self.on.score is None and self.on.reason.startswith("not applicable: ")
        if nothing or self.on.outcome == CHANCE:
            return ""
        return f"{claim.sentence!r} is not shown: {protected}; only an attack at chance shows it"


def _outcome(finding: Finding) -> str:
    """Return what an attack achieved, in words.

    Args:
        finding: on a run.
    """
    if finding.failed:
        return f"{finding.attack} {finding.reason}"
    if finding.score is None:
        return f"{finding.attack} is {finding.reason}"
    chance = finding.score.chance_interval
    return (
        f"{finding.attack} is {finding.outcome}, at {finding.score.value:.3g} where chance is "
        f"{chance.low:.3g} to {chance.high:.3g}"
    )
