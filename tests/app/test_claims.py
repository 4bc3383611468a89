"""Claims of documents and reports, checked by attacks with the protection and without it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from securecluster import Dirichlet, Federation
from securecluster.app.audit import Finding, known_samples, twin_of
from securecluster.app.claims import CLAIMS, Claim, Row
from securecluster.app.registry import protocol_class
from securecluster.attacks.base import Attack
from securecluster.attacks.experiments import tapped
from securecluster.attacks.registry import ATTACKS, attack_named
from securecluster.attacks.scoring import BETTER, CHANCE, evaluate
from securecluster.attacks.views import knowledge_of, truth_of, view_of
from securecluster.protocols import Settings

ROOT = Path(__file__).resolve().parent.parent.parent
FULL = Settings(transcript="full", threads=1)
# one full-batch step a round, at few clients of different labels
SMALL: dict[str, Any] = {"rounds": 2, "epochs": 1, "batch_size": 30, "model": "linear"}


@cache
def _federation() -> Federation:
    return Federation.simulate(
        "digits", scenario=Dirichlet(alpha=1.0), clients=8, samples=30, seed=0
    )


@cache
def _run(protocol: str, protection: tuple[tuple[str, Any], ...]) -> Any:
    """Return a fitted protocol and its taps."""
    made = protocol_class(protocol)(**SMALL, mask="none")
    made.set_params(**dict(protection))
    if not protection:
        made = twin_of(made)
    return tapped(made, _federation(), FULL)


@cache
def _finding(
    attack_name: str, party: str, protocol: str, protection: tuple[tuple[str, Any], ...]
) -> Finding:
    """Return what an attack achieves on a small run."""
    fitted, taps = _run(protocol, protection)
    attack: Attack = attack_named(attack_name)
    view = view_of(fitted, party, attack.anonymous)
    truth = truth_of(fitted, _federation(), view, taps)
    samples = known_samples(_federation(), "membership" in attack.name)
    result = evaluate(attack, view, knowledge_of(fitted, samples=samples), truth)
    if isinstance(result, str):
        return Finding(attack_name, None, result, 0.0)
    return Finding(attack_name, result, "", 0.0)


def _row(claim: Claim) -> Row:
    on = _finding(claim.attack, claim.party, claim.protocol, tuple(claim.protection.items()))
    return Row(claim, on, _finding(claim.attack, claim.party, claim.protocol, ()))


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.attack}-{claim.protection}")
def test_a_claim_agrees_with_its_attack(claim: Claim) -> None:
    row = _row(claim)
    assert row.holds, (row.on.verdict, row.on.score, row.off.verdict, row.off.score)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.attack}-{claim.protection}")
def test_a_claims_sentence_stands_in_its_source(claim: Claim) -> None:
    text = " ".join((ROOT / claim.source).read_text().split())
    assert claim.sentence in text


def test_a_claim_without_its_protection_does_not_hold() -> None:
    bare = Claim("labels are hidden", "docs/privacy.md", "label-counts")
    row = _row(bare)
    assert row.on.verdict == row.off.verdict == BETTER and not row.holds
    # an attack that never works supports no claim
    failed = Finding("label-counts", None, "not applicable: nothing", 0.0)
    assert not Row(bare, failed, failed).holds
    assert CHANCE != BETTER


def test_attacks_of_claims_are_registered() -> None:
    assert {claim.attack for claim in CLAIMS} <= set(ATTACKS)
