"""Claims of documents and reports, checked by attacks with the protection and without it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cases import exhaustive
from noise_audits import halved_noise
from own_claims import CLAIMS, NOISE_CLAIMS, NoiseClaim, NoiseRow

from securecluster import Federation
from securecluster.attacks import scoring
from securecluster.attacks.dp_audit import CanaryAudit
from securecluster.attacks.registry import ATTACKS, attack_named
from securecluster.attacks.scoring import BETTER, CHANCE, Interval, Score
from securecluster.audits import claim_checks
from securecluster.audits.claim_checks import check_claim
from securecluster.audits.claims import Claim, Row
from securecluster.audits.run_audit import Finding
from securecluster.protocols import Settings
from securecluster.protocols.registry import protocol_class

pytestmark = pytest.mark.filterwarnings("ignore:on their own test samples")

ROOT = Path(__file__).resolve().parent.parent.parent
FULL = Settings(transcript="full", threads=1)
# what runs of a claim do not depend on
OF_ATTACKS = {"attack": "", "party": "server", "helpers": ()}
OF_CLAIMS = {"sentence": "", "source": "", "hidden": True, "weights": False}
# attacks that tests/attacks tries, too
SUMS = ("sums-over-rounds-clusters", "sums-over-rounds-labels")
DEAR = ("relevance-oracle", "hidden-differencing", *SUMS)


@pytest.fixture(scope="module", autouse=True)
def shared() -> Iterator[None]:
    """Make runs and findings that several claims are about once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claim_checks, "_run", _once(claim_checks._run, OF_CLAIMS | OF_ATTACKS))
        patch.setattr(claim_checks, "_finding", _once(claim_checks._finding, OF_CLAIMS))
        yield


def _once(function: Callable[..., Any], no_matter: dict[str, Any]) -> Callable[..., Any]:
    """Return a function of claims that remembers its results, whatever some of their fields are."""
    results: dict[str, Any] = {}

    def remembered(claim: Claim, send_weights: bool = False) -> Any:
        key = repr((replace(claim, **no_matter), send_weights))
        if key not in results:
            results[key] = function(claim, send_weights)
        return results[key]

    return remembered


def _name(claim: Claim) -> str:
    return f"{claim.attack}-{claim.protection}"


def _checked(claim: Claim) -> Any:
    """Return a claim, of which the dearest are checked with --exhaustive alone."""
    # thousands of calls to clients, encryption, many sums, and a dense rotation
    dear = claim.attack in DEAR or {"haar"} & set(claim.protection.values())
    return exhaustive(claim) if dear else claim


@pytest.mark.always
@pytest.mark.parametrize("claim", [_checked(claim) for claim in CLAIMS], ids=_name)
def test_a_claim_agrees_with_its_attack(claim: Claim) -> None:
    row = check_claim(claim)
    assert row.holds, row.failure


@pytest.mark.parametrize("claim", CLAIMS, ids=_name)
def test_a_claims_sentence_stands_in_its_source(claim: Claim) -> None:
    text = " ".join((ROOT / claim.source).read_text().split())
    assert claim.sentence in text


def test_a_claim_without_its_protection_does_not_hold() -> None:
    bare = Claim("labels are hidden", "docs/privacy.md", "label-counts")
    row = check_claim(bare)
    assert row.on.outcome == row.off.outcome == BETTER and not row.holds
    # an attack that never works supports no claim
    failed = Finding("label-counts", None, "not applicable: nothing", 0.0)
    assert not Row(bare, failed, failed).holds
    assert CHANCE != BETTER


def _found(value: float | None, reason: str = "", low: float | None = None) -> Finding:
    """A finding at a value, whose interval begins at `low`; chance is from 0.4 to 0.6."""
    if value is None:
        return Finding("attack", None, reason, 0.0)
    interval = Interval(value if low is None else low, value)
    return Finding("attack", Score("x", value, interval, 0.5, Interval(0.4, 0.6), True, 9), "", 0.0)


