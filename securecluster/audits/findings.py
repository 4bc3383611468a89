"""Findings of an audit: what an attack achieved on a run, and what that says of the run.

A verdict that could not have come out otherwise is none. At chance needs power: the same attack,
on the same clients and with the same budget, is beyond the range of chance on a twin of the run,
which is without a protection. A protection holds only by the twin that is without it alone.

An audit of noise is at chance where its bound is not above the ledger's ε, and has power where the
bound without any noise is above it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from securecluster.attacks.base import Guess, Harm, Truth
from securecluster.attacks.registry import attack_named
from securecluster.attacks.scoring import BETTER, CHANCE, UNDECIDED, Score

# verdicts
BROKEN = "broken"
VISIBLE = "visible"  # better than chance, at what no protection of the run is said to hide
UNTOLD = "could not tell"
NOT_TRIED = "not tried"
VERDICTS = (BROKEN, VISIBLE, UNTOLD, CHANCE, NOT_TRIED)  # what means most to people first
# outcomes of audits of noise
WITHIN = "not above the ledger's ε"
REFUTED = "above the ledger's ε: refuted"
FAILED = "failed: "
INAPPLICABLE = "not applicable"
SKIPPED = "skipped: "
EVERYTHING = "any protection"  # what a twin without all of them is without
HALF = "half of the noise"  # of an audit of noise, drawn anew
NO_TWIN = "there is no run without a protection, on which it would show that it can succeed"
ENOUGH = 1e5  # a larger bound of ε is as good as infinite


@dataclass(frozen=True)
class Finding:
    """Result of one attack on one run.

    Args:
        attack: its name.
        score: of its guess; None if there is none.
        reason: why there is no score: "not applicable: …", "skipped: …" or "failed: …".
        seconds: that it took.
        guess: of the attack, for pictures.
        truth: that it was compared with.
        claimed: the ledger's ε of what an audit of noise bounds from below; None for other attacks.
        claims: protections of the run that are said to hide what the attack guesses.
        trace: where it failed, as Python tells it; empty if it did not.
        twins: findings of the same attack on twins, by the protection that a twin is without, or
            `EVERYTHING`.
    """

    attack: str
    score: Score | None
    reason: str
    seconds: float
    guess: Guess | None = None
    truth: Truth | None = None
    claimed: float | None = None
    claims: tuple[str, ...] = ()
    trace: str = field(default="", repr=False)
    twins: Mapping[str, Finding] = field(default_factory=dict, repr=False)

    @property
    def learns(self) -> str:
        """Return what the attack would learn, in words; its name where it does not say."""
        return attack_named(self.attack).learns or f"what {self.attack} guesses"

    @property
    def harm(self) -> Harm:
        """Return of what kind this is."""
        return attack_named(self.attack).harm

    @property
    def said(self) -> tuple[str, ...]:
        """Return what the attack says of the run besides its guess, in sentences."""
        if self.guess is None:
            return ()
        return tuple(self.guess.details.get("said", ()))

    @property
    def inapplicable(self) -> bool:
        """Return True if the attack has nothing to work on in this run."""
        return self.score is None and self.reason.startswith(INAPPLICABLE)

    @property
    def failed(self) -> bool:
        """Return True if the attack could not be run because it failed."""
        return self.reason.startswith(FAILED)

    @property
    def outcome(self) -> str:
        """Return how the score lies to chance or to a finite ε, or why there is none."""
        if self.score is None:
            return self.reason
        if self.bounds:
            return REFUTED if self.score.value > self.claimed_epsilon else WITHIN
        return self.score.verdict

    @property
    def bounds(self) -> bool:
        """Return True if the score is a bound that a finite ε of the ledger is held against."""
        return self.claimed is not None and math.isfinite(self.claimed)

    @property
    def claimed_epsilon(self) -> float:
        """Return the ledger's ε; infinity where there is none."""
        return math.inf if self.claimed is None else self.claimed

    @property
    def verdict(self) -> str:
        """Return the verdict, of `VERDICTS`."""
        if self.score is None:
            return NOT_TRIED
        if self.outcome == REFUTED:
            return BROKEN
        if self.outcome == BETTER:
            return BROKEN if self.claims else VISIBLE
        told = [self._succeeds(twin) for twin in self.twins.values()]
        # an audit of noise is to find half of it, too
        powerful = all(told) if self.bounds else any(told)
        if self.outcome in (CHANCE, WITHIN) and told and powerful:
            return CHANCE
        return UNTOLD

    @property
    def held(self) -> tuple[str, ...]:
        """Return the protections that hold against the attack: without one alone it succeeds."""
        if self.verdict != CHANCE:
            return ()
        names = [name for name, twin in self.twins.items() if self._succeeds(twin)]
        return tuple(name for name in names if name not in (EVERYTHING, HALF))

    @property
    def protections(self) -> str:
        """Return the protections of the run that the finding is about, in words."""
        if self.claimed is not None:
            return "noise as the ledger has it"
        return " and ".join(self.held or self.claims)

    @property
    def why(self) -> str:
        """Return the reason of the verdict, in words."""
        verdict = self.verdict
        if verdict == NOT_TRIED:
            return self.reason
        if verdict == BROKEN:
            if self.bounds:
                return "its bound is above the ledger's ε"
            return f"the run claims to hide this by {self.protections}"
        if verdict == VISIBLE:
            return "no protection of this run is said to hide it"
        if verdict == CHANCE:
            return self._why_at_chance()
        return self._why_untold()

    @property
    def judgement(self) -> str:
        """Return the verdict and its reason."""
        return f"{self.verdict}: {self.why}"

    def _succeeds(self, twin: Finding) -> bool:
        """Return whether the attack is beyond the range on a twin of the run."""
        if twin.score is None:
            return False
        if self.bounds:
            return twin.score.value > self.claimed_epsilon
        return twin.score.verdict == BETTER and not self._of_fewer(twin)

    def _of_fewer(self, twin: Finding) -> bool:
        """Return whether the guess is about fewer than on a twin, whose power it does not have."""
        assert self.score is not None and twin.score is not None
        return self.score.units < twin.score.units

    def _why_at_chance(self) -> str:
        """Return on which twins the attack succeeds."""
        if self.bounds:
            bounds = [
                f"{number(twin.score.value)} without {name}"
                for name, twin in self.twins.items()
                if twin.score is not None
            ]
            return f"{WITHIN}, and its bound would be {' and '.join(bounds)}"
        if self.held:
            return f"{' and '.join(self.held)} held: without it alone the attack succeeds"
        untested = [name for name, twin in self.twins.items() if twin.score is None]
        if untested or len(self.twins) == 1:
            return (
                "without any protection the attack succeeds, and which one holds was not told: "
                "more seconds would tell (--budget)"
            )
        return (
            "without any protection the attack succeeds, and without any one of them it does "
            "not, so none of them is shown to hold by itself"
        )

    def _why_untold(self) -> str:
        """Return what the twins lack, and what would tell."""
        assert self.score is not None
        if self.outcome == UNDECIDED:
            return "its interval reaches into the range of chance: more clients would tell"
        if not self.twins:
            reached = self.score.chance_interval
            return (
                f"{NO_TWIN}, and with {self.score.units} to guess chance reaches from "
                f"{number(reached.low)} to {number(reached.high)}: more clients would tell"
            )
        missed = {name: twin for name, twin in self.twins.items() if not self._succeeds(twin)}
        without, twin = next(iter(missed.items()))
        if twin.score is None:
            more = ": more seconds would tell (--budget)" if SKIPPED in twin.reason else ""
            return f"the attack has no score without {without} either ({twin.reason}){more}"
        value = number(twin.score.value)
        if not self.bounds and self._of_fewer(twin):
            return (
                f"it guesses {self.score.units} here and {twin.score.units} without {without}: "
                "more clients would tell"
            )
        if self.bounds:
            return (
                f"without {without} its bound would be {value}, which is not above the ledger's "
                f"ε of {self.claimed:.3g} either: more clients would tell, or more rounds"
            )
        return (
            f"without {without} it is not beyond the range of chance either ({value}): more "
            "clients would tell, or more rounds"
        )


def number(value: float) -> str:
    """Return a score as text; of a large one, which is a bound of ε, that it is large.

    Args:
        value: of a score.
    """
    if value > ENOUGH:
        return f"over {ENOUGH:,.0f}"
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
