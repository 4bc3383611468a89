"""Claims of documents and reports, checked by attacks with the protection and without it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cases import exhaustive
from noise_audits import halved_noise

from securecluster import Dirichlet, Federation
from securecluster.app.audit import Adversary, Finding, finding_of, twin_of
from securecluster.app.claims import CLAIMS, NOISE_CLAIMS, Claim, NoiseClaim, NoiseRow, Row
from securecluster.app.registry import protocol_class
from securecluster.attacks import scoring
from securecluster.attacks.dp_audit import CanaryAudit
from securecluster.attacks.experiments import tapped, with_malicious_updates
from securecluster.attacks.registry import ATTACKS, attack_named
from securecluster.attacks.scoring import BETTER, CHANCE
from securecluster.messaging.messages import Rows
from securecluster.protocols import Settings

ROOT = Path(__file__).resolve().parent.parent.parent
FULL = Settings(transcript="full", threads=1)
# one full-batch step a round, at few clients of different labels
Options = tuple[tuple[str, Any], ...]
SMALL: dict[str, Any] = {"rounds": 2, "epochs": 1, "batch_size": 30, "model": "linear"}


@cache
def _federation(clients: int) -> Federation:
    # digits has samples for so many
    samples = 30 if clients < 40 else 20
    return Federation.simulate(
        "digits", scenario=Dirichlet(alpha=1.0), clients=clients, samples=samples, seed=0
    )


@cache
def _run(
    protocol: str,
    options: Options,
    protection: Options,
    clients: int,
    weights: bool = False,
) -> Any:
    """Return a fitted protocol and its taps; with `weights`, clients send θ_0 and their moves."""
    made = protocol_class(protocol)(**{**SMALL, "mask": "none", **dict(options)})
    made.set_params(**dict(protection))
    if not protection:
        made = twin_of(made)
    federation = _federation(clients)
    if not weights:
        return tapped(made, federation, FULL)
    start = made.flat_model(federation).initial()

    def add_start(client: int, row: Any, round: int) -> Any:
        return row + start

    _, moves = _run(protocol, options, protection, clients)
    taps = []
    for tap in moves:
        delta = getattr(tap.reply, "delta", None)
        if delta is not None:
            weights_sent = replace(tap.reply, delta=Rows(delta.values + start))
            taps.append(replace(tap, reply=weights_sent))
    return with_malicious_updates(made, federation, range(clients), add_start, FULL), taps


@cache
def _finding(
    attack: str,
    parties: tuple[Any, ...],
    protocol: str,
    options: Options,
    protection: Options,
    clients: int,
    weights: bool,
) -> Finding:
    """Return what an attack achieves on a small run."""
    fitted, taps = _run(protocol, options, protection, clients, weights)
    adversary = Adversary(parties, parties[1:], "")
    return finding_of(attack_named(attack), fitted, _federation(clients), adversary, taps)


def _row(claim: Claim) -> Row:
    def finding(protection: Mapping[str, Any], weights: bool = False) -> Finding:
        of_both = tuple(claim.options.items())
        of_one = tuple(protection.items())
        parties = (claim.party, *claim.helpers)
        return _finding(
            claim.attack, parties, claim.protocol, of_both, of_one, claim.clients, weights
        )

    on = finding(claim.protection)
    if not claim.weights:
        return Row(claim, on, finding({}))
    if not claim.hidden:
        return Row(claim, on, on)
    return Row(claim, on, finding(claim.protection, weights=True))


def _name(claim: Claim) -> str:
    return f"{claim.attack}-{claim.protection}"


def _checked(claim: Claim) -> Any:
    """Return a claim, of which the dearest are checked with --exhaustive alone."""
    # thousands of calls to clients, encryption, and a dense rotation
    dear = claim.attack == "relevance-oracle" or {"bfv", "haar"} & set(claim.protection.values())
    return exhaustive(claim) if dear else claim


@pytest.mark.parametrize("claim", [_checked(claim) for claim in CLAIMS], ids=_name)
def test_a_claim_agrees_with_its_attack(claim: Claim) -> None:
    row = _row(claim)
    assert row.holds, (row.on.verdict, row.on.score, row.off.verdict, row.off.score)


@pytest.mark.parametrize("claim", CLAIMS, ids=_name)
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


# sentences with words of hiding that promise nothing to test, or whose test is elsewhere
ELSEWHERE = {
    "`hidden`": "the name of a protocol",
    "`hidden-": "the name of an attack",
    "#hidden-assignment": "the name of a section",
    "evidence/hidden.md": "the name of a page",
    "it hides nothing from a client": "says what is not hidden",
    "nothing is hidden from it": "says what is not hidden",
    "leaves almost nothing hidden": "docs/evidence/nsim_masks.md measures it",
    "#secure-sums-and-encrypted-relevance) hide them": "points to the section",
    "hide what clients send": "names all mechanisms, which have claims of their own",
    "which `--aggregation secagg` hides": "the claims of secure sums",
    "anything that depends on a client's data": "no message has it",
    "which only the client's local parameter server reads": "who reads what, by transcript",
    "without noise": "the claims of noise",
    "its noise": "the claims of noise",
    "did not see": "a heading",
    " in {}": "what a mask hides stands in masks.py",
    "which is sealed for other clients": "a claim of disclosures.py",
}
HIDING = re.compile(
    r"\bhid(es?|den|ing)\b|no single reply|nothing of|cannot open|did not see|which coordinate is|"
    r"which are mixed"
)
PRINTED = (
    "securecluster/app/disclosures.py",
    "securecluster/app/privacy_report.py",
    "securecluster/app/report_page.py",
    "securecluster/privacy/masking/masks.py",
)
SAYING = frozenset({"unseen", "_hidden_from_server"})  # functions that say what was not seen


def _prose(path: str) -> Iterator[str]:
    """Yield the sentences of a document that say that something is hidden."""
    text = re.sub(r"```.*?```", "", (ROOT / path).read_text(), flags=re.S)
    for sentence in re.split(r"(?<=[.:|])\s+", " ".join(text.split())):
        if HIDING.search(sentence):
            yield sentence


def _literals(path: str) -> Iterator[str]:
    """Yield the texts of a module that say that something is hidden, without its docstrings."""
    tree = ast.parse((ROOT / path).read_text())
    of_saying = set()
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            skipped.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
        if isinstance(node, ast.FunctionDef) and node.name in SAYING:
            of_saying |= {id(part) for part in ast.walk(node)}
    for node in ast.walk(tree):
        text = _text(node)
        if text is None or id(node) in skipped:
            continue
        said = id(node) in of_saying and " " in text
        if said or HIDING.search(text):
            yield text


def _text(node: ast.AST) -> str | None:
    """Return the text of a string, with {} in place of its values."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "{}" for part in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return None