SUCCESS, AT_CHANCE, UNSURE = _found(0.9), _found(0.5), _found(0.9, low=0.5)
NOTHING = _found(None, "not applicable: no updates")
CRASHED = _found(None, "failed: ValueError: no")
SUMMED = Claim("Sums hide it", "README.md", "attack", {"aggregation": "secagg"})
SHOWN = replace(SUMMED, sentence="It stays visible", hidden=False)
WITH = "with aggregation='secagg' attack"


@pytest.mark.parametrize(
    ("claim", "on", "off", "failure"),
    [
        (SUMMED, AT_CHANCE, SUCCESS, ""),
        (SUMMED, NOTHING, SUCCESS, ""),
        (SHOWN, SUCCESS, SUCCESS, ""),
        (replace(SHOWN, weights=True), SUCCESS, SUCCESS, ""),
        (
            SUMMED,
            SUCCESS,
            SUCCESS,
            f"'Sums hide it' is broken: {WITH} is better than chance, at 0.9 where chance is 0.4 "
            "to 0.6; correct the claim or the protection",
        ),
        (
            SUMMED,
            UNSURE,
            SUCCESS,
            f"'Sums hide it' is not shown: {WITH} is not decided, at 0.9 where chance is 0.4 to "
            "0.6; only an attack at chance shows it",
        ),
        (
            SUMMED,
            CRASHED,
            SUCCESS,
            f"'Sums hide it' is not shown: {WITH} failed: ValueError: no; only an attack at chance "
            "shows it",
        ),
        (
            SUMMED,
            AT_CHANCE,
            AT_CHANCE,
            "'Sums hide it' proves nothing: without any protection attack is at chance, at 0.5 "
            "where chance is 0.4 to 0.6; name a run on which it succeeds",
        ),
        (
            replace(SUMMED, weights=True),
            AT_CHANCE,
            NOTHING,
            "'Sums hide it' proves nothing: where clients send weights attack is not applicable: "
            "no updates; name a run on which it succeeds",
        ),
        (
            SHOWN,
            NOTHING,
            SUCCESS,
            f"'It stays visible' is not shown: {WITH} is not applicable: no updates; name a run "
            "on which it succeeds",
        ),
        (
            SHOWN,
            SUCCESS,
            UNSURE,
            "'It stays visible' proves nothing: without any protection attack is not decided, at "
            "0.9 where chance is 0.4 to 0.6; name a run on which it succeeds",
        ),
    ],
)
def test_a_claim_that_does_not_hold_says_in_one_sentence_why(
    claim: Claim, on: Finding, off: Finding, failure: str
) -> None:
    row = Row(claim, on, off)
    assert row.failure == failure
    assert row.holds == (not failure)


# sentences with words of hiding that promise nothing to test, or whose test is elsewhere
ELSEWHERE = {
    "`hidden`": "the name of a protocol",
    "`hidden-": "the name of an attack",
    "#hidden-assignment": "the name of a section",
    "evidence/hidden.md": "the name of a page",
    "it hides nothing from a client": "says what is not hidden",
    "nothing is hidden from it": "says what is not hidden",
    "leaves almost nothing hidden": "docs/evidence/nsim.md measures it",
    "#secure-sums-and-encrypted-relevance) hide them": "points to the section",
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
# of every folder of a protection
SENTENCES_OF_PROTECTIONS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "securecluster" / "protections").glob("*/protection.py")
)
PRINTED = (
    "securecluster/statements/disclosures.py",
    "securecluster/statements/privacy_section.py",
    "securecluster/reports/privacy_report.py",
    "securecluster/reports/report_page.py",
    "securecluster/privacy/masking/masks.py",
    *SENTENCES_OF_PROTECTIONS,
)
WORDLESS = "securecluster/reports/report_page.py"  # the page takes such sentences from others
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
    assert bool(found) == (path != WORDLESS)
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


@pytest.mark.always
@pytest.mark.few(4)
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
