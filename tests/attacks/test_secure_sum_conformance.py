"""Clients refuse every lie of a server in secure sums, and a missing guard is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from securecluster import Federation
from securecluster.attacks.scoring import Score, evaluate
from securecluster.attacks.secure_sum_conformance import (
    LIES,
    SecureSumConformance,
    Server,
    first_sum,
)
from securecluster.attacks.views import knowledge_of, truth_of, view_of
from securecluster.privacy.masking.key_agreement import KeyRing
from securecluster.privacy.secure_sum.double_mask import UnmaskingGuard
from securecluster.privacy.secure_sum.shares import ShareSeal
from securecluster.protocols import SRFCA, FedAvg, Settings
from securecluster.runtime import key_exchange
from securecluster.runtime.endpoint import Endpoint

FULL = Settings(transcript="full", threads=1)
TINY: dict[str, Any] = {"rounds": 1, "epochs": 1, "model": "linear", "mask": "none"}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return Federation.simulate("digits", clients=6, samples=20, seed=0)


@pytest.fixture(scope="module")
def fitted(federation: Federation) -> FedAvg:
    return FedAvg(**TINY, aggregation="secagg").fit(federation, FULL)


def broken(fitted: Any, federation: Federation) -> set[str]:
    """Return the rules that clients of a run break."""
    attack = SecureSumConformance(fitted.build_client(federation, FULL))
    guess = attack.run(view_of(fitted), knowledge_of(fitted))
    return {rule for rule, held in guess.values.items() if not held}


def test_every_rule_holds(fitted: FedAvg, federation: Federation) -> None:
    assert not broken(fitted, federation)
    view = view_of(fitted)
    attack = SecureSumConformance(fitted.build_client(federation, FULL))
    found = evaluate(attack, view, knowledge_of(fitted), truth_of(fitted, federation, view, ()))
    assert isinstance(found, Score)
    assert found.value == 0 and not found.beats_chance


@pytest.mark.exhaustive
def test_every_rule_holds_after_training_alone(federation: Federation) -> None:
    made = SRFCA(**{**TINY, "rounds": 2}, aggregation="secagg", refine=1, retrain=0)
    assert not broken(made.fit(federation, FULL), federation)


def none(*arguments: Any, **named: Any) -> None:
    """Take the place of a check that raises an error or returns nothing."""


# a guard that is taken away -> a rule that is then broken
GUARDS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "a key that the server made is refused": (KeyRing, "verify", none),
    "two clients do not have one key": (key_exchange, "check_public_keys", none),
    "a row is of this run": (Endpoint, "_refuse_other_configuration", none),
    "an earlier attempt is over": (UnmaskingGuard, "_check_earlier_attempts", none),
    "few survivors are refused": (UnmaskingGuard, "_check_survivors", none),
    "no share of a client whose pads are open": (
        UnmaskingGuard,
        "reveal_shares",
        lambda self, context, survivors: self._record(context).holders,
    ),
    "an altered box is refused": (ShareSeal, "open", lambda *_: [1]),
}


@pytest.mark.parametrize("rule", list(GUARDS))
def test_a_rule_without_its_guard_is_found_broken(
    rule: str, fitted: FedAvg, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rule in LIES
    place, name, without = GUARDS[rule]
    monkeypatch.setattr(place, name, without)
    frames = first_sum(view_of(fitted), knowledge_of(fitted))
    assert frames is not None
    server = Server(fitted.build_client(federation, FULL), frames)
    assert not server.tell(LIES[rule]).refused


def test_without_secure_sums_or_clients_it_is_not_applicable(
    fitted: FedAvg, federation: Federation
) -> None:
    view = view_of(fitted)
    observed = SecureSumConformance().applies(view, knowledge_of(fitted))
    assert observed is not None and "only observed" in observed
    plain = FedAvg(**TINY).fit(federation, FULL)
    attack = SecureSumConformance(plain.build_client(federation, FULL))
    reason = attack.applies(view_of(plain), knowledge_of(plain))
    assert reason is not None and "no secure sums" in reason
    few = FedAvg(**TINY, aggregation="secagg", participation=0.6).fit(federation, FULL)
    attack = SecureSumConformance(few.build_client(federation, FULL))
    reason = attack.applies(view_of(few), knowledge_of(few))
    assert reason is not None and "no sum over 5 clients" in reason