@pytest.mark.parametrize("path", ["README.md", "docs/privacy.md", *PRINTED])
def test_every_sentence_that_something_is_hidden_has_a_claim(path: str) -> None:
    found = list(_prose(path) if path.endswith(".md") else _literals(path))
    assert found
    known = [claim.sentence for claim in CLAIMS if claim.source == path]
    missing = []
    for sentence in found:
        if not any(part in sentence for part in (*known, *ELSEWHERE)):
            missing.append(sentence)
    assert not missing


def test_what_needs_no_claim_is_said_somewhere() -> None:
    said = []
    for path in ("README.md", "docs/privacy.md"):
        said += list(_prose(path))
    for path in PRINTED:
        said += list(_literals(path))
    for part in ELSEWHERE:
        assert any(part in sentence for sentence in said), part


def test_attacks_of_claims_are_registered() -> None:
    assert {claim.attack for claim in CLAIMS} <= set(ATTACKS)


@cache
def _canary_federation() -> Federation:
    return Federation.simulate("digits", clients=50, samples=4, seed=0)


def _bound(claim: NoiseClaim) -> Finding:
    """Return the lower bound of ε of a small run's releases."""
    params = {"rounds": 1, "epochs": 1, "model": "linear", "mask": "none", **claim.options}
    attack = attack_named(claim.attack)
    assert isinstance(attack, CanaryAudit)
    made = protocol_class(claim.protocol)(**params)
    planted = attack.planted_in(made, _canary_federation(), FULL)
    score = planted.score(attack.scorer, _canary_federation())
    return Finding(claim.attack, score, "", 0.0, claimed=planted.claimed)


@pytest.mark.parametrize(
    "claim", NOISE_CLAIMS, ids=lambda claim: f"{claim.attack}-{claim.protocol}"
)
def test_no_bound_is_above_the_ledgers_and_half_of_the_noise_is_refuted(
    claim: NoiseClaim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "RESAMPLES", 5)
    monkeypatch.setattr(scoring, "SHUFFLES", 5)
    whole = _bound(claim)
    with halved_noise():
        halved = _bound(claim)
    assert whole.claimed == halved.claimed
    assert NoiseRow(claim, whole, halved).holds, (whole, halved)
    # neither half is enough
    assert not NoiseRow(claim, whole, whole).holds
    assert not NoiseRow(claim, halved, halved).holds
    assert claim.sentence in " ".join((ROOT / claim.source).read_text().split())
