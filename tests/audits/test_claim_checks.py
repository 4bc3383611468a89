"""Claims that packages outside this project declare, and their checks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from securecluster.attacks import registry
from securecluster.attacks.scoring import BETTER, CHANCE
from securecluster.audits import claim_checks
from securecluster.audits.claim_checks import check_claim, claim_named, claim_names
from securecluster.audits.claims import Claim
from securecluster.core import installed_packages
from securecluster.data import LabelSwap
from securecluster.errors import UsageError

MODULE = """
import numpy as np

from securecluster.audits.claims import Claim
from securecluster.attacks.base import SUMS, TRUE_CLUSTERS, Attack, Guess
from securecluster.attacks.base import Scorer
from securecluster.attacks.views import observed_updates


class Ones(Scorer):
    metric = "share of right guesses"

    def units(self, guess, truth):
        return np.asarray(list(guess.values.values()), float)

    def shuffled(self, guess, truth, draw):
        return draw.random(len(guess.values))


class Seeing(Attack):
    name = "seeing"
    source = "nobody"
    needs = "single updates"
    scorer = Ones()
    requires = {TRUE_CLUSTERS}
    reads = {"delta"}
    hidden_by = {SUMS}
    right = 1.0

    def applies(self, view, knowledge):
        if not any(True for _ in observed_updates(view, knowledge)):
            return "not applicable: no single update was observed"
        return None

    def run(self, view, knowledge):
        senders = {seen.sender.index for seen in observed_updates(view, knowledge)}
        return Guess("anything", dict.fromkeys(sorted(senders), self.right))


class Blind(Seeing):
    name = "blind"
    right = 0.5


IN_SUMS = Claim(
    "Sums hide updates",
    "README.md",
    "outside_claims:Seeing",
    {"aggregation": "secagg"},
    protocol="fedavg",
    clients=6,
    scenario="label-swap",
)
number = 3
"""
POINTS = {
    "in-sums": "outside_claims:IN_SUMS",
    "gone": "no_such_module:IN_SUMS",
    "absent": "outside_claims:Absent",
    "number": "outside_claims:number",
    "misspelt": "outside_misspelt:MASKED",
}


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package with good and bad declarations."""
    info = tmp_path / "outside_claims-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-claims\nVersion: 1.0\n")
    points = "".join(f"{name} = {value}\n" for name, value in POINTS.items())
    (info / "entry_points.txt").write_text(f"[securecluster.claims]\n{points}")
    (tmp_path / "outside_claims.py").write_text(MODULE)
    (tmp_path / "outside_misspelt.py").write_text(
        "from securecluster.audits.claims import Claim\n"
        "MASKED = Claim('x', 'y', 'z', protecion={})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "PARTS", replace(registry.PARTS, kept={}))
    installed_packages.points.cache_clear()
    yield
    installed_packages.points.cache_clear()
    sys.modules.pop("outside_claims", None)


def test_a_declared_claim_is_checked_by_its_name() -> None:
    assert claim_names() == sorted(POINTS)
    row = check_claim("in-sums")
    assert row.claim.sentence == "Sums hide updates"
    assert (row.off.outcome, row.off.attack) == (BETTER, "seeing")
    assert row.on.reason == "not applicable: no single update was observed"
    assert row.holds and row.failure == ""


def test_a_claim_whose_attack_also_works_with_the_protection_is_broken() -> None:
    masked = replace(claim_named("in-sums"), protection={"mask": "permutation"})
    row = check_claim(masked)
    assert row.on.outcome == BETTER and not row.holds
    assert row.failure.startswith(
        "'Sums hide updates' is broken: with mask='permutation' seeing is better than chance"
    )


@pytest.mark.parametrize(
    ("attack", "outcome"),
    [
        ("outside_claims:Blind", "blind is at chance, at 0.5 where"),
        ("mean-image", "mean-image is not applicable: clients of this protocol share no"),
    ],
)
def test_a_claim_whose_attack_never_works_proves_nothing(attack: str, outcome: str) -> None:
    claim = replace(claim_named("in-sums"), attack=attack)
    row = check_claim(claim)
    assert not row.holds
    assert f"proves nothing: without any protection {outcome}" in row.failure
    # nor does the same show that something stays visible
    assert "is not shown" in check_claim(replace(claim, hidden=False)).failure


def test_clients_differ_as_the_claim_says() -> None:
    claim = claim_named("in-sums")
    truth = claim_checks._federation(claim).truth
    assert truth is not None and len(set(truth)) == 4, "the default of label-swap"
    swapped = claim_checks._federation(replace(claim, scenario=LabelSwap(clusters=2)))
    assert swapped.truth is not None and len(set(swapped.truth)) == 2


def test_a_check_repeats(own_secrets: None) -> None:
    masked = Claim("labels", "README.md", "label-counts", {"mask": "permutation"}, clients=6)
    first, second = check_claim(masked), check_claim(masked)
    assert first.on.score == second.on.score and first.on.outcome == CHANCE


def test_the_same_options_of_both_runs_are_those_of_the_claim() -> None:
    claim = replace(claim_named("in-sums"), options={"mask": "permutation", "rounds": 1})
    small = replace(claim, protection={})
    fitted, _ = claim_checks._run(claim, False)
    twin, _ = claim_checks._run(small, False)
    assert (fitted.mask, fitted.aggregation, fitted.rounds) == ("permutation", "secagg", 1)
    assert (twin.mask, twin.aggregation, twin.rounds) == ("none", "plain", 1)
    assert fitted.model == twin.model == "linear"


def test_what_a_protocol_has_no_option_for_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(claim_checks.SMALL, "no_such_option", 1)
    assert check_claim("in-sums").holds


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("gone", "the claim 'gone', which is declared as no_such_module:IN_SUMS, cannot be"),
        ("absent", "declared as outside_claims:Absent, cannot be imported"),
        ("number", "declared as outside_claims:number, is no Claim: name one"),
        ("misspelt", "cannot be imported .*unexpected keyword argument 'protecion'"),
        ("in-sum", "did you mean 'in-sums'"),
    ],
)
def test_a_declaration_that_leads_to_no_claim_is_one_sentence(name: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        check_claim(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"attack": "linkag"}, "did you mean 'linkage'"),
        ({"protocol": "fedav"}, "did you mean 'fedavg'"),
        ({"party": "servr"}, "there is no party 'servr'"),
        ({"helpers": (9,)}, "9"),
        ({"protection": {"aggregaton": "secagg"}}, "hyper-parameter of FedAvg 'aggregaton'"),
        ({"protection": {"aggregation": "sums"}}, "aggregation"),
        ({"scenario": "label-swop"}, "did you mean 'label-swap'"),
    ],
)
def test_a_mistake_in_a_claim_is_one_sentence(changes: dict[str, object], sentence: str) -> None:
    claim = replace(claim_named("in-sums"), **changes)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=sentence) as caught:
        check_claim(claim)
    assert "\n" not in str(caught.value)


def test_without_any_declaration_it_is_said_where_they_belong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claim_checks, "PARTS", installed_packages.Parts("claim", "of nobody"))
    assert claim_names() == []
    with pytest.raises(UsageError, match="declares claims: declare 'in-sums'"):
        claim_named("in-sums")
