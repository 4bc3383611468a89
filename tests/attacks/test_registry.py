"""Attacks by name: this project's, and those that installed packages declare."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from securecluster.attacks import registry
from securecluster.attacks.base import Attack, Guess, Knowledge, Scorer, Truth, View
from securecluster.attacks.registry import ATTACKS, attack_named, attack_names
from securecluster.attacks.scoring import BETTER, CHANCE, UNDECIDED, Interval, Score, score
from securecluster.core import installed_packages
from securecluster.errors import UsageError


class Fixed(Scorer):
    metric = "fixed"

    def units(self, guess: Guess, truth: Truth) -> Any:
        return np.asarray(list(guess.values.values()))

    def shuffled(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> Any:
        return draw.random(len(guess.values))


class Unscored(Attack):
    name = "unscored"
    source = "nobody"
    needs = "nothing"

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        return None

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        return Guess("nothing", {})


class Outsider(Unscored):
    name = "outsider"
    scorer = Fixed()


class Nameless(Outsider):
    name = "other"


class Requiring(Outsider):
    name = "requiring"
    requires = ("true cluster",)


class Claiming(Outsider):
    name = "claiming"
    hidden_by = "a mask"


class Demanding(Outsider):
    name = "demanding"

    def __init__(self, secret: str) -> None:
        self.secret = secret


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = ModuleType("an_outsiders_module")
    for kind in (Outsider, Nameless, Requiring, Claiming, Demanding, Unscored, Fixed):
        setattr(module, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names = ("Outsider", "Nameless", "Requiring", "Claiming", "Demanding", "Unscored", "Gone")
    classes = {name.lower(): name for name in names} | {"scorer": "Fixed", "linkage": "Outsider"}
    found = []
    for name, own in classes.items():
        found.append(EntryPoint(name, f"{module.__name__}:{own}", registry.GROUP))
    monkeypatch.setattr(installed_packages, "points", lambda group: found)
    yield


def test_every_attack_of_this_project_says_what_it_is() -> None:
    assert list(ATTACKS) == attack_names()[: len(ATTACKS)]
    for name in ATTACKS:
        attack = attack_named(name)
        assert attack.name == name
        assert attack.source and attack.needs and isinstance(attack.scorer, Scorer)
        # "it could learn …", in words for whoever answers for the data
        assert {"learns", "harm"} <= vars(type(attack)).keys()
        assert re.fullmatch(r"[a-z][^.;]* [^.;]*", attack.learns) and name not in attack.learns


def test_an_outsiders_attack_is_found_and_takes_no_name_of_ours(declared: None) -> None:
    assert isinstance(attack_named("outsider"), Outsider)
    assert not isinstance(attack_named("linkage"), Outsider)
    assert attack_names().count("linkage") == 1
    assert "outsider" in attack_names()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nameless", "is called 'other' in its class"),
        ("requiring", "has 'true cluster' in requires: give a set of constants"),
        ("claiming", "has 'a mask' in hidden_by: give a set of constants"),
        ("demanding", "cannot be made without arguments"),
        ("unscored", "has no scorer: set it in its class"),
        ("scorer", "is no Attack"),
        ("gone", "cannot be imported"),
        ("linkag", "did you mean 'linkage'"),
    ],
)
def test_a_wrong_declaration_is_one_sentence(name: str, said: str, declared: None) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        attack_named(name)
    assert "\n" not in str(caught.value)


def test_a_score_has_an_interval_and_a_control() -> None:
    draw = np.random.default_rng(0)
    values = dict(enumerate(draw.normal(0.8, 0.1, 400)))
    result = score(Fixed(), Guess("x", values), Truth(federation=None))  # type: ignore[arg-type]
    mean = float(np.mean(list(values.values())))
    assert result.value == mean
    half = 1.96 * 0.1 / 20
    assert result.interval.low == pytest.approx(mean - half, abs=0.004)
    assert result.interval.high == pytest.approx(mean + half, abs=0.004)
    assert result.chance == pytest.approx(0.5, abs=0.01)
    assert result.beats_chance
    with pytest.raises(UsageError, match="names nothing has no score"):
        score(Fixed(), Guess("x", {}), Truth(federation=None))  # type: ignore[arg-type]


def _score(low: float, value: float, high: float, higher: bool = True) -> Score:
    """A score from low to high, where chance reaches 0.4 to 0.6."""
    return Score("x", value, Interval(low, high), 0.5, Interval(0.4, 0.6), higher, 9)


@pytest.mark.parametrize(
    ("scored", "verdict"),
    [
        (_score(0.61, 0.7, 0.8), BETTER),
        (_score(0.55, 0.7, 0.8), UNDECIDED),
        (_score(0.5, 0.6, 0.7), CHANCE),
        (_score(0.1, 0.2, 0.3), CHANCE),
        (_score(0.1, 0.2, 0.3, higher=False), BETTER),
        (_score(0.1, 0.2, 0.45, higher=False), UNDECIDED),
        (_score(0.3, 0.4, 0.5, higher=False), CHANCE),
        # an interval that does not hold its own score decides nothing
        (_score(0.61, 0.55, 0.8), CHANCE),
    ],
)
def test_a_verdict_takes_the_spread_of_chance_into_account(scored: Score, verdict: str) -> None:
    assert scored.verdict == verdict


class Largest(Fixed):
    """The best correlation with one of many random columns, which repeated units inflate."""

    def summary(self, units: Any) -> float:
        """Return the largest correlation of the first column with another."""
        columns = np.corrcoef(np.asarray(units).T)
        return float(np.abs(columns[0, 1:]).max())

    def units(self, guess: Guess, truth: Truth) -> Any:
        """Return random columns."""
        return np.random.default_rng(3).normal(size=(16, 40))

    def shuffled(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> Any:
        """Return other random columns."""
        return draw.normal(size=(16, 40))


def test_an_interval_holds_the_score_that_it_is_of() -> None:
    result = score(Largest(), Guess("x", {0: 0.0}), Truth(federation=None))  # type: ignore[arg-type]
    assert result.interval.low < result.value < result.interval.high


def test_nothing_generic_is_installed() -> None:
    # opacus brings top-level packages of such names; ours must not be imported by accident
    for name in ("attacks", "protocols"):
        found = importlib.util.find_spec(name)
        assert found is None or found.origin is None or "securecluster" not in found.origin
